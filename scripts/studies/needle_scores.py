"""How often the demo model finds a needle, by method and by the share of the cache that is kept.

Each context is the demo's chapter with four needles at random depths (RULER's wording, keys held out from training).
It is read and compressed once, without any question; then it is asked for each of the four numbers. A hit is exactly
the right reply.
"""

import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax.evaluation.tasks import haystack, synthetic
from clusterkv_jax.presets import preset

ROOT = Path(__file__).parents[2]
NEEDLES = synthetic.Needles(keys=4)
REPLY = 32  # tokens: a uuid and the end of the sentence


def contexts(
    tokenizer: Any, tokens: int, count: int, seed: int, needles: synthetic.Needles = NEEDLES
) -> list[tuple[synthetic.Example, ...]]:
    """`count` contexts of `tokens` tokens, each as an example per key."""

    def tokens_of(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    text = (ROOT / "configs" / "demo" / "mast_head.txt").read_text(encoding="utf-8").split("\n")[1]
    chapter = re.sub(r" One of the special magic numbers for \S+ is: \d+\.", "", text)
    book = haystack.book(chapter, lambda texts: [tokens_of(text) for text in texts])
    return [
        synthetic.niah(
            np.random.default_rng([seed, i]), tokens, tokens_of, needles, book, questions=needles.keys, split="valid"
        )
        for i in range(count)
    ]


def score(model: ckv.Model, method: Any, cases: list[tuple[synthetic.Example, ...]], name: str) -> float:
    """Share of questions answered with exactly the right value."""
    hits = []
    for examples in track(cases, name, console=Console(stderr=True), transient=True):
        asked = [example.question + example.answer_prefix for example in examples]
        result = ckv.generate(
            model, [example.context for example in examples], questions=asked, method=method, max_new_tokens=REPLY
        )
        hits += [text == example.reply for text, example in zip(result.texts, examples, strict=True)]
    return float(np.mean(hits))


def main(
    model: Annotated[str, typer.Option(help="'demo' or a folder.")] = "demo",
    methods: Annotated[str, typer.Option(help="Presets, between commas.")] = (
        "gravitykv,centroidkv,snapkv,chunkkv,streamingllm"
    ),
    shares: Annotated[str, typer.Option(help="Shares of the cache, between commas.")] = "0.5,0.25,0.125",
    cases: Annotated[int, typer.Option(help="Contexts; each is asked four questions.")] = 24,
    tokens: Annotated[int, typer.Option(help="Tokens of a context.")] = 3584,
    seed: Annotated[int, typer.Option(help="Of depths, keys and values.")] = 0,
) -> None:
    """Measure and print the table."""
    loaded = ckv.load(model, dtype="float32")  # the same on every platform
    made = contexts(loaded.tokenizer, tokens, cases, seed)
    ratios = [float(share) for share in shares.split(",")]
    table = Table("method", *(f"{ratio:.2%}" for ratio in (1.0, *ratios)), title=f"{cases * NEEDLES.keys} questions")
    full = score(loaded, ckv.Full(), made, "full")
    for name in methods.split(","):
        found = [score(loaded, preset(name, ckv.Budget(ratio=ratio)), made, f"{name} {ratio:.2%}") for ratio in ratios]
        table.add_row(name, *(f"{value:.2f}" for value in (full, *found)))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
