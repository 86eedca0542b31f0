"""Greedy tokens of the demo model for every preset, on one device and then on another: are they the same?

    JAX_PLATFORMS=cpu python scripts/studies/compare_platforms.py tokens.json    writes what this device makes
    python scripts/studies/compare_platforms.py tokens.json                      compares, where the file is there

Two texts of unequal length are compressed to a half and continued beyond the next clustering, in float32. Where two
scores are equal but for rounding, either token is right: the first run also makes the tokens with all weights changed
in their seventh digit, and what differs then is compared no further.
"""

import argparse
import dataclasses
import json
import time
from itertools import takewhile
from pathlib import Path

import demo_chapter
import jax
import jax.numpy as jnp

from clusterkv_jax import Budget, Model, generate, load
from clusterkv_jax.presets import list_presets, preset

WORDS = (450, 600)
NEW_TOKENS = 136  # the cache is clustered again after 128
KEPT = 0.5
SHAKEN, BY = 4, 1e-6

Tokens = list[list[int]]


def greedy_tokens(name: str, model: Model) -> Tokens:
    """What the model writes behind both texts with this preset's cache."""
    words = demo_chapter.FILE.read_text(encoding="utf-8").split()
    prompts = [" ".join(words[:count]) for count in WORDS]
    budget = Budget(ratio=KEPT) if list_presets()[name].takes_budget else None
    return generate(model, prompts, method=preset(name, budget), max_new_tokens=NEW_TOKENS).tokens


def shaken(model: Model, seed: int, by: float = BY) -> Model:
    """The model with every weight changed by about `by` of itself."""
    weights, structure = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(seed), len(weights))
    changed = [x * (1 + by * jax.random.normal(key, x.shape)) for x, key in zip(weights, keys, strict=True)]
    return dataclasses.replace(model, params=jax.tree.unflatten(structure, changed))


def same(one: Tokens, other: Tokens) -> list[int]:
    """How many tokens each row begins with that are the same in both."""
    return [
        sum(1 for _ in takewhile(bool, (x == y for x, y in zip(*rows, strict=False))))
        for rows in zip(one, other, strict=True)
    ]


def main() -> None:
    """Write the tokens, or compare with those written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="written if it is not there, else compared with")
    parser.add_argument("presets", nargs="*", help="default all")
    options = parser.parse_args()
    model = load("demo", dtype=jnp.float32)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    names = options.presets or list(list_presets())
    (compare if options.file.exists() else write)(options.file, model, names)


def write(file: Path, model: Model, names: list[str]) -> None:
    """Tokens of every preset, and how many of each row do not hang on rounding."""
    models, results = [shaken(model, seed) for seed in range(SHAKEN)], {}
    for name in names:
        tokens = greedy_tokens(name, model)
        steady = [min(counts) for counts in zip(*(same(tokens, greedy_tokens(name, m)) for m in models), strict=True)]
        results[name] = {"tokens": tokens, "steady": steady}
        print(f"{name:24} {steady} of {[len(row) for row in tokens]} tokens do not hang on rounding", flush=True)
    file.write_text(json.dumps(results))


def compare(file: Path, model: Model, names: list[str]) -> None:
    """Exit with 1 if any preset makes other tokens than those written."""
    expected, wrong = json.loads(file.read_text()), []
    for name in names:
        start = time.perf_counter()
        tokens, steady = expected[name]["tokens"], expected[name]["steady"]
        equal = same(greedy_tokens(name, model), tokens)
        if any(count < least for count, least in zip(equal, steady, strict=True)):
            wrong.append(name)
        verdict = "differ" if name in wrong else "equal"
        counts = f"{equal} of {[len(row) for row in tokens]} tokens, {steady} not hanging on rounding"
        print(f"{name:24} {verdict}: {counts}, {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{len(names) - len(wrong)} of {len(names)} presets write the same tokens")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
