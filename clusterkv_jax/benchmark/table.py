"""Rows of a benchmark as Markdown."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterkv_jax.benchmark.grid import OURS, Cell
from clusterkv_jax.benchmark.summary import Spread, SummaryRow
from clusterkv_jax.storage.files import write_whole

GIB = 2**30
HEAD = (
    "prompt",
    "batch",
    "method",
    "kept",
    "stored",
    "TTFT s",
    "TPOT ms",
    "tokens/s",
    "1,000 tokens s",
    "peak GiB",
    "compiling s",
    "cache MiB",
    "× floor",
    "clustering",
    "of full batches",
    "slots in use",
    "compiled later",
    "questions ×",
)
LEFT = ("method",)
NONE = "–"


def markdown(rows: Sequence[SummaryRow], about: Mapping[str, Any]) -> str:
    """The table, what it was measured on, and why cells are missing."""
    # A column that says nothing of any cell is left out, but for memory: that it was not measured is worth a word.
    texts = [cells_of(row) for row in rows if row.failed is None]
    shown = [i for i, name in enumerate(HEAD) if name == "peak GiB" or any(text[i] != NONE for text in texts)]
    lines = [[HEAD[i] for i in shown], ["---" if HEAD[i] in LEFT else "---:" for i in shown]]
    lines += [[text[i] for i in shown] for text in texts]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(
        [table, footnote(rows, about), *(f"{name(row.cell)}: {row.failed}" for row in rows if row.failed)]
    )


def cells_of(row: SummaryRow) -> list[str]:
    """A row's texts under `HEAD`."""
    cell = row.cell
    return [
        f"{cell.length:,}",
        f"{cell.batch:,}",
        who(cell),
        kept(cell),
        cell.cache_dtype or NONE,
        _reach(row.ttft, 1),
        _reach(row.tpot, 1e3),
        NONE if row.tokens_per_s is None else _three(row.tokens_per_s),
        NONE if row.end_to_end_s is None else _three(row.end_to_end_s),
        _peak(row),
        NONE if row.compile_s is None else f"{row.compile_s:.1f}",
        NONE if row.cache_bytes is None else _three(row.cache_bytes / 2**20),
        NONE if row.over_floor is None else f"{row.over_floor:.2f}",
        NONE if row.clustering is None else f"{row.clustering:.1%}",
        _reach(row.of_ideal, 100, " %"),
        NONE if row.occupancy is None else f"{row.occupancy.median:.0%}",
        NONE if row.programs is None else f"{row.programs}",
        _reach(row.question_gain, 1),
    ]


def who(cell: Cell) -> str:
    """A method, with the library it is from where that is another."""
    if cell.side == OURS:
        return cell.method
    return cell.side if cell.method == "full" else f"{cell.side} {cell.method}"


def kept(cell: Cell) -> str:
    """A budget in words."""
    if cell.budget is None:
        return "all"
    return f"{cell.budget:,} rows" if isinstance(cell.budget, int) else f"{100 * cell.budget:g} %"


def label(cell: Cell) -> str:
    """A cell without its sizes."""
    return f"{who(cell)}, {kept(cell)} kept" + (f" in {cell.cache_dtype}" if cell.cache_dtype else "")


def name(cell: Cell) -> str:
    """A cell in a sentence."""
    return f"{label(cell)}, {cell.batch:,} x {cell.length:,} tokens"


def footnote(rows: Sequence[SummaryRow], about: Mapping[str, Any]) -> str:
    """What the table was measured on, in lines of at most 120 characters."""
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    reads = about["bandwidth"]
    read = f" It reads {reads / 1e12:.2f} TB/s." if reads and reads >= 1e12 else ""
    read = f" It reads {reads / 1e9:.1f} GB/s." if reads and not read else read
    repeats = min((row.repeats for row in rows if row.failed is None), default=0)
    text = f"{about['model']} on {about['device']}; {versions}.{read} Median of {repeats} (least to most)."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _reach(values: Spread | None, scale: float, unit: str = "") -> str:
    """A median with its reach."""
    if values is None:
        return NONE
    median, least, most = (_three(scale * x) for x in (values.median, values.least, values.most))
    return f"{median}{unit} ({least} to {most})"


def _three(number: float) -> str:
    """Three or four digits of a number."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" if number >= 100 else f"{number:.3f}"[:5]


def _peak(row: SummaryRow) -> str:
    if row.peak_bytes is None:
        return "not measured"
    return f"{'' if row.peak_is_own else '≤ '}{row.peak_bytes / GIB:.1f}"


def put_into(page: Path, section: str, text: str) -> None:
    """Replace what stands between `<!-- benchmark SECTION -->` and `<!-- end -->` of a Markdown page.

    Raises ValueError if the page has no such place.
    """
    begin, end = f"<!-- benchmark {section} -->\n", "<!-- end -->"
    content = page.read_text(encoding="utf-8")
    before, found, rest = content.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"--markdown {page} has no lines {begin.strip()} and {end} for the table to stand between.")
    write_whole(page, f"{before}{begin}\n{text}\n\n{end}{after}")
