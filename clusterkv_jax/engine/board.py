"""Who waits and who sits in which slot: frozen records, and functions from one to the next. No device is asked here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterkv_jax.batch import Batch
from clusterkv_jax.engine.draws import Draws, draws_of
from clusterkv_jax.prng import seed_words
from clusterkv_jax.sampling import Sampling
from clusterkv_jax.text.tokenizer import Tokens


@dataclass(frozen=True, eq=False)
class Order:
    """A request as it was added.

    Attributes:
        number: of the request, counted from 0.
        batch: its prompt and question as tokens; of a context that is a file the prompt is not known.
        prompt_tokens: tokens of the prompt.
        context: of the prompt, where it was read before.
        sampling: as in `generate`.
        seed: of its draws.
        read_seed: of what its method draws.
        added_s: when it was added, by a clock that stands still while the engine compiles.
        compile_s: seconds that the engine had compiled by then.
    """

    number: int
    batch: Batch
    prompt_tokens: int
    context: Any
    sampling: Sampling
    seed: int
    read_seed: int
    added_s: float
    compile_s: float

    @property
    def question(self) -> Tokens:
        """Tokens of the question, none without one."""
        return self.batch.questions[0] if self.batch.questions else []

    @property
    def waiting_bytes(self) -> int:
        """What its tokens take while it waits; a context's are the context's."""
        prompt = 0 if self.context is not None else self.prompt_tokens
        return 8 * (prompt + len(self.question))

    def reads_as(self, other: "Order") -> bool:
        """Whether reading this prompt gives what reading the other one gave."""
        mine, theirs = self.batch, other.batch
        return (
            self.context is None is other.context
            and self.read_seed == other.read_seed
            and (mine.max_new_tokens, mine.reserve) == (theirs.max_new_tokens, theirs.reserve)
            and mine.texts == theirs.texts
        )


@dataclass(frozen=True, eq=False)
class Seat:
    """A request in its slot: what it has said so far, and what of it was shown."""

    order: Order
    key: Any
    rows: tuple[list[list[list[int]]], list[list[list[int]]]]
    tokens: tuple[int, ...] = ()
    ended: bool = False
    first_s: float = 0.0
    shown: str = ""

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.order.batch.max_new_tokens - len(self.tokens)


@dataclass(frozen=True)
class Board:
    """Requests that wait, the first of them first, and those in the slots."""

    waiting: tuple[Order, ...]
    seats: tuple[Seat | None, ...]

    def seat(self, slot: int) -> Seat:
        """Who sits in a slot that is in use."""
        seat = self.seats[slot]
        assert seat is not None
        return seat

    @property
    def active(self) -> tuple[int, ...]:
        """Slots in use."""
        return tuple(slot for slot, seat in enumerate(self.seats) if seat is not None)

    @property
    def free(self) -> tuple[int, ...]:
        """Slots that are not."""
        return tuple(slot for slot, seat in enumerate(self.seats) if seat is None)


def joined(board: Board, order: Order) -> Board:
    """A request behind those that wait."""
    return replace(board, waiting=(*board.waiting, order))


def is_full(board: Board, order: Order, most: int, most_bytes: int) -> bool:
    """Whether a request has no place behind those that wait; the first one always has."""
    nbytes = sum(other.waiting_bytes for other in board.waiting) + order.waiting_bytes
    return bool(board.waiting) and (len(board.waiting) >= most or nbytes > most_bytes)


def next_orders(board: Board, most: int) -> tuple[Order, ...]:
    """Who enters now, at most one for each free slot: one prompt that must be read, since that takes long, and those
    behind it that ask the same one or contexts. Nobody passes another.
    """
    room = min(most, len(board.free))
    group: list[Order] = []
    for order in board.waiting[:room]:
        if group and order.context is None and not order.reads_as(group[-1]):
            break
        group.append(order)
    return tuple(group)


def without(board: Board, number: int) -> Board:
    """The board without this request, wherever it is."""
    waiting = tuple(order for order in board.waiting if order.number != number)
    seats = tuple(None if seat is not None and seat.order.number == number else seat for seat in board.seats)
    return Board(waiting, seats)


def seated(board: Board, slot: int, seat: Seat) -> Board:
    """The board with this seat in a slot; its request waits no more."""
    waiting = tuple(order for order in board.waiting if order.number != seat.order.number)
    return Board(waiting, (*board.seats[:slot], seat, *board.seats[slot + 1 :]))


def place_of(board: Board, number: int) -> tuple[int | None, Seat]:
    """The slot and seat of a live request; None and an empty seat while it waits."""
    for slot, seat in enumerate(board.seats):
        if seat is not None and seat.order.number == number:
            return slot, seat
    return None, next(Seat(order, None, ([], [])) for order in board.waiting if order.number == number)


def longer(seat: Seat, new: Sequence[int], ends: tuple[int, ...], now: float) -> Seat:
    """The seat after new tokens; -1 is none."""
    tokens = (*seat.tokens, *(token for token in new if token != -1))
    ended = bool(tokens and tokens[-1] in ends) or len(tokens) >= seat.order.batch.max_new_tokens
    return replace(seat, tokens=tokens, ended=ended, first_s=seat.first_s or now)


def next_draws(seats: Sequence[Seat | None], vocab_size: int) -> Draws:
    """How each slot draws its next token."""
    keys = [seed_words(0) if seat is None else seat.key for seat in seats]
    samplings = [Sampling() if seat is None else seat.order.sampling for seat in seats]
    numbers = [0 if seat is None else len(seat.tokens) for seat in seats]
    return draws_of(samplings, keys, numbers, vocab_size)
