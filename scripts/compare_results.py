"""Compares two runs of `clusterkv evaluate` answer by answer: a slice made here with the table it is a slice of, say.

    python scripts/compare_results.py results/slice docs/results/ruler-4096

Compared is what both hold of a method, a budget and an example; results.jsonl may be compressed (.gz). The exit status
is 1 if an answer differs.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterkv_jax.terminal import one_sentence_errors

Key = tuple[str, str, str]  # method, budget, example


def read_answers(folder: Path) -> dict[Key, dict[str, Any]]:
    """The lines of a folder's results, by what was asked."""
    for name, open_file in (("results.jsonl", open), ("results.jsonl.gz", gzip.open)):
        if (folder / name).exists():
            with open_file(folder / name, "rt", encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
            return {(line["method"], line["budget"], line["id"]): line for line in lines}
    raise ValueError(f"{folder} holds no results.jsonl and no results.jsonl.gz.")


def compare(first: Path, second: Path) -> tuple[Table, int]:
    """A row for every method, budget and task that both have, a line for every answer that differs; how many do."""
    ours, theirs = read_answers(first), read_answers(second)
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise ValueError(f"{first} and {second} have no method, budget and example in common.")
    other = next((key for key in shared if ours[key]["prompt"] != theirs[key]["prompt"]), None)
    if other is not None:
        raise ValueError(f"{first} and {second} asked {other[2]} otherwise: other texts, tokenizers or --query-aware.")
    groups: dict[tuple[str, str, str], list[Key]] = defaultdict(list)
    for key in shared:
        groups[key[0], key[1], ours[key]["task"]].append(key)
    table = Table("method", "budget", "task", "same answers", "same scores", box=None, pad_edge=False)
    different = 0
    for group, keys in groups.items():
        apart = [key for key in keys if ours[key]["output"] != theirs[key]["output"]]
        scores = sum(ours[key]["score"] == theirs[key]["score"] for key in keys)
        table.add_row(*group, f"{len(keys) - len(apart)} of {len(keys)}", f"{scores} of {len(keys)}")
        for key in apart:
            texts = (Text(repr(lines[key]["output"])) for lines in (ours, theirs))
            table.add_row("", "", f"  {key[2]}", *texts)
        different += len(apart)
    return table, different


def main(
    first: Annotated[Path, typer.Argument(help="A folder with results.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Print which answers of two runs are the same."""
    with one_sentence_errors(False):
        table, different = compare(first, second)
    Console(width=160).print(table, highlight=False)
    raise typer.Exit(1 if different else 0)


if __name__ == "__main__":
    typer.run(main)
