"""Pictures of results as SVG texts: score over budget, needles by depth and length, bars by task."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clusterkv_jax.evaluation.scoring import library
from clusterkv_jax.evaluation.table import Row, Summary, budget_name

# Okabe and Ito's colours, told apart by everybody, in an order that keeps neighbours distinct.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255", "#44AA99")
_BINS = 10


def score_over_budget(summary: Summary) -> str | None:
    """A line per method with its interval over the share kept; None where no method has two budgets."""
    curves: dict[str, list[Row]] = {}
    for row in summary.rows:
        if row.source == "measured" and not (row.budget.isdigit() and row.budget != "1"):
            curves.setdefault(row.method, []).append(row)
    full = next((rows[0] for name, rows in curves.items() if name == "full"), None)
    lines = {name: rows for name, rows in curves.items() if len(rows) > 1 or (full and name != "full")}
    if not lines:
        return None
    figure, axes = _figure(7.5, 4.2)
    for i, (name, rows) in enumerate(lines.items()):
        rows = sorted([*rows, *([full] if full else [])], key=lambda row: float(row.budget))
        kept = [100 * float(row.budget) for row in rows]
        values, half = [row.average.value for row in rows], [row.average.half for row in rows]
        axes.errorbar(kept, values, yerr=half, label=name, color=_colour(i), marker="o", markersize=4, capsize=2)
    ticks = sorted({100 * float(row.budget) for rows in lines.values() for row in rows} | ({100.0} if full else set()))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("cache kept")
    axes.set_ylabel("perplexity" if summary.perplexity else "average score")
    if not summary.perplexity:
        axes.set_ylim(0, 103)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _svg(figure)


def bars_by_task(summary: Summary, budget: str) -> str:
    """A group of bars per task, one per method, at one budget (the full cache beside it)."""
    rows = [row for row in summary.rows if row.source == "measured" and (row.budget == budget or row.method == "full")]
    figure, axes = _figure(max(7.5, 0.16 * len(summary.columns) * (len(rows) + 2)), 3.8)
    width = 0.8 / len(rows)
    places = np.arange(len(summary.columns))
    for i, row in enumerate(rows):
        cells = [row.cells.get(column) for column in summary.columns]
        heights = [cell.value if cell else 0.0 for cell in cells]
        half = [cell.half if cell else 0.0 for cell in cells]
        axes.bar(
            places + (i + 0.5) * width - 0.4,
            heights,
            width,
            yerr=half,
            color=_colour(i),
            label=row.method,
            error_kw={"linewidth": 0.7},
        )
    axes.set_xticks(places, summary.columns, rotation=35, ha="right")
    axes.set_ylabel("perplexity" if summary.perplexity else "score")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _svg(figure)


def needle_map(lines: Sequence[Mapping[str, Any]], method: str, budget: str) -> str | None:
    """Mean scores by depth (down) and length (across); None without lines that have both."""
    found = [
        (line["facts"]["length"], min(int(line["facts"]["depth"] * _BINS), _BINS - 1), line["score"])
        for line in lines
        if (line["method"], line["budget"]) == (method, budget) and {"depth", "length"} <= line["facts"].keys()
    ]
    if not found:
        return None
    lengths = sorted({length for length, _, _ in found})
    scores: dict[tuple[int, int], list[float]] = {}
    for length, depth, value in found:
        scores.setdefault((depth, lengths.index(length)), []).append(value)
    grid = np.full((_BINS, len(lengths)), np.nan)
    for place, values in scores.items():
        grid[place] = 100 * np.mean(values)
    figure, axes = _figure(1.6 + 0.8 * max(2, len(lengths)), 3.4)
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for (depth, place), value in np.ndenumerate(grid):
        if np.isfinite(value):
            axes.text(place, depth, f"{value:.0f}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(_BINS), [f"{100 * i // _BINS} %" for i in range(_BINS)])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.set_title(f"{method}, {budget_name(budget)} kept", fontsize=9)
    figure.colorbar(image, ax=axes)
    return _svg(figure)


def perplexity_by_position(summary: Summary) -> str:
    """A line per method and budget over the position in the text, the mean of all books."""
    figure, axes = _figure(7.5, 4.2)
    places = sorted({int(column.rsplit("@", 1)[1]) for column in summary.columns})
    for i, row in enumerate(row for row in summary.rows if row.source == "measured"):
        values = [
            np.exp(np.mean([np.log(cell.value) for name, cell in row.cells.items() if name.endswith(f"@{place}")]))
            for place in places
        ]
        axes.plot(places, values, color=_colour(i), marker=".", label=f"{row.method} {budget_name(row.budget)}")
    axes.set_xlabel("tokens read and compressed")
    axes.set_ylabel("perplexity of the next tokens")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _svg(figure)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _figure(width: float, height: float):
    library("matplotlib", "Drawing a report").use("Agg")
    figure = library("matplotlib.figure", "Drawing a report").Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


def _svg(figure: Any) -> str:
    """The picture as text, the same for the same numbers."""
    buffer = io.StringIO()
    context = library("matplotlib", "Drawing a report").rc_context
    with context({"svg.hashsalt": "clusterkv", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
