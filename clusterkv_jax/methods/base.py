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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from clusterkv_jax.budget import Budget, rows_for, share_table
from clusterkv_jax.cache.attention import attend_cache, attend_new, combine, with_sinks
from clusterkv_jax.cache.kinds import AnyGroup, append, append_scored
from clusterkv_jax.cache.layers import Group, LayerCache, State, StepInputs, compact
from clusterkv_jax.methods.request import GroupPlan, RequestShape, all_heads
from clusterkv_jax.methods.storage import Storage
from clusterkv_jax.runtime.errors import counted
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


@dataclass(frozen=True)
class Protected:
    """Rows that are never dropped or merged: the first `sinks` and the last `recent` or `window`, by these names.

    A budget must leave `spare` rows beside them.
    """

    sinks: int | None = None
    recent: int | None = None
    window: int | None = None
    min_free: int = 1

    @property
    def first(self) -> int:
        """Rows at the start."""
        return self.sinks or 0

    @property
    def last(self) -> int:
        """Rows at the end."""
        return (self.recent or 0) + (self.window or 0)

    @property
    def fewest(self) -> int:
        """The fewest rows that a budget must leave."""
        return self.first + self.last + self.min_free

    @override
    def __str__(self) -> str:
        """As error messages name them: "sinks + recent = 16 + 64"."""
        named = {"sinks": self.sinks, "recent": self.recent, "window": self.window}
        counts = {name: count for name, count in named.items() if count is not None} or {"protected rows": 0}
        return f"{' + '.join(counts)} = {' + '.join(map(str, counts.values()))}"


@dataclass(frozen=True)
class Schedule:
    """When a group of heads returns to its budget B while decoding; `recompress_every` makes the usual one.

    Attributes:
        kind: "append": never. "interval": when it holds B + `interval` rows. "token": each token beyond B drops a row.
            "ring": each token beyond B takes the slot of another row.
        interval: rows beyond B.
        slack: a prompt of n tokens is compressed if n >= B + slack.
        rounding: rows beyond B that rounding may leave.
    """

    kind: Literal["append", "interval", "token", "ring"] = "append"
    interval: int = 0
    slack: int = 0
    rounding: int = 0


def recompress_every(interval: int | None, slack: int = 0, rounding: int = 0) -> Schedule:
    """Back to B at B + `interval` rows; None appends for ever."""
    if interval is None:
        return Schedule(slack=slack, rounding=rounding)
    return Schedule("interval", interval, slack, rounding)


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


def head_rows(budget: Budget, lengths: np.ndarray, layer: int, request: RequestShape, fewest: int = 0) -> np.ndarray:
    """B of each prompt and KV head of a layer by its shares, i64 [lengths, K], none below `fewest` (see `Budget`)."""
    if budget.shares is None:
        first, of = [0], None
    else:
        shares = share_table(budget, request.num_layers, request.num_kv_heads)[layer]
        first, of = np.unique(shares, return_index=True, return_inverse=True)[1:]
    columns = [
        rows_for(
            budget,
            lengths,
            request.max_new_tokens,
            bytes_per_row=request.bytes_per_row,
            layer=layer,
            head=int(head),
            num_layers=request.num_layers,
            num_heads=request.num_kv_heads,
            fewest=fewest,
        )
        for head in first
    ]
    return all_heads(columns[0], request.num_kv_heads) if len(columns) == 1 else np.stack(columns, axis=1)[:, of]


def check_budgets(
    method: Method, lengths: np.ndarray, request: RequestShape, budget_rows: Callable[..., np.ndarray]
) -> None:
    """Raise ValueError if a prompt that is or will be compressed has no room beside its protected rows, by these
    budgets: `budget_rows(lengths, layer, request)`.
    """
    schedule, protected = method.schedule, method.protected
    for layer in range(request.num_layers):
        rows = budget_rows(lengths, layer, request)
        returns = np.zeros(rows.shape, bool)
        if schedule.kind != "append" and method.forgets:
            beyond = schedule.interval if schedule.kind == "interval" else 1
            returns = lengths[:, None] + request.reserve >= rows + beyond
        impossible = ((rows < lengths[:, None]) | returns) & (rows < protected.fewest)
        if impossible.any():
            at, head = np.argwhere(impossible)[0]
            raise ValueError(
                f"{type(method).__name__}: a prompt of {counted(lengths[at], 'token')} has a budget of "
                f"{counted(max(0, rows[at, head]), 'row')}, which must be more than {protected}."
            )


# --- how tokens enter ---


def append_and_attend(
    group: AnyGroup, state: Any, tokens: StepInputs, *, apart: bool = True
) -> tuple[Float[Array, "B T H D"], AnyGroup, Any]:
    """The step of most methods: the tokens stand behind the rows there are, and attend to all of them.

    So do their scores, where the state has those of the rows.
    """
    longer, state = append_with_scores(group, state, tokens, apart=apart)
    how = tokens.soft_cap, tokens.degree_power
    if tokens.q.shape[1] == 1:
        return with_sinks(attend_cache(longer, tokens.q, *how), tokens.sink_logits), longer, state
    among = attend_new(tokens.q, tokens.k, tokens.v, tokens.real, tokens.soft_cap)
    attended = combine(attend_cache(group, tokens.q, *how), among, tokens.sink_logits)
    return attended, longer, state


def append_tokens(group: AnyGroup, tokens: StepInputs, *, apart: bool = False) -> AnyGroup:
    """The new tokens behind the rows there are; `apart` for methods whose steps do nothing else with a cache."""
    return append(group, *_new_rows(tokens), apart=apart)


def append_with_scores(group: Any, state: Any, tokens: StepInputs, *, apart: bool) -> tuple[Any, Any]:
    """`append_tokens`, and their scores where the state has those of the rows."""
    if state is None or "scores" not in state:
        return append_tokens(group, tokens, apart=apart), state
    assert tokens.scores is not None
    new = *_new_rows(tokens), jnp.swapaxes(tokens.scores, 1, 2)
    longer, scores = append_scored(group, state["scores"], *new, apart=apart)
    return longer, state | {"scores": scores}


def _new_rows(tokens: StepInputs) -> tuple[Array, Array, Array, Array]:
    return jnp.swapaxes(tokens.k, 1, 2), jnp.swapaxes(tokens.v, 1, 2), tokens.positions, tokens.real


def slots_shardable(method: "Method") -> bool:
    """Whether devices may share the slots of a head: steps only append to the rows there are and attend to them."""
    return method.schedule.kind in ("append", "interval") and method.storage in ("tokens", "centroids", "moved")


def is_by_head(method: "Method", num_layers: int) -> bool:
    """Whether heads of unequal budgets may be compressed as sequences of their own: each knows of no other, and steps
    only append to rows and attend to them.
    """
    beside = {"heads", "selection", "hidden"}  # other heads, what they pass on to later layers, and what is large
    alone = slots_shardable(method) and method.storage != "moved"
    return alone and not any(beside & method.inputs(layer) for layer in range(num_layers))


def one_by_one(
    step: Callable[[LayerCache, State, StepInputs], tuple[Array, LayerCache, State]],
    group: LayerCache,
    state: State,
    tokens: StepInputs,
) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
    """T tokens through a step that takes one: for methods that drop rows at every token."""
    if tokens.q.shape[1] == 1:
        return step(group, state, tokens)

    def body(carry, token):
        group, state = carry
        attended, group, state = step(group, state, replace(token, sink_logits=tokens.sink_logits))
        return (group, state), attended[:, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], replace(tokens, sink_logits=None))
    (group, state), attended = jax.lax.scan(body, (group, state), by_token)
    return jnp.moveaxis(attended, 0, 1), group, state
