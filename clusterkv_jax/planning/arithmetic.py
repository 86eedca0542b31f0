"""From measures to a plan: pure functions of numbers.

a chip holds   parameters + the cache of all layers + compiled programs + the larger of two temporaries
prefill        grows with the tokens of a batch, along the line through two contexts
cache          grows with the batch, and along the line through two contexts
decode         as compiled, whatever the context: its temporaries are those of a step
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clusterkv_jax.planning.collectives import KINDS, Collective
from clusterkv_jax.planning.plan_types import Measures, MeshLayout, Sample
from clusterkv_jax.planning.topology import Chip

MOST_BATCH = 2**14
# Contexts are looked for in steps of the TPU's attention.
STEP = 128


@dataclass(frozen=True)
class Memory:
    """Bytes of a chip; prefill and decode take turns, so that the larger of their temporaries counts."""

    weights: float
    cache: float
    programs: float
    prefill: float
    decode: float

    @property
    def total(self) -> float:
        """The most that is ever in use."""
        return self.weights + self.cache + self.programs + max(self.prefill, self.decode)


@dataclass(frozen=True)
class Roofline:
    """The least milliseconds of a decode step: what is read at the memory's bandwidth, what is sent at the links'."""

    read_ms: float
    sent_ms: float

    @property
    def total_ms(self) -> float:
        """One after the other."""
        return self.read_ms + self.sent_ms


@dataclass(frozen=True)
class Remedies:
    """What would fit: the largest batch, context, ratio, and the smallest number of chips, each with all else as it is.

    0 and None where none would.
    """

    batch: int
    context: int
    ratio: float | None
    layout: MeshLayout | None


def along(y0: float, y1: float, x0: float, x1: float, x: float) -> float:
    """The straight line through (x0, y0) and (x1, y1), at x; never below 0."""
    return max(0.0, y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def on_line(points: Sequence[Sample], at: float) -> float:
    """The straight line through the first and the last of these points, at `at`."""
    first, last = points[0], points[-1]
    return along(first.bytes, last.bytes, first.at, last.at, at)


def of_all_layers(
    few: Iterable[Collective], more: Iterable[Collective], layers: tuple[int, int, int]
) -> tuple[Collective, ...]:
    """Collectives of all layers, from those of programs with few layers and with more: layers are alike.

    `layers` are the numbers of both, and of all.
    """
    a, b = ({one.kind: one for one in some} for some in (few, more))
    none = Collective("", 0, 0)

    def extended(y0: Any, y1: Any) -> float:
        return along(y0, y1, *layers)

    return tuple(
        Collective(kind, round(extended(first.count, second.count)), extended(first.bytes, second.bytes))
        for kind in KINDS
        if kind in a or kind in b
        for first, second in [(a.get(kind, none), b.get(kind, none))]
    )


def memory(measures: Measures, batch: int | None = None, context: float | None = None) -> Memory:
    """What a chip holds at another batch or context, by default those that were asked for."""
    batch = measures.batch if batch is None else batch
    context = measures.context if context is None else context
    ways = measures.groups if batch % measures.groups == 0 else 1
    times = (batch / ways) / (measures.batch / measures.batch_ways)
    # As many tokens in another shape: temporaries of prefill depend on their number.
    return Memory(
        weights=measures.weights,
        cache=on_line(measures.cache, context) * times,
        programs=measures.programs,
        prefill=on_line(measures.prefill, context * times),
        decode=measures.decode * max(1.0, times),
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 0 ... `most` that fits, where all smaller ones do; 0 always does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(measures: Measures, chip: Chip) -> int:
    """The most sequences of this context, as many in every group of chips; 0 if not even one each."""
    groups = measures.groups
    return groups * largest(lambda n: memory(measures, batch=n * groups).total <= chip.hbm, MOST_BATCH // groups)


def longest_context(measures: Measures, chip: Chip) -> int:
    """The longest context of this batch, up to the model's positions; 0 if none fits."""
    most = measures.positions // STEP
    found = STEP * largest(lambda n: memory(measures, context=n * STEP).total <= chip.hbm, most)
    return measures.positions if found == most * STEP else found


def largest_ratio(measures: Measures, chip: Chip) -> float | None:
    """The largest cache ratio that fits, in hundredths, at most 1; None where none does or the budget is no ratio."""
    if not measures.by_ratio:
        return None
    now = memory(measures)
    rest = now.total - now.cache
    found = largest(lambda n: rest + on_line(measures.by_ratio, n / 100) <= chip.hbm, 100)
    return found / 100 if found else None


def smallest_layout(measures: Measures, chip: Chip, *, chips: int | None = None) -> MeshLayout | None:
    """The mesh of the fewest chips on which it fits, by the shapes; of `chips` chips where that is given.

    Temporaries other than hidden states are taken to be split as the model is.
    """
    now, ways = memory(measures), measures.mesh["model"]
    rest = max(now.prefill - measures.hidden, now.decode)
    padding = measures.cache[0].bytes / _held_now(measures) if _held_now(measures) else 1.0

    def total(layout: MeshLayout) -> float:
        batch = measures.batch / measures.batch_ways
        share = (measures.batch / layout.data) / batch * min(1.0, ways / layout.model)
        return layout.weights + layout.cache * padding + layout.hidden + rest * share + now.programs

    fitting = [x for x in measures.layouts if total(x) <= chip.hbm and chips in (None, x.data * x.model)]
    return min(fitting, key=lambda x: (x.data * x.model, x.model), default=None)


def _held_now(measures: Measures) -> float:
    """The cache of this mesh by its shapes alone; 0 where it is not among the layouts."""
    same = (measures.batch_ways, measures.mesh["model"])
    return next((x.cache for x in measures.layouts if (x.data, x.model) == same), 0.0)


def remedies(measures: Measures, chip: Chip) -> Remedies:
    """What would fit, each change by itself."""
    return Remedies(
        batch=largest_batch(measures, chip),
        context=longest_context(measures, chip),
        ratio=largest_ratio(measures, chip),
        layout=smallest_layout(measures, chip),
    )


def roofline(measures: Measures, chip: Chip) -> Roofline:
    """The least time of a decode step."""
    sent = sum(one.bytes for one in measures.collectives)
    return Roofline(1e3 * measures.step_reads / chip.hbm_bandwidth, 1e3 * sent / chip.link_bandwidth)
