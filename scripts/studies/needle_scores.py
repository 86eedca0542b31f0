"""How often the demo model finds a needle, by method and by the share of the cache that is kept.

Each context is the demo's chapter with four needles at random depths (RULER's wording, keys held out from training).
It is read and compressed once, without any question; then it is asked for each of the four numbers. A hit is exactly
the right reply.
"""

from typing import Annotated, Any

import demo_chapter
import numpy as np
import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax.evaluation.tasks import synthetic
from clusterkv_jax.presets import preset

REPLY = 32  # tokens: a uuid and the end of the sentence


def score(model: ckv.Model, method: Any, cases: list[tuple[synthetic.Example, ...]], name: str) -> float:
    """Share of questions answered with exactly the right value."""
    hits = []
    for examples in track(cases, name, console=Console(stderr=True), transient=True):
        questions = [example.question + example.answer_prefix for example in examples]
        result = ckv.generate(
            model, [example.context for example in examples], questions=questions, method=method, max_new_tokens=REPLY
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
    dtype: Annotated[str, typer.Option(help="Of the model; float32 answers alike on every platform.")] = "float32",
    cache_dtypes: Annotated[str, typer.Option(help="Types of stored rows, between commas; none is the model's.")] = (
        "none"
    ),
) -> None:
    """Measure and print the table."""
    decoder = ckv.load(model, dtype=dtype)
    examples = demo_chapter.contexts(decoder.tokenizer, tokens, cases, seed)
    ratios = [float(share) for share in shares.split(",")]
    title = f"{cases * demo_chapter.NEEDLES.keys} questions"
    table = Table("method", "rows", *(f"{ratio:.2%}" for ratio in (1.0, *ratios)), title=title, box=MARKDOWN)
    budgets = [ckv.Budget(ratio=ratio) for ratio in ratios]
    for stored in cache_dtypes.split(","):
        setting: Any = {} if stored == "none" else {"cache_dtype": stored}
        full = score(decoder, ckv.Full(**setting), examples, f"full {stored}")
        for name in methods.split(","):
            found = [preset(name, budget, **setting) for budget in budgets]
            values = [score(decoder, one, examples, f"{name} {stored} {one.budget.ratio:.2%}") for one in found]
            shown = (f"{value:.3f}" for value in (full, *values))
            table.add_row(name, dtype if stored == "none" else stored, *shown)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
