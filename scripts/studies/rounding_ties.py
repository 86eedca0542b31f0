"""What of a compressed cache hangs on rounding: rows that change when the model's parameters change by an ulp.

    python scripts/studies/rounding_ties.py
    python scripts/studies/rounding_ties.py --methods h2o,chunkkv --budget 0.5 --noise 1e-6

Reads the demo's chapter, and sentences that repeat themselves as in RULER's vt, in float32 twice, the second time with
parameters that differ by noise relative to them, and prints the share of each layer's rows (position and degree) that
the second cache does not hold. Another platform, whose sums have another order, is a change of about this size.
"""

from typing import Annotated, Any

import demo_chapter
import jax
import jax.numpy as jnp
import numpy as np
import typer
from compare_platforms import shaken
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax.cache import groups
from clusterkv_jax.cli.terminal import one_sentence_errors
from clusterkv_jax.evaluation.tasks.synthetic import NOISE
from clusterkv_jax.presets import preset


def kept(model: ckv.Model, method: Any, tokens: jax.Array) -> list[set[tuple[int, int, int, int]]]:
    """(group, head, position, degree) of each layer's rows."""
    cache, _ = ckv.prefill(model.params, model.config, method, tokens, jnp.asarray([tokens.shape[1]], jnp.int32))
    layers = []
    for layer in cache.layers:
        rows: set[tuple[int, int, int, int]] = set()
        for i, group in enumerate(groups(layer)):
            assert group.positions is not None
            parts = (np.asarray(x[0]) for x in (group.positions, group.degree, group.length))
            for head, (positions, degree, length) in enumerate(zip(*parts, strict=True)):
                rows |= {(i, head, int(p), int(d)) for p, d in zip(positions[:length], degree[:length], strict=True)}
        layers.append(rows)
    return layers


def main(
    methods: Annotated[str, typer.Option(help="Presets, between commas.")] = "gravitykv,centroidkv,chunkkv,snapkv",
    budget: Annotated[float, typer.Option(help="Share of the cache that is kept.")] = 0.25,
    noise: Annotated[float, typer.Option(help="Change of the parameters, relative to them.")] = 1e-7,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
) -> None:
    """Print the share of each layer's rows that noise changes."""
    with one_sentence_errors(False):
        names = [name.strip() for name in methods.split(",")]
        presets = {name: preset(name, ckv.Budget(ratio=budget)) for name in names}
        for name, method in presets.items():
            if method.holds in ("pages", "index", "host"):
                raise ValueError(f"{name} has no rows to compare by head: it keeps all, or shares pages among heads.")
        model = ckv.load("demo", dtype="float32")
        both = model, shaken(model, seed, noise)
        chapter = model.tokenizer.encode(demo_chapter.FILE.read_text(encoding="utf-8"))
        repeated = model.tokenizer.encode(f"{NOISE}\n" * len(chapter), verbose=False)[: len(chapter)]
        for title, ids in (("a chapter", chapter), ("sentences that repeat themselves", repeated)):
            layers = (f"layer {i}" for i in range(model.config.num_layers))
            table = Table("method", *layers, box=SIMPLE_HEAD, title=f"{title}, {len(ids):,} tokens, {budget:.1%} kept")
            for name, method in presets.items():
                tokens = jnp.asarray([ids], jnp.int32)
                pairs = zip(*(kept(one, method, tokens) for one in both), strict=True)
                table.add_row(name, *(f"{len(rows - others) / len(rows):.1%}" for rows, others in pairs))
            Console().print(table)


if __name__ == "__main__":
    typer.run(main)
