"""What each part of GravityKV's edge score is worth: needles found by the demo model with parts left out or changed.

The cases are those of `needle_scores.py`: four needles in a chapter, read and compressed once before any question is
known, then asked for one by one. A hit is the exact value.
"""

from dataclasses import replace
from typing import Annotated

import demo_chapter
import needle_scores
import typer

import clusterkv_jax as ckv

BASE = ckv.GravityKV(ckv.Budget(ratio=1.0))
VARIANTS = {
    "GravityKV": BASE,
    "distance of keys alone": replace(BASE, value_weight=0.0, gravity=0.0),
    "without gravity": replace(BASE, gravity=0.0),
    "without values": replace(BASE, value_weight=0.0),
    "half the weight of values": replace(BASE, value_weight=0.5),
    "twice the weight of values": replace(BASE, value_weight=2.0),
    "twice the gravity": replace(BASE, gravity=0.1),
    "heavy clusters repel (Ward-like)": replace(BASE, gravity=-0.05),
    "rounds of 0.2": replace(BASE, merge_ratio=0.2),
    "rounds of 0.45": replace(BASE, merge_ratio=0.45),
    "chunks of 128": replace(BASE, chunk=128),
    "chunks of 512": replace(BASE, chunk=512),
    "cosine of keys (CentroidKV)": ckv.CentroidKV(ckv.Budget(ratio=1.0)),
}


def main(
    model: Annotated[str, typer.Option(help="'demo' or a folder.")] = "demo",
    shares: Annotated[str, typer.Option(help="Shares of the cache, between commas.")] = "0.25,0.125,0.0625",
    kinds: Annotated[str, typer.Option(help="Kinds of values: numbers, words, uuids, between commas.")] = "numbers",
    cases: Annotated[int, typer.Option(help="Contexts; each is asked four questions.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of a context.")] = 3584,
    seed: Annotated[int, typer.Option(help="Of depths, keys and values.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="Type of the parameters.", show_default="as stored")] = None,
) -> None:
    """Measure every variant: a Markdown table, a row as soon as it is known, a column for each kind and share."""
    decoder = ckv.load(model, dtype=dtype)
    columns = [(kind, float(share)) for kind in kinds.split(",") for share in shares.split(",")]
    contexts = {
        kind: demo_chapter.contexts(
            decoder.tokenizer, tokens, cases, seed, replace(demo_chapter.NEEDLES, value_kind=kind)
        )
        for kind in kinds.split(",")
    }
    names = [f"{kind}, {share:.2%}" for kind, share in columns]
    print("| variant | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|", sep="\n", flush=True)
    for name, method in VARIANTS.items():
        values = [
            needle_scores.score(
                decoder, replace(method, budget=ckv.Budget(ratio=share)), contexts[kind], f"{name} {share:.2%}"
            )
            for kind, share in columns
        ]
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
