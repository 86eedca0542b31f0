"""Greedy tokens of the demo model for every preset, on one device and then on another: are they the same?

    JAX_PLATFORMS=cpu python scripts/compare_platforms.py tokens.json    writes what this device makes
    python scripts/compare_platforms.py tokens.json                      compares, where the file is there

Two texts of unequal length are compressed to a quarter and continued beyond the next clustering, in float32.
"""

import argparse
import json
import time
from pathlib import Path

import jax

from clusterkv_jax import Budget, generate, load
from clusterkv_jax.presets import list_presets, preset

TEXT = Path(__file__).parent.parent / "configs" / "demo" / "mast_head.txt"
WORDS = (420, 600)
NEW_TOKENS = 136  # the cache is clustered again after 128
KEPT = 0.25


def greedy_tokens(name: str, model, prompts: list[str]) -> list[list[int]]:
    """What the model writes with this preset's cache."""
    budget = Budget(ratio=KEPT) if list_presets()[name].takes_budget else None
    return generate(model, prompts, method=preset(name, budget), max_new_tokens=NEW_TOKENS).tokens


def main() -> None:
    """Write the tokens, or compare with those written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="written if it is not there, else compared with")
    parser.add_argument("presets", nargs="*", help="default all")
    options = parser.parse_args()
    expected = json.loads(options.file.read_text()) if options.file.exists() else None
    model = load("demo", dtype="float32")
    words = TEXT.read_text().split()
    prompts = [" ".join(words[:count]) for count in WORDS]
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {device}" + (f", compared with {expected['device']}" if expected else ""))
    made, equal = {}, 0
    for name in options.presets or list_presets():
        start = time.perf_counter()
        made[name] = greedy_tokens(name, model, prompts)
        line = f"{name:24} {time.perf_counter() - start:5.1f} s"
        if expected:
            same = made[name] == expected["tokens"].get(name)
            equal += same
            line += "  equal" if same else f"  differ: {_first_difference(made[name], expected['tokens'].get(name))}"
        print(line, flush=True)
    if expected is None:
        options.file.write_text(json.dumps({"device": device, "tokens": made}))
        return
    print(f"{equal} of {len(made)} presets write the same tokens")
    raise SystemExit(equal != len(made))


def _first_difference(made: list[list[int]], expected: list[list[int]] | None) -> str:
    if expected is None:
        return "not in the file"
    for row, (a, b) in enumerate(zip(made, expected, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"row {row}, token {i} of {len(b)}"
    return "lengths"


if __name__ == "__main__":
    main()
