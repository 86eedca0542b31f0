"""Compares two runs of `clusterkv evaluate` answer by answer: a slice made here with the table it is a slice of, say.

    python scripts/compare_results.py results/slice docs/results/ruler-4096
    python scripts/compare_results.py results/bfloat16 results/float32 --differences

Compared is what both hold of a method, a budget and an example; results.jsonl may be compressed (.gz). Answers are the
same if their texts are and their scores to within 1e-5 of them (perplexities have no texts). The exit status is 1 if an
answer differs, 2 if the runs cannot be compared.

With --differences, the scores of each task are compared instead: the mean of the second run's less the first's, pair by
pair, with the 95 % interval of a paired bootstrap. Runs may differ in everything but their examples then.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterkv_jax.cli.terminal import one_sentence_errors
from clusterkv_jax.evaluation import records

Key = tuple[str, str, str]  # method, budget, example
WITHIN = 1e-5  # of a score
SAMPLES, EVERY_TASK = 10_000, "every task"


def read_answers(folder: Path) -> dict[Key, dict[str, Any]]:
    """The lines of a folder's results, by what was asked; a torn last line, as a kill leaves it, is left out."""
    files = [file for file in (folder / "results.jsonl", folder / "results.jsonl.gz") if file.exists()]
    if len(files) != 1:
        raise ValueError(f"{folder} must hold either results.jsonl or results.jsonl.gz.")
    answers: dict[Key, dict[str, Any]] = {}
    for where, line in records.read_answers(files[0]):
        key = line["method"], line["budget"], line["id"]
        if key in answers:
            raise ValueError(f"{where} answers {key[0]} with budget {key[1]} of example {key[2]} a second time.")
        answers[key] = line
    return answers


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers have the same text and, but for rounding, the same score."""
    return one["output"] == other["output"] and math.isclose(one["score"], other["score"], rel_tol=WITHIN)


def shown(answer: dict[str, Any]) -> Text:
    """An answer's text, or its score where it has none."""
    return Text(repr(answer["output"] or answer["score"]))


def shared_answers(first: Path, second: Path) -> tuple[dict[Key, Any], dict[Key, Any], list[Key]]:
    """Both runs' answers, and what both answer. Raises ValueError where that is nothing, or was asked otherwise."""
    ours, theirs = read_answers(first), read_answers(second)
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise ValueError(f"{first} and {second} have no method, budget and example in common.")
    other = next((key for key in shared if ours[key]["prompt"] != theirs[key]["prompt"]), None)
    if other is not None:
        raise ValueError(
            f"{first} and {second} asked {other[2]} otherwise: other texts, seeds or tokenizers, or "
            "--query-aware in one of them."
        )
    return ours, theirs, shared


def interval(differences: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """The 95 % interval of their mean: percentiles of the means of samples drawn with replacement (Efron, 1979)."""
    rng, at_once = np.random.default_rng(0), 100
    means = [rng.choice(differences, (at_once, len(differences))).mean(axis=1) for _ in range(SAMPLES // at_once)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def differences(first: Path, second: Path) -> tuple[Table, str]:
    """A row for every method, budget and task that both have, and for all tasks of a method and budget; a summary."""
    ours, theirs, shared = shared_answers(first, second)
    groups: dict[Key, list[float]] = defaultdict(list)
    for method, budget, name in shared:
        key = method, budget, name
        for task in (ours[key]["task"], EVERY_TASK):
            groups[method, budget, task].append(theirs[key]["score"] - ours[key]["score"])
    table = Table("method", "budget", "task", "pairs", "difference", "95 % interval", box=None, pad_edge=False)
    for group, values in sorted(groups.items(), key=lambda item: (*item[0][:2], item[0][2] == EVERY_TASK, item[0])):
        low, high = interval(np.asarray(values))
        numbers = f"{len(values)}", f"{np.mean(values):+.4f}", f"{low:+.4f} to {high:+.4f}"
        table.add_row(*map(Text, (*group, *numbers)))
    return table, f"The scores of {second} less those of {first}, of {len(shared):,} pairs."


def compare(first: Path, second: Path) -> tuple[Table, int, str]:
    """A row for every method, budget and task that both have, the answers that differ below it; how many; a summary."""
    ours, theirs, shared = shared_answers(first, second)
    groups: dict[Key, list[Key]] = defaultdict(list)
    for key in shared:
        groups[key[0], key[1], ours[key]["task"]].append(key)
    table = Table("method", "budget", "task", "same answers", "", box=None, pad_edge=False)
    different = 0
    for group, keys in groups.items():
        apart = [key for key in keys if not same(ours[key], theirs[key])]
        table.add_row(*map(Text, group), f"{len(keys) - len(apart)} of {len(keys)}")
        for key in apart:
            table.add_row("", "", Text(f"  {key[2]}"), shown(ours[key]), shown(theirs[key]))
        different += len(apart)
    alone = f"{len(ours) - len(shared):,} answers are in {first} alone, {len(theirs) - len(shared):,} in {second} alone"
    return table, different, f"{len(shared) - different:,} of {len(shared):,} answers are the same; {alone}."


def main(
    first: Annotated[Path, typer.Argument(help="A folder with results.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    by_score: Annotated[bool, typer.Option("--differences", help="Mean differences of scores, pair by pair.")] = False,
) -> None:
    """Print which answers of two runs are the same, or by how much their scores differ."""
    with one_sentence_errors(False):
        if by_score:
            (table, summary), different = differences(first, second), 0
        else:
            table, different, summary = compare(first, second)
    console = Console(width=160)
    console.print(table, highlight=False)
    console.print(summary, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if different else 0)


if __name__ == "__main__":
    typer.run(main)
