"""Who waits and who sits in which slot: frozen records, and functions from one to the next. No device is asked here."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clusterkv_jax.engine.logits import logits_state
from clusterkv_jax.engine.params import SamplingParams
from clusterkv_jax.engine.requests import Request
from clusterkv_jax.engine.sampling import SamplingState, sampling_state
from clusterkv_jax.generation.results import TokenLogprob
from clusterkv_jax.runtime.prng import seed_words
from clusterkv_jax.text.growing import NOTHING, GrowingText

# Steps of one call of the decode program; between two, requests enter and leave.
MOST_STEPS, STREAM_STEPS = 32, 4
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
        known: of the text, so that what follows is decoded alone.
        said: how many tokens were.
        logprobs: of the tokens, where the request asks for them.
        cached: tokens of the prompt that were read before.
        overrun: whether its slot has seen tokens behind the one that has ended it.
    """

    request: Request
    key: Any = None
    rows: tuple[list[list[list[int]]], list[list[list[int]]]] = field(default=([], []), repr=False)
    tokens: tuple[int, ...] = ()
    ended: bool = False
    first_s: float = 0.0
    shown: str = ""
    known: GrowingText = NOTHING
    said: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    cached: int = 0
    overrun: bool = False

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.batch.max_new_tokens - len(self.tokens)


@dataclass(frozen=True)
class SchedulerState:
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


def enqueue(schedule: SchedulerState, request: Request) -> SchedulerState:
    """A request behind those that wait."""
    return replace(schedule, waiting=(*schedule.waiting, request))


def is_full(schedule: SchedulerState, request: Request, most: int, most_bytes: int, ahead: int = 0) -> bool:
    """Whether a request has no place behind those that wait and `ahead` others; the first one always has."""
    nbytes = sum(other.waiting_bytes for other in schedule.waiting) + request.waiting_bytes
    before = len(schedule.waiting) + ahead
    return before > 0 and (before + request.params.n > most or nbytes > most_bytes)


def next_requests(schedule: SchedulerState, most: int) -> tuple[Request, ...]:
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


def remove(schedule: SchedulerState, key: Key) -> SchedulerState:
    """The schedule without this request, wherever it is."""
    waiting = tuple(request for request in schedule.waiting if request.key != key)
    leaves = [sequence is not None and sequence.request.key == key for sequence in schedule.running]
    running = tuple(None if left else sequence for left, sequence in zip(leaves, schedule.running, strict=True))
    return SchedulerState(waiting, running)


def place(schedule: SchedulerState, slot: int, sequence: RunningSequence) -> SchedulerState:
    """The schedule with this sequence in a slot; its request waits no more."""
    waiting = tuple(request for request in schedule.waiting if request.key != sequence.request.key)
    return SchedulerState(waiting, (*schedule.running[:slot], sequence, *schedule.running[slot + 1 :]))


def find(schedule: SchedulerState, key: Key) -> tuple[int | None, RunningSequence]:
    """The slot and sequence of a live request; None and an empty sequence while it waits."""
    for slot, sequence in enumerate(schedule.running):
        if sequence is not None and sequence.request.key == key:
            return slot, sequence
    request = next(request for request in schedule.waiting if request.key == key)
    return None, RunningSequence(request)


def with_tokens(
    sequence: RunningSequence, new: Sequence[int], now: float, logprobs: Sequence[TokenLogprob] = ()
) -> RunningSequence:
    """The sequence after new tokens; -1 is none."""
    request = sequence.request
    tokens = (*sequence.tokens, *(token for token in new if token != -1))
    ended = bool(tokens and tokens[-1] in request.ends) or len(tokens) >= request.batch.max_new_tokens
    first_s = sequence.first_s or now
    return replace(sequence, tokens=tokens, ended=ended, first_s=first_s, logprobs=(*sequence.logprobs, *logprobs))


def most_steps(schedule: SchedulerState) -> int:
    """Steps of the next call of the decode program: one where a grammar says what follows each token, few where
    somebody waits for each token.
    """
    requests = [schedule.sequence(slot).request for slot in schedule.decoding]
    if any(request.allowed_tokens is not None for request in requests):
        return 1
    return STREAM_STEPS if any(request.stream for request in requests) else MOST_STEPS


def next_sampling(
    running: Sequence[RunningSequence | None], masks: dict[int, np.ndarray], vocab_size: int, reserve: int
) -> SamplingState:
    """How each slot draws its next token; `masks` are the allowed tokens of slots that have a grammar."""
    keys = [seed_words(0) if sequence is None else sequence.key for sequence in running]
    params = [SamplingParams() if sequence is None else sequence.request.params for sequence in running]
    numbers = [0 if sequence is None else len(sequence.tokens) for sequence in running]
    change = bool(masks) or any(each.changes_logits for each in params)
    logits = logits_state(running, masks, vocab_size, reserve) if change else None
    return sampling_state(params, keys, numbers, vocab_size, logits)
