"""What an engine has done so far, and what of it is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterkv_jax.engine.memory import MemoryPlan


@dataclass(frozen=True)
class Counters:
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


def stats_line(engines: Sequence[EngineStats]) -> str:
    """How engines do together, as commands show it while they work."""
    slots, active, waiting = (sum(getattr(stats, name) for stats in engines) for name in ("slots", "active", "waiting"))
    first = max(stats.ttft_s for stats in engines)
    written = sum(stats.tokens_per_s for stats in engines)
    return f"{written:,.0f} tokens/s written · {active} of {slots} slots · {waiting} wait · first token {first:.2f} s"


def add_counts(counters: Counters, **more: float) -> Counters:
    """The counters with more of these sums."""
    return replace(counters, **{name: getattr(counters, name) + value for name, value in more.items()})


def with_first_token(counters: Counters, waited_s: float) -> Counters:
    """The counters with a request that has its first token after so long."""
    longest = max(counters.longest_ttft_s, waited_s)
    return replace(add_counts(counters, firsts=1, ttft_s=waited_s), longest_ttft_s=longest)


def retry_after_s(counters: Counters) -> float:
    """Seconds after which a full queue will have a place: those that a request takes of the engine, 1 of none yet."""
    ended = counters.finished + counters.failed + counters.cancelled
    return max(0.1, (counters.busy_s - counters.compile_s) / ended) if ended else 1.0


def engine_stats(
    counters: Counters,
    sizes: tuple[int, int, int],
    contexts: Mapping[Any, int],
    context_bytes: Mapping[Any, int],
    memory: MemoryPlan,
) -> EngineStats:
    """The counters as statistics; `sizes` are slots, requests that wait and those in slots."""
    slots, waiting, active = sizes
    seconds = counters.busy_s - counters.compile_s
    return EngineStats(
        slots=slots,
        busy_s=counters.busy_s,
        compile_s=counters.compile_s,
        programs=counters.programs,
        new_tokens=counters.new_tokens,
        steps=counters.steps,
        tokens_per_s=counters.new_tokens / seconds if seconds > 0 else 0.0,
        occupancy=counters.active_steps / (counters.steps * slots) if counters.steps else 0.0,
        ttft_s=counters.ttft_s / counters.firsts if counters.firsts else 0.0,
        longest_ttft_s=counters.longest_ttft_s,
        waiting=waiting,
        active=active,
        finished=counters.finished,
        failed=counters.failed,
        cancelled=counters.cancelled,
        contexts=dict(contexts),
        context_bytes=dict(context_bytes),
        memory=memory,
    )
