"""What the recall methods share: nothing is thrown away, and every step attends to a budget of rows.

An index tells what may be worth reading without reading it. A step is

    follow     the new token enters the index, where it does so at every token
    choose     scores of the query with the index -> rows [B, K, J, R], -1 where there is none
    attend     to these and to the rows that the index does not know yet, by their numbers, where they lie

J selections per KV head: one for each of its query heads, or one for all. The index is a dict of arrays, as every
state; `budget` are the rows wanted, `indexed` is the slot behind the last one that the index knows, `recalled` what
the last step chose. Slots hold the tokens in the order of their positions.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache import KVCache, LayerCache, NewTokens, State, groups
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.methods.base import Budgeted, append_new, one_by_one
from clusterkv_jax.methods.request import LayerPlan, Request
from clusterkv_jax.sharding import over_heads

# A prompt within its budget is read whole for as long as no more tokens than these follow it.
SHORT_ANSWER = 320

Index = dict[str, Array]


class Recall(Budgeted):
    """Keeps every row and attends to B of them. The dataclasses below it have the field `dense_layers`."""

    dense_layers: int

    @property
    def always_kept(self) -> dict[str, int]:
        """Nothing by default."""
        return {}

    @property
    def fewest_dense_layers(self) -> int:
        """The first layers that attend to everything."""
        return self.dense_layers

    # --- what a method answers ---

    def build(
        self,
        prompt: LayerCache,
        queries: Float[Array, "B H N D"] | None,
        rows: Int[Array, " B"],
        reserve: int,
        key: Array,
    ) -> Index:
        """The index of a prompt of which `rows` are recalled, with room for `reserve` more tokens."""
        raise NotImplementedError

    def follow(self, index: Index, group: LayerCache, new: NewTokens) -> Index:
        """The index after a token that `group` holds already."""
        del group, new
        return index

    def choose(
        self, index: Index, q: Float[Array, "B K G D"], real: Bool[Array, " B"] | None = None
    ) -> Int[Array, "B K J R"]:
        """The rows to recall for these queries; in batch rows that are not `real` (default all) those recalled last.

        Sinks that nothing fills yet are among them.
        """
        raise NotImplementedError

    def selections(self, queries: int) -> int:
        """J, by the query heads of a KV head."""
        return queries

    def unknown(self, tokens: int) -> int:
        """The most rows that the index does not know yet while a step of so many tokens is taken."""
        raise NotImplementedError

    def most_recalled(self, rows: int) -> int:
        """Rows that a budget of so many may recall."""
        return rows

    # --- what is common ---

    def kept(self, lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Everything."""
        del rows
        return lengths

    def plan(self, layer: int, request: Request) -> LayerPlan:
        """Slots for all tokens; no index for dense layers, and where the budget covers every prompt."""
        plan = super().plan(layer, request)
        lengths = np.asarray(request.lengths)
        rows = np.stack([self.rows(lengths, request, layer, heads[0]) for heads in plan.heads])
        whole = np.all(rows >= lengths + (request.reserve if request.reserve > SHORT_ANSWER else 0))
        dense = bool(whole) or layer < self.fewest_dense_layers
        most = np.max(np.minimum(np.maximum(rows, self.fewest_rows), lengths + request.reserve))
        return replace(plan, keep_all=(dense,) * len(plan.heads), recalled=self.most_recalled(int(most)))

    def compress_group(
        self,
        prompt: LayerCache,
        queries: Float[Array, "B H N D"] | None,
        rows: Int[Array, " B"],
        capacity: int,
        plan: LayerPlan,
        key: Array | None,
        handed: Any,
    ) -> tuple[LayerCache, State, None]:
        """The prompt as it is, and its index."""
        del handed
        assert key is not None
        return prompt, self.index(prompt, queries, rows, plan.recalled, capacity - prompt.capacity, key), None

    def index(
        self,
        prompt: LayerCache,
        queries: Float[Array, "B H N D"] | None,
        rows: Int[Array, " B"],
        count: int,
        reserve: int,
        key: Array,
        **given: Any,
    ) -> Index:
        """The index of a prompt of whose rows a step recalls `count` at most; `given` goes to `build`."""
        batch, heads = prompt.length.shape
        each = 1 if queries is None else self.selections(queries.shape[1] // heads)
        common = {
            "budget": rows,
            "indexed": prompt.length[:, 0],
            "recalled": jnp.full((batch, heads, each, count), -1, jnp.int32),
        }
        return common | self.build(prompt, queries, rows, reserve, key, **given)

    def step_group(
        self, group: LayerCache, state: Any, new: NewTokens
    ) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
        """Append, look up, attend, token after token: each has its own rows."""
        return one_by_one(partial(self._step, unknown=self.unknown(new.q.shape[1])), group, state, new)

    def _step(self, group: LayerCache, state: Any, new: NewTokens, *, unknown: int):
        group = append_new(group, new)
        state = self.follow(state, group, new)
        asked = new.q if new.ahead is None else new.ahead
        rows = self.choose(state, by_kv_head(asked, group), new.real[:, 0])
        attend = partial(recalled_attention, unlisted=unknown)
        args = (by_kv_head(new.q, group), group.keys, group.values, rows, state["indexed"], group.length)
        return over_heads(attend, *args).reshape(new.q.shape), group, state | {"recalled": rows}


def unless_over(real: Bool[Array, " B"] | None, rows: Int[Array, "B K J R"], index: Index) -> Int[Array, "B K J R"]:
    """`rows`, in batch rows that are not `real` those recalled last."""
    return rows if real is None else jnp.where(real[:, None, None, None], rows, index["recalled"])


def by_kv_head(q: Float[Array, "B 1 H D"], group: LayerCache) -> Float[Array, "B K G D"]:
    """The queries of one token, those of a KV head together."""
    return q.reshape(q.shape[0], group.length.shape[1], -1, q.shape[-1])


def recalled_rows(cache: KVCache) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """What the last step recalled, as nested lists: rows of each query head (or of all of a KV head together, where
    they share them) [layer][batch row][selection], and different rows of each KV head [layer][batch row][KV head].

    Layers without an index have none; where heads stand in groups, they come in the order of the groups.
    """
    rows, union = [], []
    named = [
        [(kept["recalled"], group.length) for group, kept in zip(groups(layer), state, strict=True) if _recalls(kept)]
        for layer, state in zip(cache.layers, cache.state, strict=True)
    ]
    for both in jax.device_get(named):
        # Before a prompt has filled its sinks they hold nothing.
        found = [np.where(x < length[:, :, None, None], x, -1) for x, length in both]
        rows.append(_per_row([(x >= 0).sum(-1) for x in found]))
        union.append(_per_row([_different(x) for x in found]))
    return (rows, union) if any(rows) else ([], [])


def _recalls(state: State) -> bool:
    return state is not None and "recalled" in state


def _per_row(counts: list[np.ndarray]) -> list[list[int]]:
    return np.concatenate([x.reshape(x.shape[0], -1) for x in counts], axis=1).tolist() if counts else []


def _different(rows: Int[np.ndarray, "B K J R"]) -> Int[np.ndarray, "B K"]:
    """How many different rows the selections of a KV head name."""
    ordered = np.sort(rows.reshape(*rows.shape[:2], -1), axis=-1)
    first = np.diff(ordered, axis=-1, prepend=-1) != 0
    return (first & (ordered >= 0)).sum(-1)
