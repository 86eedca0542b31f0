"""From lines to a table: methods x budgets by tasks, with intervals, beside what papers print."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from clusterkv_jax.evaluation.tasks import longbench, ruler, state, turns
from clusterkv_jax.storage import schema

Z95 = 1.959964
Line = Mapping[str, Any]
# The suites' own; others as they come.
_ORDER = {task: i for i, task in enumerate((*ruler.TASKS, *longbench.TASKS, *turns.TASKS, *state.TASKS))}


@dataclass(frozen=True)
class TableCell:
    """A mean in per cent (for "nll": a perplexity) of `count` examples, and how far its 95 % interval reaches."""

    value: float
    below: float = 0.0
    above: float = 0.0
    count: int = 0


@dataclass(frozen=True)
class TableRow:
    """One method and budget: a cell per column that it has, their average, and where the numbers are from.

    Of what is measured also the share of the cache that the budget is, and, where the lines say, mean megabytes of an
    example's cache and mean seconds of an answer.
    """

    method: str
    budget: str
    cells: Mapping[str, TableCell]
    average: TableCell
    source: str = "measured"
    share: float = 1.0
    megabytes: float | None = None
    seconds: float | None = None

    @property
    def measured(self) -> bool:
        """Whether this is of the run, not of a paper."""
        return self.source == "measured"

    @property
    def name(self) -> str:
        """Method and budget, as in "snapkv 25%"."""
        return self.method if self.method == "full" else f"{self.method} {budget_name(self.budget)}"


@dataclass(frozen=True)
class Summary:
    """A table: columns in their suite's order, rows in order of the run, the full cache first; remarks go below it."""

    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    perplexity: bool
    uncompressed: int = 0
    cut: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def measured(self) -> list[TableRow]:
        """The rows of the run, without those of papers."""
        return [row for row in self.rows if row.measured]


def summarize(lines: Sequence[Line], sessions: Sequence[Mapping[str, Any]] = ()) -> Summary:
    """Means and 95 % intervals of every method, budget and column; remarks where sessions had different versions.

    Wilson's interval for scores from 0 to 1 (for shares between them it is wider than need be), the normal one for
    cross-entropies. The average of the columns counts each equally.
    """
    if not lines:
        raise ValueError("There are no results to sum up.")
    perplexity = lines[0]["metric"] == "nll"
    several = len({line["facts"].get("length") for line in lines}) > 1
    groups: dict[tuple[str, str], dict[str, list[Line]]] = {}
    for line in lines:
        by_task = groups.setdefault((line["method"], line["budget"]), {})
        by_task.setdefault(column(line, several), []).append(line)
    tasks = dict.fromkeys(name for by_task in groups.values() for name in by_task)
    columns = tuple(sorted(tasks, key=lambda name: _ORDER.get(name.split("@")[0], len(_ORDER))))
    ordered = sorted(groups, key=lambda group: group[0] != "full")
    rows = tuple(_measured(group, groups[group], perplexity) for group in ordered)
    return Summary(
        columns,
        rows,
        perplexity,
        uncompressed=sum(not line["compressed"] for line in lines),
        cut=sum(line["cut"] > 0 for line in lines),
        remarks=(*_unlike(rows, columns), *_versions(sessions)),
    )


def _measured(group: tuple[str, str], by_task: Mapping[str, Sequence[Line]], perplexity: bool) -> TableRow:
    """The row of a method and budget."""
    method, budget = group
    cells = {name: _cell([line["score"] for line in lines], perplexity) for name, lines in by_task.items()}
    every = [line for lines in by_task.values() for line in lines]
    held, tokens = _mean(every, "cache_bytes"), _mean(every, "tokens")
    of_rows = budget.isdigit() and budget != "1"
    return replace(
        _row(method, budget, cells, perplexity),
        share=min(1.0, float(budget) / tokens if of_rows and tokens else float(budget)),
        megabytes=None if held is None else held / 1e6,
        seconds=_mean(every, "seconds"),
    )


def _mean(lines: Sequence[Line], name: str) -> float | None:
    """Over the lines that have this."""
    values = [line[name] for line in lines if name in line]
    return float(np.mean(values)) if values else None


def _unlike(rows: Sequence[TableRow], columns: Sequence[str]) -> list[str]:
    """What to say of rows that do not answer all that others do."""
    counts = [tuple(row.cells[name].count if name in row.cells else 0 for name in columns) for row in rows]
    most = tuple(map(max, zip(*counts, strict=True)))
    fewer = [row.name for row, each in zip(rows, counts, strict=True) if each != most]
    shown = ", ".join(fewer[:5]) + (f" and {len(fewer) - 5} more" if len(fewer) > 5 else "")
    return [f"Not all examples are answered by {shown}; averages are of what is."] if fewer else []


def _versions(sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to say of sessions that made answers with other versions of libraries than the first."""
    made = [session for session in sessions if session.get("answers") != 0]
    found: dict[str, dict[str, None]] = {}
    for session in made:
        versions = session.get("versions")
        for name, version in versions.items() if isinstance(versions, dict) else ():
            found.setdefault(name, {})[str(version)] = None
    several = [f"{name} {' and '.join(each)}" for name, each in found.items() if len(each) > 1]
    return [f"Answers are of different versions: {', '.join(several)}."] if several else []


def column(line: Line, several_lengths: bool) -> str:
    """A task, with its length or position where there are several."""
    facts, task = line["facts"], line["task"]
    if "position" in facts:
        return f"{task}@{facts['position']}"
    return f"{task}@{facts['length']}" if several_lengths and "length" in facts else task


def wilson(scores: Sequence[float]) -> tuple[float, float]:
    """Wilson's 95 % interval of a mean of numbers from 0 to 1."""
    n, p = len(scores), float(np.mean(scores))
    middle = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    return middle - half, middle + half


def _cell(scores: Sequence[float], perplexity: bool) -> TableCell:
    n, mean = len(scores), float(np.mean(scores))
    if not perplexity:
        low, high = wilson(scores)
        # At 0 and 100 % the interval ends in the mean, but for rounding.
        return TableCell(100 * mean, 100 * max(0.0, mean - low), 100 * max(0.0, high - mean), n)
    half = Z95 * float(np.std(scores, ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return TableCell(math.exp(mean), math.exp(mean) - math.exp(mean - half), math.exp(mean + half) - math.exp(mean), n)


def _row(
    method: str, budget: str, cells: Mapping[str, TableCell], perplexity: bool, source: str = "measured"
) -> TableRow:
    values = [cell.value for cell in cells.values()]
    mean = math.exp(float(np.mean(np.log(values)))) if perplexity else float(np.mean(values))
    below = math.sqrt(sum(cell.below**2 for cell in cells.values())) / len(cells)
    above = math.sqrt(sum(cell.above**2 for cell in cells.values())) / len(cells)
    return TableRow(
        method, budget, cells, TableCell(mean, below, above, sum(cell.count for cell in cells.values())), source
    )


# --- what papers print ---


@dataclass(frozen=True)
class PublishedScores:
    """A table of a paper, from `configs/evaluation/published/`."""

    name: str
    source: str
    suite: str
    model: str
    protocol: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]


def published(name: str) -> PublishedScores:
    """One table by the name of its file. Raises ValueError for an unknown one."""
    folder = resources.files("clusterkv_jax.configs") / "evaluation" / "published"
    names = sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml"))
    if name not in names:
        raise ValueError(f"Published table {name!r} is unknown; known: {', '.join(names)}.")
    file = folder / f"{name}.yaml"
    content = schema.from_yaml(schema.read_text(file, most=schema.MOST_YAML), str(file))
    columns, source = tuple(content["columns"]), content["source"]
    label = f"{source}, {content['model'].split('/')[-1]}"
    rows = tuple(_published_row(row, columns, label) for row in content["rows"])
    return PublishedScores(name, source, content["suite"], content["model"], content["protocol"], columns, rows)


def _published_row(row: Mapping[str, Any], columns: Sequence[str], source: str) -> TableRow:
    """A row of scores, null where one is not printed, or of an average alone."""
    if "average" in row:
        return TableRow(row["method"], row["budget"], {}, TableCell(row["average"]), source)
    pairs = zip(columns, row["scores"], strict=True)
    return _row(row["method"], row["budget"], {task: TableCell(x) for task, x in pairs if x is not None}, False, source)


def published_names() -> list[str]:
    """Names of all tables."""
    folder = resources.files("clusterkv_jax.configs") / "evaluation" / "published"
    return sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml"))


def matching(suite: str, model: str) -> list[str]:
    """The published tables of a suite and model; those of RULER stand beside generated and published rows."""
    suite_name, last = ("ruler" if suite.startswith("ruler") else suite), model.rstrip("/").split("/")[-1].lower()
    tables = map(published, published_names())
    return [t.name for t in tables if t.suite == suite_name and t.model.split("/")[-1].lower() == last]


def beside(summary: Summary, tables: Sequence[PublishedScores]) -> Summary:
    """The summary with the tables' rows, as far as they have its columns, behind the measured ones.

    Their averages are those of the columns shown. A row of an average alone stands there only if its tasks, of whatever
    lengths, are those shown.
    """
    tasks = {name.split("@")[0] for name in summary.columns}
    extra: list[TableRow] = []
    protocols: list[str] = []
    for table in tables:
        before = len(extra)
        for row in table.rows:
            shared = {name: row.cells[name] for name in summary.columns if name in row.cells}
            if shared:
                extra.append(_row(row.method, row.budget, shared, False, row.source))
            elif not row.cells and set(table.columns) == tasks:
                extra.append(row)
        protocols += [f"{table.source}: {table.protocol}."] if len(extra) > before else []
    return replace(summary, rows=(*summary.rows, *extra), remarks=(*summary.remarks, *protocols))


# --- text ---


def budget_name(budget: str) -> str:
    """A share as per cent, a number of rows as it is."""
    return f"{budget} rows" if budget.isdigit() and budget != "1" else f"{float(budget):.1%}".replace(".0%", "%")


def cell_text(cell: TableCell | None, perplexity: bool) -> str:
    """A number, with its interval where there is one."""
    if cell is None:
        return "-"
    text = f"{cell.value:.2f}" if perplexity else f"{cell.value:.1f}"
    return f"{text} ({max(0.0, cell.value - cell.below):.0f}-{cell.value + cell.above:.0f})" if cell.count else text


def markdown(summary: Summary) -> str:
    """The table as Markdown, ending in notes on what its numbers are."""
    head = ["method", "kept", *map(_in_a_cell, summary.columns), "average"]
    lines = ["| " + " | ".join(head) + " |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    for row in summary.rows:
        name = row.method if row.measured else f"*{row.method}, {row.source}*"
        cells = [cell_text(row.cells.get(column), summary.perplexity) for column in summary.columns]
        average = cell_text(row.average, summary.perplexity)
        lines.append("| " + " | ".join([_in_a_cell(name), budget_name(row.budget), *cells, average]) + " |")
    return "\n".join([*lines, "", *notes(summary)]) + "\n"


def _in_a_cell(text: str) -> str:
    """A name that ends no cell and no row of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def notes(summary: Summary) -> list[str]:
    """What a reader must know about the numbers."""
    what = "Perplexities" if summary.perplexity else "Scores in per cent"
    sentences = [f"{what} with their 95 % intervals."]
    if summary.uncompressed:
        sentences.append(
            f"{summary.uncompressed} answers come from the full cache: their prompts are too short for the budget."
        )
    if summary.cut:
        sentences.append(f"{summary.cut} prompts lost tokens in their middle to fit into the model's positions.")
    return [*sentences, *summary.remarks]
