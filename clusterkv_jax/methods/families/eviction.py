"""What the eviction methods share: rows are kept or dropped, never merged.

Windowed     keeps what the last queries attend to; compresses again every `decode_interval` tokens, if at all
EveryStep    drops one row for every token beyond the budget
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import (
    KVCache,
    LayerCache,
    NewTokens,
    State,
    head_by_head,
    kept_slots,
    put_row,
    row_at,
    take_rows,
    take_slots,
)
from clusterkv_jax.errors import check_fields, is_count
from clusterkv_jax.methods.base import Budgeted, LayerPlan, Request, append_and_attend
from clusterkv_jax.scores import last_queries
from clusterkv_jax.sharding import over_heads


class Windowed(Budgeted):
    """Keeps the last `window` rows, and of the rows before them those that the last `window` queries attend to most.

    The dataclasses below it have these fields, and say with `keep` which rows that are.
    """

    budget: Budget
    window: int
    decode_interval: int | None

    def __post_init__(self) -> None:
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("window", is_count(self.window, 1), "a whole number of at least 1"),
            (
                "decode_interval",
                self.decode_interval is None or is_count(self.decode_interval, 1),
                "a whole number of at least 1 or None",
            ),
        )

    @property
    def always_kept(self) -> dict[str, int]:
        """The rows of the queries that choose."""
        return {"window": self.window}

    @property
    def decode_rows(self) -> int | None:
        """None appends while decoding, as published."""
        return self.decode_interval

    def keep(
        self, layer: LayerCache, queries: Float[Array, "B H W D"], positions: Int[Array, "B W"], rows: Int[Array, " B"]
    ) -> Bool[Array, "B #K C"]:
        """The rows that stay, `rows` of them where there are more; the last `window` are among them."""
        raise NotImplementedError

    def start(self, group: LayerCache, rows: Array, queries: Array | None, plan: LayerPlan, key: Any) -> State:
        """The budget and the window's queries, where there is compression while decoding."""
        del plan, key
        if self.decode_interval is None:
            return None
        recent = last_queries(needed(self, queries), seen(group), self.window)
        return {"budget": rows, "queries": recent}

    def compress_group(
        self,
        prompt: LayerCache,
        queries: Float[Array, "B H N D"] | None,
        rows: Int[Array, " B"],
        capacity: int,
        plan: LayerPlan,
        key: Array | None,
        handed: Any,
    ) -> tuple[LayerCache, State, Any]:
        """Keep the rows that the window attends to, or those that an earlier layer kept."""
        if handed is None:
            handed = kept_slots(self.chosen(prompt, queries, rows), capacity)
        return take_slots(prompt, handed), self.start(prompt, rows, queries, plan, key), handed

    def chosen(self, prompt: LayerCache, queries: Array | None, rows: Int[Array, " B"]) -> Bool[Array, "B K N"]:
        """The rows of a prompt that stay."""
        lengths = prompt.length[:, 0]
        recent = last_queries(needed(self, queries), lengths, self.window)
        positions = lengths[:, None] - self.window + jnp.arange(self.window)
        return _or_all(self.keep(prompt, recent, positions, rows), prompt, lengths > rows)

    def step_group(
        self, group: LayerCache, state: Any, new: NewTokens
    ) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
        """Append, attend, and remember the last `window` queries."""
        attended, group, _ = append_and_attend(group, state, new)
        count = jnp.sum(new.real, axis=1, dtype=jnp.int32)
        queries = jnp.concatenate([state["queries"], jnp.swapaxes(new.q, 1, 2)], axis=2)
        return attended, group, state | {"queries": last_queries(queries, self.window + count, self.window)}

    def recompress_group(
        self, group: LayerCache, state: Any, target: Int[Array, " B"], position: Array, handed: Any
    ) -> tuple[LayerCache, State, Any]:
        """As after the prompt, with the last `window` queries there are, over the rows there are."""
        if handed is None:
            positions = position[:, None] - self.window + jnp.arange(self.window)
            handed = self.keep(group, state["queries"], positions, target)
        keep = _or_all(handed, group, self.held(group) > target)

        def take(tree):
            group, keep = tree
            return take_rows(group, keep, group.capacity)[0], keep

        group, _ = over_heads(lambda *tree: head_by_head(take, tree), group, keep)
        return group, state, handed


class EveryStep(Budgeted):
    """Drops one row for every token beyond the budget, so that no step ends with more than B rows."""

    @property
    def decode_rows(self) -> int:
        """One row too many is too many."""
        return 1

    def slots_after(self, kept: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
        """B rows, and one slot for the token whose step decides what goes."""
        return np.minimum(kept + request.reserve, np.maximum(kept, rows) + 1)

    def due(self, cache: KVCache) -> None:
        """Never: the steps do it."""
        del cache


def needed(method: Budgeted, queries: Array | None) -> Array:
    """The queries, which a method that scores cannot do without."""
    if queries is None:
        raise ValueError(f"{type(method).__name__} chooses rows by attention: queries must be [B,H,N,D], got None.")
    return queries


def seen(group: LayerCache) -> Int[Array, " B"]:
    """Tokens behind a group of heads that has merged or dropped none, or whose last row is its last token's."""
    assert group.positions is not None
    return jnp.max(group.positions[:, 0], axis=-1) + 1


def replace_row(group: LayerCache, slot: Int[Array, "B K"], drop: Bool[Array, " B"]) -> LayerCache:
    """Drop a row per head by moving the last one into its slot, in batch rows where `drop` holds."""
    last = group.length - 1
    group = put_row(group, slot, row_at(group, last), drop)
    nothing = LayerCache(
        *(jnp.zeros_like(x) for x in (group.keys[:, :, :1], group.values[:, :, :1])),
        degree=jnp.zeros_like(group.degree[:, :, :1]),
        length=last,
        positions=jnp.zeros_like(last)[..., None],
    )
    group = put_row(group, last, nothing, drop)
    return replace(group, length=jnp.where(drop[:, None], last, group.length))


def _or_all(keep: Bool[Array, "B #K C"], layer: LayerCache, chosen: Bool[Array, " B"]) -> Bool[Array, "B K C"]:
    """The rows to keep in batch rows where there is something to choose, all rows in the others."""
    return jnp.where(chosen[:, None, None], keep, layer.degree > 0)
