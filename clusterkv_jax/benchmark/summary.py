"""From timings to rows of a table: pure functions of numbers.

floor        (weights + cache) / read bandwidth: no step takes less, unless it leaves a part of its cache unread
end to end   a batch's prompts one after the other, then 999 steps for all of them
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from clusterkv_jax.benchmark.grid import Cell
from clusterkv_jax.benchmark.records import Timing, cell_of

# Tokens of an answer whose time from end to end is told.
ANSWER = 1000


@dataclass(frozen=True)
class Spread:
    """The median of several timings, in seconds, and the least and the most of them."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class SummaryRow:
    """What is known of a cell. Bytes and floor are those of one device.

    Attributes:
        cell: what was timed.
        failed: why there are no timings, or None.
        repeats: timings that count.
        ttft: seconds to read one prompt and have its first token.
        tpot: seconds of a decode step of the whole batch.
        compile_s: seconds of compiling in the first call.
        cache_bytes: of the whole batch.
        peak_bytes: most memory of a device since its process began; None where it is not counted.
        peak_is_own: whether the cell raised that peak; if not, its own is at most as large.
        floor_s: seconds to read weights and cache once.
        clustering: share of decoding that is clustering; None where no clustering was seen.
        served: tokens a second of requests that come and go, `of_ideal` as a share of those of full batches.
        of_ideal: see `served`.
        occupancy: share of the slots in use.
        programs: compiled while they were served.
        question_gain: times that questions to one context are faster than reading it for each.
    """

    cell: Cell
    failed: str | None = None
    repeats: int = 0
    ttft: Spread | None = None
    tpot: Spread | None = None
    compile_s: float | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    peak_is_own: bool = True
    floor_s: float | None = None
    clustering: float | None = None
    served: Spread | None = None
    of_ideal: Spread | None = None
    occupancy: Spread | None = None
    programs: int | None = None
    question_gain: Spread | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the whole batch in a second of decoding, or of all requests in a second of serving them."""
        if self.served is not None:
            return self.served.median
        return self.cell.batch / self.tpot.median if self.tpot and self.tpot.median else None

    @property
    def end_to_end_s(self) -> float | None:
        """Seconds until every sequence has `ANSWER` tokens."""
        if self.ttft is None or self.tpot is None or self.served is not None:
            return None
        return self.cell.batch * self.ttft.median + (ANSWER - 1) * self.tpot.median

    @property
    def over_floor(self) -> float | None:
        """A step's time in floors."""
        return self.tpot.median / self.floor_s if self.tpot and self.floor_s else None


def spread(times: Sequence[float]) -> Spread | None:
    """Median, least and most; None of no timings."""
    return Spread(statistics.median(times), min(times), max(times)) if times else None


def bandwidth(lines: Sequence[Timing]) -> float | None:
    """Bytes a second that this run read: the median of what stands beside the timings."""
    found = [line["bandwidth"] for line in lines if "bandwidth" in line]
    return statistics.median(found) if found else None


def rows(order: Sequence[Cell], lines: Sequence[Timing]) -> list[SummaryRow]:
    """A row for each cell that has lines, in this order."""
    by_cell: dict[Cell, list[Timing]] = {}
    for line in lines:
        by_cell.setdefault(cell_of(line), []).append(line)
    reads = bandwidth(lines)
    return [_row(cell, by_cell[cell], reads) for cell in order if cell in by_cell]


def _row(cell: Cell, lines: Sequence[Timing], reads: float | None) -> SummaryRow:
    failed = next((line["failed"] for line in lines if "failed" in line), None)
    first = next((line for line in lines if line.get("repeat") == 0 and "failed" not in line), Timing())
    timed = [line for line in lines if line.get("repeat") and "failed" not in line]

    def of(name):
        return spread([line[name] for line in timed if name in line])

    row = SummaryRow(
        cell,
        failed,
        repeats=len(timed),
        ttft=of("ttft_s"),
        tpot=of("tpot_s"),
        compile_s=first.get("compile_s"),
        cache_bytes=first.get("cache_bytes"),
        peak_bytes=(peak := first.get("peak_bytes")),
        peak_is_own=peak != first.get("earlier_peak_bytes"),
        floor_s=first["read_bytes"] / reads if reads and "read_bytes" in first else None,
        served=of("served_tokens_per_s"),
        of_ideal=of("of_ideal"),
        occupancy=of("occupancy"),
        programs=max((line["programs"] for line in timed if "programs" in line), default=None),
        question_gain=of("question_gain"),
    )
    clustering = first.get("clustering_s")
    if clustering is None or row.tpot is None or not row.tpot.median:
        return row
    return replace(row, clustering=clustering / row.tpot.median)


def as_json(row: SummaryRow) -> dict[str, Any]:
    """A row for programs, with what is derived from its timings."""
    derived = ("tokens_per_s", "end_to_end_s", "over_floor")
    return asdict(row) | {name: getattr(row, name) for name in derived}
