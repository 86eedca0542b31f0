"""Draws docs/cache.svg: a part of the demo's chapter, its words as dark as heads keep them when an eighth is kept."""

import html
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import typer

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import groups

ROOT = Path(__file__).parents[2]
NEEDLE = "amber-lantern"
# Letters of a line, and in units of the picture their width, the lines' distance and the margin.
LETTERS, WIDTH, LINE, MARGIN = 92, 8.4, 21, 14
FAINTEST = 0.22
STYLE = "text{font:14px monospace;fill:#111;white-space:pre}@media(prefers-color-scheme:dark){text{fill:#eee}}"


def kept_by(text: str, ratio: float) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Where each token's letters lie, and the share of all heads that keep it by itself."""
    model = ckv.load("demo")
    encoded = model.tokenizer(text, return_offsets_mapping=True)
    tokens = jnp.asarray([encoded["input_ids"]], jnp.int32)
    method = ckv.completed(model, ckv.OrbitKV(ckv.Budget(ratio=ratio)))
    cache, _ = ckv.prefill(model.params, model.config, method, tokens, jnp.asarray([tokens.shape[1]], jnp.int32))
    kept, heads = np.zeros(tokens.shape[1]), 0
    for layer in cache.layers:
        for group in groups(layer):
            assert isinstance(group, ckv.LayerCache)
            assert group.positions is not None
            rows = zip(np.asarray(group.positions[0]), np.asarray(group.degree[0]), strict=True)
            for positions, degrees in rows:
                kept[positions[degrees == 1]] += 1
                heads += 1
    return encoded["offset_mapping"], kept / heads


def lines_around(text: str, place: int, count: int) -> list[tuple[int, int]]:
    """Begins and ends of `count` lines of whole words, the one with `place` in the middle."""
    lines, begin = [], 0
    while begin < len(text):
        end = begin + LETTERS if begin + LETTERS >= len(text) else text.rfind(" ", begin, begin + LETTERS) + 1
        lines.append((begin, end))
        begin = end
    middle = next(number for number, (_, end) in enumerate(lines) if place < end)
    return lines[max(0, middle - count // 2) :][:count]


def drawn(text: str, lines: list[tuple[int, int]], places: list[tuple[int, int]], kept: np.ndarray) -> str:
    """The picture: a line of text each, a token as opaque as heads keep it."""
    opacity = FAINTEST + (1 - FAINTEST) * np.minimum(kept / np.quantile(kept, 0.99), 1)
    width, height = 2 * MARGIN + LETTERS * WIDTH, 2 * MARGIN + len(lines) * LINE
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">', f"<style>{STYLE}</style>"]
    for number, (begin, end) in enumerate(lines):
        y, length = MARGIN + (number + 0.75) * LINE, (end - begin) * WIDTH
        parts.append(f'<text x="{MARGIN}" y="{y:.0f}" textLength="{length:.0f}">')
        for (first, last), dark in zip(places, opacity, strict=True):
            if piece := html.escape(text[max(first, begin) : min(last, end)]):
                parts[-1] += f'<tspan opacity="{dark:.2f}">{piece}</tspan>'
        parts[-1] += "</text>"
    return "\n".join([*parts, "</svg>\n"])


def main(
    ratio: Annotated[float, typer.Option(help="Share of the cache that is kept.")] = 0.125,
    lines: Annotated[int, typer.Option(help="Lines of text drawn.")] = 11,
    output: Annotated[Path, typer.Option(help="The picture.")] = ROOT / "docs" / "cache.svg",
) -> None:
    """Compress the chapter with `auto`; draw the words around the hidden number as dark as heads keep them."""
    text = ckv.demo_text()
    places, kept = kept_by(text, ratio)
    chosen = lines_around(text, text.index(f"{NEEDLE} is:"), lines)
    output.write_text(drawn(text, chosen, places, kept), encoding="utf-8")
    number = text.index("4821057")
    mine = [share for (first, last), share in zip(places, kept, strict=True) if number <= first and last <= number + 7]
    typer.echo(f"{kept.mean():.1%} of all tokens are kept by a head on average, {np.mean(mine):.1%} of the number")


if __name__ == "__main__":
    typer.run(main)
