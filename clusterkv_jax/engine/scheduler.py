"""Who waits and who sits in which slot: frozen records, and functions from one to the next. No device is asked here."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clusterkv_jax.engine.requests import Request
from clusterkv_jax.engine.sampling import SamplingState, sampling_state
from clusterkv_jax.runtime.prng import seed_words
from clusterkv_jax.sampling import Sampling

# What tells requests apart: their number, and which of its answers one is.
Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class RunningSequence:
    """A request in its slot: what it has said so far, and what of it was passed on.

    Attributes:
        request: whose it is.
        key: of its draws, as numbers.
        rows: kept of the prompt, by layer and head, of the method and of windows.
        tokens: generated so far.
        ended: whether there will be no more.
        first_s: when the first one came.
        shown: the text that was passed on.
        said: how many tokens were.
    """

    request: Request
    key: Any = None
    rows: tuple[list[list[list[int]]], list[list[list[int]]]] = field(default=([], []), repr=False)
    tokens: tuple[int, ...] = ()
    ended: bool = False
    first_s: float = 0.0
    shown: str = ""
    said: int = 0

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.batch.max_new_tokens - len(self.tokens)


@dataclass(frozen=True)
class Schedule:
    """Requests that wait, the first of them first, and those in the slots."""

    waiting: tuple[Request, ...]
    running: tuple[RunningSequence | None, ...]

    def sequence(self, slot: int) -> RunningSequence:
        """Who sits in a slot that is in use."""
        sequence = self.running[slot]
        assert sequence is not None
        return sequence

    @property
    def active(self) -> tuple[int, ...]:
        """Slots in use."""
        return tuple(slot for slot, sequence in enumerate(self.running) if sequence is not None)

    @property
    def decoding(self) -> tuple[int, ...]:
        """Slots in use whose first token is there."""
        return tuple(slot for slot in self.active if self.sequence(slot).tokens)

    @property
    def free(self) -> tuple[int, ...]:
        """Slots that are not."""
        return tuple(slot for slot, sequence in enumerate(self.running) if sequence is None)


def enqueue(schedule: Schedule, request: Request) -> Schedule:
    """A request behind those that wait."""
    return replace(schedule, waiting=(*schedule.waiting, request))


def is_full(schedule: Schedule, request: Request, most: int, most_bytes: int, ahead: int = 0) -> bool:
    """Whether a request has no place behind those that wait and `ahead` others; the first one always has."""
    nbytes = sum(other.waiting_bytes for other in schedule.waiting) + request.waiting_bytes
    before = len(schedule.waiting) + ahead
    return before > 0 and (before + request.params.n > most or nbytes > most_bytes)


def next_requests(schedule: Schedule, most: int) -> tuple[Request, ...]:
    """Who enters now, at most one for each free slot: one prompt that must be read, since that takes long, and those
    behind it that ask the same one or contexts. Nobody passes another.
    """
    room = min(most, len(schedule.free))
    group: list[Request] = []
    for request in schedule.waiting[:room]:
        if group and request.context is None and not request.reads_as(group[-1]):
            break
        group.append(request)
    return tuple(group)


def remove(schedule: Schedule, key: Key) -> Schedule:
    """The schedule without this request, wherever it is."""
    waiting = tuple(request for request in schedule.waiting if request.key != key)
    leaves = [sequence is not None and sequence.request.key == key for sequence in schedule.running]
    running = tuple(None if left else sequence for left, sequence in zip(leaves, schedule.running, strict=True))
    return Schedule(waiting, running)


def place(schedule: Schedule, slot: int, sequence: RunningSequence) -> Schedule:
    """The schedule with this sequence in a slot; its request waits no more."""
    waiting = tuple(request for request in schedule.waiting if request.key != sequence.request.key)
    return Schedule(waiting, (*schedule.running[:slot], sequence, *schedule.running[slot + 1 :]))


def find(schedule: Schedule, key: Key) -> tuple[int | None, RunningSequence]:
    """The slot and sequence of a live request; None and an empty sequence while it waits."""
    for slot, sequence in enumerate(schedule.running):
        if sequence is not None and sequence.request.key == key:
            return slot, sequence
    request = next(request for request in schedule.waiting if request.key == key)
    return None, RunningSequence(request)


def with_tokens(sequence: RunningSequence, new: Sequence[int], ends: tuple[int, ...], now: float) -> RunningSequence:
    """The sequence after new tokens; -1 is none."""
    tokens = (*sequence.tokens, *(token for token in new if token != -1))
    ended = bool(tokens and tokens[-1] in ends) or len(tokens) >= sequence.request.batch.max_new_tokens
    return replace(sequence, tokens=tokens, ended=ended, first_s=sequence.first_s or now)


def next_sampling(running: Sequence[RunningSequence | None], vocab_size: int) -> SamplingState:
    """How each slot draws its next token."""
    keys = [seed_words(0) if sequence is None else sequence.key for sequence in running]
    samplings = [Sampling() if sequence is None else sequence.request.params.sampling for sequence in running]
    numbers = [0 if sequence is None else len(sequence.tokens) for sequence in running]
    return sampling_state(samplings, keys, numbers, vocab_size)
