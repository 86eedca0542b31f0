"""Pictures of results as SVG texts: score over budget, needles by depth and length, bars by task."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clusterkv_jax.evaluation.extras import library
from clusterkv_jax.evaluation.report.table import Cell, Row, Summary, budget_name

# Okabe and Ito's colours, told apart by everybody, in an order that keeps neighbours distinct.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255", "#44AA99")
_DEPTHS = 11  # 0, 10 ... 100 %; a needle belongs to the nearest
_DASHES = ("-", "--", "-.", ":")
_WIDEST = 11.0  # inches of a row of bars
_PERPLEXITIES = (1, 2, 5, 10, 20, 50, 100, 150, 200, 300, 500, 1000, 2000, 5000)  # that an axis names


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
    figure, axes = new_figure(7.5, 4.2)
    colours, dashes = _colours(summary), _turns(summary, _DASHES)
    for name, rows_of_method in lines.items():
        rows: list[Row] = sorted([*rows_of_method, *([full] if full else [])], key=lambda row: float(row.budget))
        budgets = [100 * float(row.budget) for row in rows]
        values, reach = [row.average.value for row in rows], _reach([row.average for row in rows])
        look = {"color": colours[name], "linestyle": dashes[name], "marker": "o", "markersize": 4, "capsize": 2}
        axes.errorbar(budgets, values, yerr=reach, label=name, **look)
    ticks = sorted({100 * float(row.budget) for rows in lines.values() for row in rows} | ({100.0} if full else set()))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("cache kept")
    axes.set_ylabel("perplexity" if summary.perplexity else "average score")
    if not summary.perplexity:
        axes.set_ylim(0, 103)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return as_svg(figure)


def bars_by_task(summary: Summary, budget: str) -> str:
    """A group of bars per task, one per method, at one budget (the full cache beside it); many take several rows."""
    rows = [row for row in summary.rows if row.source == "measured" and (row.budget == budget or row.method == "full")]
    colours, hatches = _colours(summary), _turns(summary, ("", "////", "...."))
    in_a_row = max(2, min(len(summary.columns), int(_WIDEST / (0.16 * (len(rows) + 2)))))
    parts = [summary.columns[i : i + in_a_row] for i in range(0, len(summary.columns), in_a_row)]
    figure, panels = new_panels(max(7.5, 0.16 * in_a_row * (len(rows) + 2)), 0.8 + 2.8 * len(parts), len(parts))
    width = 0.8 / len(rows)
    for axes, columns in zip(panels, parts, strict=True):
        for i, row in enumerate(rows):
            cells = [row.cells.get(column, Cell(0.0)) for column in columns]
            places, heights = np.arange(len(columns)) + (i + 0.5) * width - 0.4, [cell.value for cell in cells]
            look = {"color": colours[row.method], "hatch": hatches[row.method], "edgecolor": "white", "linewidth": 0}
            axes.bar(places, heights, width, label=row.method, **look)
            axes.errorbar(places, heights, yerr=_reach(cells), fmt="none", ecolor="black", elinewidth=0.7)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_xlim(-0.5, in_a_row - 0.5)
        axes.set_ylabel("perplexity" if summary.perplexity else "score")
        if not summary.perplexity:
            axes.set_ylim(0, 103)
    panels[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return as_svg(figure)


def needle_map(lines: Sequence[Mapping[str, Any]], method: str, budget: str) -> str | None:
    """Mean scores by depth (down, to the nearest tenth) and length (across); None without lines that have both."""
    matches = [
        (line["facts"]["length"], round(line["facts"]["depth"] * (_DEPTHS - 1)), line["score"])
        for line in lines
        if (line["method"], line["budget"]) == (method, budget) and {"depth", "length"} <= line["facts"].keys()
    ]
    if not matches:
        return None
    lengths = sorted({length for length, _, _ in matches})
    scores: dict[tuple[int, int], list[float]] = {}
    for length, depth, value in matches:
        scores.setdefault((depth, lengths.index(length)), []).append(value)
    grid = np.full((_DEPTHS, len(lengths)), np.nan)
    for place, values in scores.items():
        grid[place] = 100 * np.mean(values)
    figure, axes = new_figure(1.6 + 0.8 * max(2, len(lengths)), 3.4)
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for (depth, place), value in np.ndenumerate(grid):
        if np.isfinite(value):
            on_dark = "white" if abs(value - 50) > 38 else "black"
            axes.text(place, depth, f"{value:.0f}", ha="center", va="center", fontsize=7, color=on_dark)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(_DEPTHS), [f"{100 * i // (_DEPTHS - 1)} %" for i in range(_DEPTHS)])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.set_title(f"{method}, {budget_name(budget)} kept", fontsize=9)
    figure.colorbar(image, ax=axes)
    return as_svg(figure)


def perplexity_by_position(summary: Summary) -> str:
    """A panel per budget: a line per method, the full cache beside it, over the position; the mean of all books."""
    places = sorted({int(column.rsplit("@", 1)[1]) for column in summary.columns})
    measured = [row for row in summary.rows if row.source == "measured"]
    colours = _colours(summary)
    budgets = list(dict.fromkeys(row.budget for row in measured if row.method != "full")) or [measured[0].budget]
    figure, panels = new_panels(7.5, 0.8 + 2.6 * len(budgets), len(budgets))
    for axes, budget in zip(panels, budgets, strict=True):
        for row in measured:
            if row.method != "full" and row.budget != budget:
                continue
            by_place = {
                place: [np.log(cell.value) for name, cell in row.cells.items() if name.endswith(f"@{place}")]
                for place in places
            }
            found = {place: np.exp(np.mean(logs)) for place, logs in by_place.items() if logs}  # of a run that goes on
            dashes = "--" if row.method == "full" else "-"
            axes.plot(
                list(found),
                list(found.values()),
                color=colours[row.method],
                linestyle=dashes,
                marker=".",
                label=row.method,
            )
        axes.set_title(f"{budget_name(budget)} kept", fontsize=9)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [tick for tick in _PERPLEXITIES if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylabel("perplexity of the next tokens", fontsize=8)
    panels[-1].set_xlabel("tokens read and compressed")
    panels[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return as_svg(figure)


def _colours(summary: Summary) -> dict[str, str]:
    """Every measured method's colour, the same in all pictures."""
    methods = dict.fromkeys(row.method for row in summary.rows if row.source == "measured")
    return {method: COLOURS[i % len(COLOURS)] for i, method in enumerate(methods)}


def _turns(summary: Summary, looks: Sequence[str]) -> dict[str, str]:
    """What tells methods of the same colour apart."""
    return {method: looks[i // len(COLOURS) % len(looks)] for i, method in enumerate(_colours(summary))}


def _reach(cells: Sequence[Cell]) -> list[list[float]]:
    """How far intervals reach below and above, as matplotlib takes it."""
    return [[cell.below for cell in cells], [cell.above for cell in cells]]


def new_figure(width: float, height: float):
    """An empty figure and its axes."""
    figure, (axes,) = new_panels(width, height, 1)
    return figure, axes


def new_panels(width: float, height: float, count: int):
    """An empty figure and `count` axes, one below the other."""
    library("matplotlib", "Drawing a report").use("Agg")
    figure = library("matplotlib.figure", "Drawing a report").Figure(figsize=(width, height), layout="constrained")
    panels = [figure.add_subplot(count, 1, i + 1) for i in range(count)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, panels


def as_svg(figure: Any) -> str:
    """The picture as text, the same for the same numbers."""
    buffer = io.StringIO()
    context = library("matplotlib", "Drawing a report").rc_context
    with context({"svg.hashsalt": "clusterkv", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
