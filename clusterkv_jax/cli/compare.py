"""`clusterkv compare`: two evaluations answer by answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterkv_jax.cli.terminal import one_sentence_errors, plain_console

EXAMPLES = """[bold]Examples[/bold]

What did a change win and lose?

  clusterkv compare results/before results/after

Two methods of one evaluation:

  clusterkv compare results/mine:snapkv@0.25 results/mine:auto@0.25"""

_SIDE = "A folder of results, or FOLDER:METHOD@BUDGET for one row of it."


def compare(
    first: Annotated[str, typer.Argument(help=_SIDE, show_default=False)],
    second: Annotated[str, typer.Argument(help=_SIDE, show_default=False)],
    examples: Annotated[int, typer.Option(help="Most examples to show of those won, and of those lost.", min=0)] = 3,
    exact: Annotated[bool, typer.Option("--exact", help="Show answers that differ; end with 1 if any does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Hold two evaluations of the same examples against each other: differences with intervals, won and lost examples.

    A difference is the second mean less the first. Its 95 % interval is that of a bootstrap over pairs of answers.
    """
    with one_sentence_errors(debug):
        from clusterkv_jax.evaluation import comparison

        pairs, alone = comparison.paired(comparison.side(first), comparison.side(second))
        rows = list(comparison.differences(pairs))
        decided = sorted((pair for pair in pairs if pair.decided), key=lambda pair: -abs(pair.gain))
        shown = {
            "won": [pair for pair in decided if pair.gain > 0][:examples],
            "lost": [pair for pair in decided if pair.gain < 0][:examples],
        }
        different = [pair for pair in pairs if not pair.same]
        shown |= {"different": different[:examples]} if exact else {}
        if as_json:
            found = {name: [asdict(pair) for pair in each] for name, each in shown.items()}
            about = {"first": first, "second": second, "alone": alone, "rows": [asdict(row) for row in rows]}
            print(json.dumps({**about, **found}, indent=2))
        else:
            _print(rows, pairs, alone, shown)
    raise typer.Exit(1 if exact and different else 0)


def _print(
    rows: Sequence[Any], pairs: Sequence[Any], alone: tuple[int, int], shown: Mapping[str, Sequence[Any]]
) -> None:
    console = plain_console(highlight=False)
    perplexity = pairs[0].first["metric"] == "nll"
    for row in dict.fromkeys(row.row for row in rows):
        console.print(Text(row, style="bold"), soft_wrap=True)
        console.print(_table([each for each in rows if each.row == row], perplexity))
    for name, each in shown.items():
        for pair in each:
            _example(console, name, pair)
    scores = "cross-entropies in nats, where less is better" if perplexity else "scores in per cent"
    console.print(f"{len(pairs):,} pairs of answers, {sum(pair.same for pair in pairs):,} the same; {scores}.")
    if any(alone):
        console.print(f"Without a partner are {alone[0]:,} answers of the first, and {alone[1]:,} of the second.")


def _table(rows: Sequence[Any], perplexity: bool) -> Table:
    """Both means, their difference with its interval, and how often the second was better."""
    scale, digits = (1, 3) if perplexity else (100, 1)
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    names = ("task", "n", "first", "second", "difference", "won", "lost", "same")
    for name in names:
        table.add_column(name, justify="left" if name == "task" else "right", no_wrap=name != "task")
    for row in rows:
        means = [f"{scale * value:.{digits}f}" for value in (row.first, row.second)]
        gap, low, high = (f"{scale * value:+.{digits}f}" for value in (row.difference, row.low, row.high))
        counts = [str(count) for count in (row.won, row.lost, row.same)]
        table.add_row(Text(row.task), str(row.pairs), *means, f"{gap} ({low} to {high})", *counts)
    return table


def _example(console: Console, name: str, pair: Any) -> None:
    """The question, what was expected, and both answers side by side."""
    from clusterkv_jax.evaluation.report.examples import excerpt

    console.print(Text(f"{name}: {pair.row}, {pair.first['id']}", style="bold"), soft_wrap=True)
    for label in ("question", "expected"):
        said = pair.first.get(label)
        if said:
            console.print(Text(f"{label}: {excerpt(said if isinstance(said, str) else ' | '.join(said))}"))
    both = Table(box=SIMPLE_HEAD, expand=True)
    for place, line in (("first", pair.first), ("second", pair.second)):
        both.add_column(f"{place}, score {line['score']:.4g}", ratio=1)
    both.add_row(*(Text(excerpt(line["output"])) for line in (pair.first, pair.second)))
    console.print(both)
