"""What a report draws of a table: score over share, perplexity by position, needles by depth.

Only as many lines and rows as can be told apart are drawn; the table has all.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterkv_jax.evaluation.report.charts import COLOURS, Axis, Curve, CurvePoint, draw
from clusterkv_jax.evaluation.report.table import Summary, TableRow, budget_name, cell_text

_MOST_PANELS, _MOST_NEEDLES = 6, 120
_PERPLEXITIES = (1, 2, 5, 10, 20, 50, 100, 150, 200, 300, 500, 1000, 2000, 5000, 10_000, 100_000)  # that an axis names


@dataclass(frozen=True)
class Picture:
    """An SVG text, its heading, the lines in it, and what it leaves out."""

    heading: str
    svg: str
    lines: tuple[Curve, ...]
    left_out: str = ""


def pictures(summary: Summary) -> Iterator[Picture]:
    """All charts of a table."""
    if picture := score_over_share(summary):
        yield picture
    if summary.perplexity:
        yield from perplexity_by_position(summary)


def score_over_share(summary: Summary) -> Picture | None:
    """A line for each method over the share of the cache kept, the full cache dashed; None where nothing compresses."""
    rows = [row for row in summary.measured if row.method != "full"]
    if not rows:
        return None
    methods, left_out = _best(rows, summary.perplexity)
    full = next((row for row in summary.measured if row.method == "full"), None)
    shown = [row for row in rows if row.method in methods]
    shares = sorted({row.share for row in shown})
    spread = max(1.25, (shares[-1] / shares[0]) ** 0.06)
    ticks = tuple((share, f"{share:.1%}".replace(".0%", "%")) for share in shares)
    across = Axis("share of the cache kept", shares[0] / spread, shares[-1] * spread, ticks, log=True)
    lines = [
        Curve(name, tuple(_point(row, row.share, summary) for row in sorted(of, key=lambda row: row.share)), number)
        for number, (name, of) in enumerate({m: [row for row in shown if row.method == m] for m in methods}.items())
    ]
    if full is not None:
        ends = tuple(_point(full, end, summary) for end in (across.low, across.high))
        lines.insert(0, Curve("full cache", ends, None))
    up = _perplexities(lines) if summary.perplexity else Axis("average score", 0, 100, _PER_CENTS)
    heading = "Perplexity over share of the cache" if summary.perplexity else "Average score over share of the cache"
    return Picture(heading, draw(lines, across, up), tuple(lines), left_out)


def perplexity_by_position(summary: Summary) -> Iterator[Picture]:
    """A chart for each budget: a line for each method over the position, the mean of all books."""
    places = sorted({int(name.rsplit("@", 1)[1]) for name in summary.columns})
    if len(places) < 2:
        return
    compressed = [row for row in summary.measured if row.method != "full"]
    methods, left_out = _best(compressed, True)
    ticks = tuple((place, f"{place:,}") for place in places)
    across = Axis("tokens read and compressed", places[0], places[-1], ticks)
    budgets = list(dict.fromkeys(row.budget for row in compressed)) or [""]
    for budget in budgets[:_MOST_PANELS]:
        lines = []
        for row in summary.measured:
            if row.method == "full" or (row.budget == budget and row.method in methods):
                colour = None if row.method == "full" else methods.index(row.method)
                lines.append(Curve("full cache" if colour is None else row.method, _by_place(row, places), colour))
        heading = f"Perplexity by position, {budget_name(budget)} kept" if budget else "Perplexity by position"
        yield Picture(heading, draw(lines, across, _perplexities(lines)), tuple(lines), left_out)


@dataclass(frozen=True)
class NeedlePicture:
    """Mean scores by depth: the tenths that were asked, rows of method, budget, length and a score or None for each
    tenth, and how many more rows there are.
    """

    tenths: tuple[int, ...]
    rows: tuple[tuple[str, str, int, tuple[float | None, ...]], ...]
    left_out: int


def needles(lines: Sequence[Mapping[str, Any]]) -> NeedlePicture:
    """How well needles are found at which depth; no rows without lines that have depth and length."""
    scores: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    for line in lines:
        facts = line["facts"]
        if {"depth", "length"} <= facts.keys():
            of_row = scores.setdefault((line["method"], line["budget"], facts["length"]), {})
            of_row.setdefault(round(10 * facts["depth"]), []).append(line["score"])
    ordered = sorted(scores, key=lambda row: row[0] != "full")
    tenths = tuple(sorted({tenth for of_row in scores.values() for tenth in of_row}))
    rows = tuple(
        (method, budget_name(budget), length, tuple(_mean(scores[method, budget, length].get(i)) for i in tenths))
        for method, budget, length in ordered[:_MOST_NEEDLES]
    )
    return NeedlePicture(tenths, rows, len(ordered) - len(rows))


_PER_CENTS = tuple((tick, f"{tick}") for tick in range(0, 101, 20))


def _mean(scores: Sequence[float] | None) -> float | None:
    return None if scores is None else 100 * float(np.mean(scores))


def _best(rows: Sequence[TableRow], low_is_good: bool) -> tuple[list[str], str]:
    """The methods with the best averages, as many as there are colours, in the table's order; what is left out."""
    best: dict[str, float] = {}
    for row in rows:
        value = -row.average.value if low_is_good else row.average.value
        best[row.method] = max(value, best.get(row.method, -math.inf))
    chosen = sorted(best, key=lambda name: -best[name])[:COLOURS]
    left_out = f"The {COLOURS} best of {len(best)} methods; the table has all." if len(best) > COLOURS else ""
    return [name for name in best if name in chosen], left_out


def _point(row: TableRow, x: float, summary: Summary) -> CurvePoint:
    cell = row.average
    title = f"{row.name}: {cell_text(cell, summary.perplexity)}"
    return CurvePoint(x, cell.value, cell.value - cell.below, cell.value + cell.above, title)


def _by_place(row: TableRow, places: Sequence[int]) -> tuple[CurvePoint, ...]:
    """The row's mean over books at each place that it has."""
    points = []
    for place in places:
        logs = [math.log(cell.value) for name, cell in row.cells.items() if name.endswith(f"@{place}")]
        if logs:
            value = math.exp(sum(logs) / len(logs))
            points.append(CurvePoint(place, value, value, value, f"{row.name} at {place:,}: {value:.2f}"))
    return tuple(points)


def _perplexities(lines: Sequence[Curve]) -> Axis:
    """An axis by logarithms around all values."""
    values = [point.y for line in lines for point in line.points]
    low, high = min(values) / 1.15, max(values) * 1.15
    ticks = tuple((tick, f"{tick:,}") for tick in _PERPLEXITIES if low <= tick <= high)
    ticks = ticks if len(ticks) > 1 else tuple((value, f"{value:.3g}") for value in (min(values), max(values)))
    return Axis("perplexity", low, high, ticks, log=True)
