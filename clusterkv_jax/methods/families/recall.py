"""What the recall methods share: nothing is thrown away, and every step attends to a budget of rows.

An index tells what may be worth reading without reading it. A step is

    follow     the new token enters the index, where it does so at every token
    choose     scores of the query with the index -> rows [B, K, J, R], -1 where there is none
    attend     to these and to the rows that the index does not know yet, by their numbers, where they lie

J selections per KV head: one for each of its query heads, or one for all. The index is a method's memory: `budget` are
the rows wanted, `indexed` is the slot behind the last one that the index knows, `recalled` what the last step chose.
Slots hold the tokens in the order of their positions.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.budget import MOST_ROWS, Budget
from clusterkv_jax.cache.attention import with_sinks
from clusterkv_jax.cache.layers import KVCache, LayerCache, State, StepInputs, groups
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.methods.base import Compressed, Method, Rows, StorageKind
from clusterkv_jax.methods.budgets import check_budgets, head_rows
from clusterkv_jax.methods.request import RequestShape, all_heads
from clusterkv_jax.methods.steps import append_tokens, one_by_one
from clusterkv_jax.runtime.errors import check_fields, is_count
from clusterkv_jax.runtime.sharding import fetch, over_heads

# A prompt within its budget is read whole for as long as no more tokens than these follow it.
SHORT_ANSWER = 320

Index = State


@dataclass(frozen=True)
class Recall(Method):
    """Keeps every row and attends to B of them. The dataclasses below it have the field `dense_layers`."""

    budget: Budget

    storage: ClassVar[StorageKind] = "index"
    # What `build` may be told beside the prompt.
    options: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # a field of the methods, each in its own place
        dense_layers: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("dense_layers", is_count(self.dense_layers), "a whole number of at least 0"),
            ("cache_dtype", self.cache_dtype is None, "None: rows that are recalled one by one are not quantised"),
        )

    # --- what a method answers ---

    @abstractmethod
    def build(self, prompt: LayerCache, rows: Rows, reserve: int, **options: Any) -> Index:
        """The index of a prompt of which `rows.budget` are recalled, with room for `reserve` more tokens."""

    def follow(self, index: Index, group: LayerCache, token: StepInputs) -> Index:
        """The index after a token that `group` holds already."""
        del group, token
        return index

    @abstractmethod
    def choose(
        self, index: Index, q: Float[Array, "B K G D"], real: Bool[Array, " B"] | None = None
    ) -> Int[Array, "B K J R"]:
        """The rows to recall for these queries; in sequences that are not `real` (default all) those recalled last.

        Sinks that nothing fills yet are among them.
        """

    def selections(self, queries: int) -> int:
        """J, by the query heads of a KV head."""
        return queries

    @abstractmethod
    def unindexed(self, tokens: int) -> int:
        """The most rows that the index does not know yet while a step of so many tokens is taken."""

    def unchosen(self, index: Index) -> Int[Array, " B"]:
        """The slot from which on a step attends to every row, whatever is chosen: what the index does not know yet."""
        return index["indexed"]

    def attended(self, index: Index, q: Float[Array, "B K G D"]) -> Int[Array, "B K J R"]:
        """All rows of the index that these queries attend to."""
        return self.choose(index, q)

    def dim(self, index: Index) -> int | None:
        """D of the keys in an index, None where it does not tell. Raises KeyError for the index of another method."""
        del index
        return None

    def most_recalled(self, rows: int) -> int:
        """Rows that a budget of so many may recall."""
        return rows

    def is_dense(self, layer: int) -> bool:
        """Whether a layer attends to everything."""
        return layer < self.dense_layers

    # --- what is common ---

    @override
    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        """B of each prompt; everything in dense layers, and where the budget covers all that may occur."""
        rows = super().budget_rows(lengths, layer, request)
        possible = np.asarray(request.lengths)
        whole = possible + (request.reserve if request.reserve > SHORT_ANSWER else 0)
        covered = np.all(super().budget_rows(possible, layer, request) >= whole[:, None])
        everything = np.full(len(lengths), MOST_ROWS, np.int64)
        return all_heads(everything, request.num_kv_heads) if covered or self.is_dense(layer) else rows

    @override
    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        """The budget must be possible, whether a layer uses it or is dense."""
        check_budgets(self, lengths, request, partial(head_rows, self.budget))

    @override
    def compress(self, rows: Rows) -> Compressed:
        """The prompt as it is, and its index."""
        prompt: Any = rows.cache
        count = self.most_recalled(rows.plan.most_rows)
        return Compressed(prompt, self.index(rows, count, rows.plan.reserve))

    def index(self, rows: Rows, count: int, reserve: int, **options: Any) -> Index:
        """The index of a prompt of whose rows a step recalls `count` at most; `options` go to `build`."""
        prompt: Any = rows.cache
        batch, heads = prompt.length.shape
        each = 1 if rows.queries is None else self.selections(rows.queries.shape[1] // heads)
        common = {
            "budget": rows.budget,
            "indexed": prompt.length[:, 0],
            "recalled": jnp.full((batch, heads, each, count), -1, jnp.int32),
        }
        return common | self.build(prompt, rows, reserve, **options)

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """Append, look up, attend, token after token: each has its own rows."""
        step = partial(self._step, unindexed=self.unindexed(tokens.q.shape[1]))
        return one_by_one(step, group, state, tokens)

    def _step(self, group: LayerCache, state: State, token: StepInputs, *, unindexed: int):
        group = append_tokens(group, token)
        state = self.follow(state, group, token)
        queries = token.q if token.lookup is None else token.lookup
        rows = self.choose(state, by_kv_head(queries, group), token.real[:, 0])
        attend = partial(recalled_attention, unlisted=unindexed, soft_cap=token.soft_cap, return_lse=True)
        args = (by_kv_head(token.q, group), group.keys, group.values, rows, self.unchosen(state), group.length)
        out, lse = over_heads(attend, *args)
        attended = out.reshape(token.q.shape), lse.reshape(token.q.shape[:3])
        return with_sinks(attended, token.sink_logits), group, state | {"recalled": rows}


def unless_over(real: Bool[Array, " B"] | None, rows: Int[Array, "B K J R"], index: Index) -> Int[Array, "B K J R"]:
    """`rows`, in sequences that are not `real` those recalled last."""
    return rows if real is None else jnp.where(real[:, None, None, None], rows, index["recalled"])


def by_kv_head(q: Float[Array, "B 1 H D"], group: LayerCache) -> Float[Array, "B K G D"]:
    """The queries of one token, those of a KV head together."""
    return q.reshape(q.shape[0], group.length.shape[1], -1, q.shape[-1])


def recalled_rows(cache: KVCache) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """What the last step recalled, as nested lists: rows of each query head (or of all of a KV head together, where
    they share them) [layer][sequence][selection], and different rows of each KV head [layer][sequence][KV head].

    Layers without an index have none; where heads stand in groups, they come in the order of the groups.
    """
    rows, union = [], []
    named = [
        [
            (group_state["recalled"], group.length)
            for group, group_state in zip(groups(layer), state, strict=True)
            if _recalls(group_state)
        ]
        for layer, state in zip(cache.layers, cache.state, strict=True)
    ]
    for both in fetch(named):
        # Before a prompt has filled its sinks they hold nothing.
        tokens = [np.where(x < length[:, :, None, None], x, -1) for x, length in both]
        rows.append(_per_row([(x >= 0).sum(-1) for x in tokens]))
        union.append(_per_row([_different(x) for x in tokens]))
    return (rows, union) if any(rows) else ([], [])


def _recalls(state: State | None) -> bool:
    return state is not None and "recalled" in state


def _per_row(counts: list[np.ndarray]) -> list[list[int]]:
    return np.concatenate([x.reshape(x.shape[0], -1) for x in counts], axis=1).tolist() if counts else []


def _different(rows: Int[np.ndarray, "B K J R"]) -> Int[np.ndarray, "B K"]:
    """How many different rows the selections of a KV head name."""
    ordered = np.sort(rows.reshape(*rows.shape[:2], -1), axis=-1)
    first = np.diff(ordered, axis=-1, prepend=-1) != 0
    return (first & (ordered >= 0)).sum(-1)
