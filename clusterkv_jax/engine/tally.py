"""What an engine has done so far, and what of it is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterkv_jax.engine.memory import MemoryPlan


@dataclass(frozen=True)
class Tally:
    """Sums since the engine was made."""

    busy_s: float = 0.0
    compile_s: float = 0.0
    programs: int = 0
    new_tokens: int = 0
    steps: int = 0
    active_steps: int = 0
    firsts: int = 0
    ttft_s: float = 0.0
    longest_ttft_s: float = 0.0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0


@dataclass(frozen=True)
class EngineStats:
    """How an engine does.

    Attributes:
        slots: how many there are.
        busy_s: seconds spent in steps, those of `read` included.
        compile_s: seconds of these that went into compiling programs.
        programs: programs compiled, or found in a compilation cache.
        new_tokens: tokens generated.
        steps: of decoding, each for all slots.
        tokens_per_s: of the seconds that were not spent compiling.
        occupancy: mean share of the slots that generate, over all decode steps.
        ttft_s: mean seconds from `add` to a request's first token, without those of compiling.
        longest_ttft_s: the longest of these.
        waiting: requests in the queue.
        active: requests in slots.
        finished: requests that came to their end.
        failed: requests that ended with an error.
        cancelled: requests that were cancelled.
        contexts: contexts held, by place: "device", "host", "disk".
        context_bytes: their bytes, by place.
        memory: the plan of the device's memory.
    """

    slots: int
    busy_s: float
    compile_s: float
    programs: int
    new_tokens: int
    steps: int
    tokens_per_s: float
    occupancy: float
    ttft_s: float
    longest_ttft_s: float
    waiting: int
    active: int
    finished: int
    failed: int
    cancelled: int
    contexts: dict[str, int]
    context_bytes: dict[str, int]
    memory: MemoryPlan


def in_a_line(engines: Sequence[EngineStats]) -> str:
    """How engines do together, as commands show it while they work."""
    slots, active, waiting = (sum(getattr(stats, name) for stats in engines) for name in ("slots", "active", "waiting"))
    first = max(stats.ttft_s for stats in engines)
    written = sum(stats.tokens_per_s for stats in engines)
    return f"{written:,.0f} tokens/s written · {active} of {slots} slots · {waiting} wait · first token {first:.2f} s"


def counted(tally: Tally, **more: float) -> Tally:
    """The tally with more of these sums."""
    return replace(tally, **{name: getattr(tally, name) + value for name, value in more.items()})


def with_first(tally: Tally, waited_s: float) -> Tally:
    """The tally with a request that has its first token after so long."""
    longest = max(tally.longest_ttft_s, waited_s)
    return replace(counted(tally, firsts=1, ttft_s=waited_s), longest_ttft_s=longest)


def shown_stats(
    tally: Tally,
    sizes: tuple[int, int, int],
    contexts: Mapping[Any, int],
    context_bytes: Mapping[Any, int],
    memory: MemoryPlan,
) -> EngineStats:
    """The tally as statistics; `sizes` are slots, requests that wait and those in slots."""
    slots, waiting, active = sizes
    seconds = tally.busy_s - tally.compile_s
    return EngineStats(
        slots=slots,
        busy_s=tally.busy_s,
        compile_s=tally.compile_s,
        programs=tally.programs,
        new_tokens=tally.new_tokens,
        steps=tally.steps,
        tokens_per_s=tally.new_tokens / seconds if seconds > 0 else 0.0,
        occupancy=tally.active_steps / (tally.steps * slots) if tally.steps else 0.0,
        ttft_s=tally.ttft_s / tally.firsts if tally.firsts else 0.0,
        longest_ttft_s=tally.longest_ttft_s,
        waiting=waiting,
        active=active,
        finished=tally.finished,
        failed=tally.failed,
        cancelled=tally.cancelled,
        contexts=dict(contexts),
        context_bytes=dict(context_bytes),
        memory=memory,
    )
