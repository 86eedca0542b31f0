"""A benchmark as pictures: time to the first token and time per token over the prompt's length."""

from collections.abc import Sequence
from pathlib import Path

from clusterkv_jax.benchmark.summary import SummaryRow
from clusterkv_jax.benchmark.table import label
from clusterkv_jax.evaluation.extras import library
from clusterkv_jax.evaluation.report.plots import COLOURS, as_svg, new_figure
from clusterkv_jax.storage.files import write_whole

PICTURES = {"ttft": ("seconds to the first token", 1.0), "tpot": ("ms per token", 1e3)}


def draw(rows: Sequence[SummaryRow], folder: Path) -> list[Path]:
    """A picture of each of `PICTURES` and batch; raises ValueError without matplotlib."""
    library("matplotlib", "Drawing a benchmark")
    rows = [row for row in rows if row.tpot is not None and row.served is None]
    files = []
    for batch in sorted({row.cell.batch for row in rows}):
        here = [row for row in rows if row.cell.batch == batch]
        for name in PICTURES:
            files.append(folder / f"{name}-batch-{batch}.svg")
            write_whole(files[-1], _picture(here, name))
    return files


def _picture(rows: Sequence[SummaryRow], name: str) -> str:
    """A line for each method and budget, with the least and the most of the timings."""
    figure, axes = new_figure(7.5, 4.2)
    curves: dict[str, list[SummaryRow]] = {}
    for row in rows:
        curves.setdefault(label(row.cell), []).append(row)
    text, scale = PICTURES[name]
    for number, (text_of_curve, curve) in enumerate(curves.items()):
        times = [getattr(row, name) for row in sorted(curve, key=lambda row: row.cell.length)]
        lengths = sorted(row.cell.length / 1024 for row in curve)
        reach = [[scale * (t.median - t.least) for t in times], [scale * (t.most - t.median) for t in times]]
        look = {"marker": "o", "markersize": 4, "capsize": 2, "color": COLOURS[number % len(COLOURS)]}
        axes.errorbar(lengths, [scale * t.median for t in times], yerr=reach, label=text_of_curve, **look)
    axes.set_xscale("log", base=2)
    ticks = sorted({row.cell.length / 1024 for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}k" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel(text)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    return as_svg(figure)
