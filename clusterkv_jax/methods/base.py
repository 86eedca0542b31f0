"""The protocol of a compression method: eleven members, of which most methods override three.

A method is a frozen dataclass, budget first, hashable and so static under jit.

    protected, schedule, storage   values: which rows always stay, when a cache returns to its budget, what its rows are
    degree_power                   value: how much a centroid of many rows counts
    budget_rows, check, inputs     host: B of each prompt and head, what is impossible, what a layer must be shown
    compress                       jit: what is left of a prompt, one group of heads at a time, after its attention
    init_state                     jit: what is kept beside the rows between steps
    step                           jit: how new tokens enter a group and attend to it
    recompress                     jit: the way back to the budget while decoding, under one condition for all layers

`families` has bases that answer nearly all of it: a method that drops rows says what a row is worth (`Eviction.score`).
The order in which the members are called is in `driver`, which no method overrides.
"""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.layers import Group, State, StepInputs, compact
from clusterkv_jax.methods.budgets import check_budgets, head_rows
from clusterkv_jax.methods.request import GroupPlan, RequestShape
from clusterkv_jax.methods.schedule import Protected, Schedule
from clusterkv_jax.methods.steps import append_and_attend
from clusterkv_jax.methods.storage import Storage
from clusterkv_jax.runtime.sharding import over_heads

# What the rows of a group are: tokens as they were; centroids of several; tokens in pages that heads share; tokens
# rotated to other positions; every token, with an index of them, on the device or in the host's memory.
StorageKind = Literal["tokens", "centroids", "pages", "moved", "index", "host"]

# What a method may ask to be shown of a layer: its queries, the hidden states that enter its attention, the scores that
# the model's surrogate predicts from them, those of a repetition of the prompt, the queries that it makes of what the
# layer before it read, what an earlier layer selected, instead of selecting itself, or all heads of equal budgets at
# once, as what one of them keeps depends on the others. Or a few layers at once, as sequences of one batch: what takes
# many short launches asks a GPU for that, and gets it unless some part of it asks for a key of each layer's own.
Input = Literal["queries", "hidden", "scores", "repetition", "lookahead", "selection", "heads", "layers", "key"]

EARLIER_NAMES = {"holds": "storage", "needs": "inputs", "remember": "init_state"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """One group of KV heads that is to be brought to its budget, after the prompt or while decoding.

    Attributes:
        cache: the rows; after the prompt one for each token, C = N.
        budget: rows to keep, B. A sequence that holds no more stays as it is, bit for bit.
        position: tokens seen.
        state: what `init_state` made, as the steps left it.
        queries: of the prompt, padded; None while decoding, and for bare tensors without them.
        hidden: what enters the attention of the layer, as `queries`.
        scores: what each row of the prompt is worth, as `queries`; of a row beyond the prompt they mean nothing.
        squares: |k|² and |v|² of the prompt's rows where several layers wait together; None elsewhere.
        key: PRNG key of the layer, after the prompt.
        selection: what an earlier layer selected, for methods that need it.
        share: each sequence's part of the budget in units of the mean over all layers and heads, after the prompt.
        plan: static.
    """

    cache: Group
    budget: Int[Array, " B"]
    position: Int[Array, " B"]
    state: State
    queries: Float[Array, "B H N D"] | None = None
    hidden: Float[Array, "B N M"] | None = None
    scores: Float[Array, "B K N"] | None = None
    squares: tuple[Float[Array, "B K N"], Float[Array, "B K N"]] | None = None
    key: Array | None = None
    selection: Any = None
    budget_share: Float[Array, " B"] | None = None
    plan: GroupPlan = field(default=GroupPlan((), 0), metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Compressed:
    """What `compress` and `recompress` leave: rows, state (None: as it was), and what later layers may reuse.

    `slots` are those of the rows left, in their order and then -1, where these still lie among others; `compacted`
    moves them. None: they stand in front.
    """

    cache: Group
    state: State | None = None
    selection: Any = None
    slots: Int[Array, "B K slots"] | None = None


def compacted(result: Compressed, *, in_place: bool = True) -> Compressed:
    """The same with its rows in the first slots, which takes no more memory `in_place`, and less time elsewhere."""
    if result.slots is None:
        return result
    move = partial(compact, in_place=in_place)
    return replace(result, cache=over_heads(move, result.cache, result.slots), slots=None)


class Method(Storage):
    """Base of all methods. The dataclasses below it have a field `budget`, except where they answer `budget_rows`.

    Rows are quantised behind a method's back (`Storage.cache_dtype`): `compress` sees and leaves rows of the model's
    type, and what takes rows by their numbers takes codes alike. Methods that look into rows, or change them, while
    decoding ask `layers.dequantised_rows` for them.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in EARLIER_NAMES.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{name} is called {EARLIER_NAMES[name]} now.")

    budget: Budget
    storage: ClassVar[StorageKind] = "tokens"
    # The bias of a row is this times log degree; a field of the methods that make centroids (`families.merging`).
    degree_power: float = 1.0

    @property
    def forgets(self) -> bool:
        """Whether rows beyond the budget are gone; otherwise all stay, and a step attends to a budget of them."""
        return self.storage not in ("index", "host")

    # --- values ---

    @property
    def protected(self) -> Protected:
        """Rows that are never dropped or merged."""
        return Protected()

    @property
    def schedule(self) -> Schedule:
        """When a cache returns to its budget while decoding."""
        return Schedule()

    # --- on the host ---

    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        """B of each prompt and KV head of a layer, i64 [lengths, K]; MOST_ROWS where nothing is ever compressed.

        Heads with equal columns stand together in one group of the layer's cache.
        """
        return head_rows(self.budget, lengths, layer, request, self.protected.fewest)

    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        """Raise ValueError, naming the numbers, if a prompt of one of these lengths has an impossible budget."""
        check_budgets(self, lengths, request, self.budget_rows)

    def inputs(self, layer: int) -> frozenset[Input]:
        """What the method must be shown of a layer."""
        del layer
        return frozenset()

    # --- under jit ---

    def init_state(self, rows: Rows) -> State:
        """What is kept beside the rows of a group between steps. Without any, tokens are appended and attend to all.

        Asked again, with what was kept, where a budget grows while a prompt is read.
        """
        del rows
        return {}

    @abstractmethod
    def compress(self, rows: Rows) -> Compressed:
        """What is left of a prompt, in at least as many slots as there are rows."""

    def recompress(self, rows: Rows) -> Compressed:
        """The rows brought back to their budget, in the same slots."""
        return self.compress(rows)

    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """New tokens enter a group of heads that has a state, and attend."""
        return append_and_attend(group, state, tokens)
