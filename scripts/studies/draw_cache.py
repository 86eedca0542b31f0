"""Draws docs/cache.svg: what is left of the demo's chapter in one layer's cache when a quarter of the rows is kept."""

from pathlib import Path
from typing import Annotated

import demo_chapter
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import typer

import clusterkv_jax as ckv

ROOT = Path(__file__).parents[2]


def kept_rows(layer: int, ratio: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Positions and degrees of the first KV head's rows in `layer`, and the tokens of the text."""
    model = ckv.load("demo")
    text = demo_chapter.FILE.read_text(encoding="utf-8")
    tokens = jnp.asarray([model.tokenizer.encode(text)], jnp.int32)
    method = ckv.CentroidKV(ckv.Budget(ratio=ratio))
    lengths = jnp.asarray([tokens.shape[1]], jnp.int32)
    cache, _ = ckv.prefill(model.params, model.config, method, tokens, lengths)
    rows = cache.layers[layer]
    assert isinstance(rows, ckv.LayerCache)
    assert rows.positions is not None
    count = int(rows.length[0, 0])
    return np.asarray(rows.positions[0, 0, :count]), np.asarray(rows.degree[0, 0, :count]), tokens.shape[1]


def main(
    layer: Annotated[int, typer.Option(help="Which layer.")] = 2,
    ratio: Annotated[float, typer.Option(help="Share of the rows kept.")] = 0.25,
    output: Annotated[Path, typer.Option(help="The picture.")] = ROOT / "docs" / "cache.svg",
) -> None:
    """Prefill the chapter with CentroidKV; draw each kept row at its place, as high as the tokens it stands for."""
    positions, degrees, tokens = kept_rows(layer, ratio)
    alone = degrees == 1
    plt.rcParams["svg.hashsalt"] = "cache"  # the same numbers give the same file
    figure, axes = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
    axes.vlines(positions[~alone], 0, degrees[~alone], color="C0", linewidth=0.6, label=f"{sum(~alone):,} centroids")
    axes.plot(positions[alone], degrees[alone], ".", color="C1", markersize=2, label=f"{sum(alone):,} single tokens")
    axes.set(xlabel="position in the text", ylabel="tokens per row", xlim=(-20, tokens + 20), yscale="log")
    axes.set_title(f"{tokens:,} tokens in {len(positions):,} rows: layer {layer}, head 0, CentroidKV", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
    figure.savefig(output, metadata={"Date": None})
    typer.echo(f"{len(positions)} rows for {tokens} tokens, {sum(alone)} single, largest {degrees.max():.0f}: {output}")


if __name__ == "__main__":
    typer.run(main)
