"""ChunkKV: keep whole runs of tokens, the same ones for all heads of a layer, and share them between layers (Liu et
al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference").
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.base import Input, Rows
from clusterkv_jax.methods.families.eviction import Windowed, unprotected, window_of
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.methods.schedule import Protected
from clusterkv_jax.methods.snapkv import snap_scores
from clusterkv_jax.runtime.errors import check_fields, counted, is_count, is_one_of
from clusterkv_jax.scores import as_ranked, chunk_sums, group_mean, window_scores

# What kvpress pools its window scores with.
KVPRESS_KERNEL = 5


@dataclass(frozen=True)
class ChunkKV(Windowed):
    """Keep the last `window` rows and the runs of `chunk` rows that they attend to most, one set for all KV heads.

    mode "exact": runs tile the rows before the window, the best ones are kept whole, and the first rows of the next
    one fill the budget. mode "kvpress": runs tile all rows, scores are SnapKV's (pooled), a run counts by its mean, and
    only whole runs are kept: int(ceil(n / chunk) * ratio) of them, at least one.
    With `reuse_layers` = N only every N-th layer chooses; the others keep the same rows.

    Attributes:
        budget: rows per KV head, window included; no `shares` where layers reuse a choice.
        window: last queries, whose rows always stay.
        chunk: tokens of a run.
        mode: the paper's rule or kvpress's.
        reuse_layers: layers that share one choice.
        decode_interval: rows beyond B that trigger a new choice, of runs of the rows there are then; None appends
            for ever.
    """

    window: int = 32
    chunk: int = 10
    mode: Literal["exact", "kvpress"] = "exact"
    reuse_layers: int = 1
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("chunk", is_count(self.chunk, 1), "a whole number of at least 1"),
            ("mode", is_one_of(self.mode, "exact", "kvpress"), '"exact" or "kvpress"'),
            ("reuse_layers", is_count(self.reuse_layers, 1), "a whole number of at least 1"),
        )
        alike = self.reuse_layers == 1 or self.budget.shares is None
        check_fields(self, ("budget", alike, "one without shares where layers reuse what others keep"))

    @property
    @override
    def protected(self) -> Protected:
        """kvpress keeps a single run if it must."""
        return Protected() if self.mode == "kvpress" else super().protected

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        """Every `reuse_layers`-th layer selects; what is compressed while decoding remembers queries in every layer."""
        if layer % self.reuse_layers == 0:
            return frozenset({"heads", "queries"})
        reuses: frozenset[Input] = frozenset({"heads", "selection"})
        queries: frozenset[Input] = frozenset() if self.decode_interval is None else frozenset({"queries"})
        return reuses | queries

    @override
    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        """As for all methods; kvpress needs rows before the window."""
        if self.mode == "kvpress":
            for n, b in zip(lengths, self.budget_rows(lengths, 0, request)[:, 0], strict=True):
                if b < n <= self.window:
                    raise ValueError(
                        f"ChunkKV: a prompt of {counted(n, 'token')} must be longer than window = {self.window}."
                    )
        super().check(lengths, request)

    @override
    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        """B of each prompt; in mode "kvpress" the rows of whole runs, of which a short last one may lack some."""
        rows = super().budget_rows(lengths, layer, request)
        if self.mode == "exact" or np.min(rows) >= MOST_ROWS:
            return rows
        column = lengths[:, None]
        runs = -(-column // self.chunk)
        ratio = self.budget.ratio
        if ratio is None:
            whole = rows // self.chunk
        else:
            # kvpress takes the share to drop, and 1 - that of the runs stays: 40 runs at 0.1 are 3, not 4.
            share = 1 - (1 - ratio) if self.budget.base != "prompt+new" else rows / np.maximum(column, 1)
            whole = np.floor(runs * share).astype(np.int64)
        return np.broadcast_to(np.maximum(whole, 1) * self.chunk, rows.shape)

    @override
    def score(self, rows: Rows) -> Float[Array, "B 1 C"]:
        """One score for all heads."""
        if self.mode == "exact":
            cache: Any = rows.cache
            return jnp.sum(group_mean(window_scores(*window_of(rows, self.window), cache)), axis=1, keepdims=True)
        scores = snap_scores(rows, self.window, KVPRESS_KERNEL, "avg", True)
        before = unprotected(scores, rows.cache.length, super().protected)
        top = jnp.max(jnp.where(before, scores, 0.0), axis=(1, 2), keepdims=True) + 1
        return jnp.sum(jnp.where(before, scores, top), axis=1, keepdims=True)

    @override
    def choose(
        self, scores: Float[Array, "B 1 C"], length: Int[Array, "B K"], budget: Int[Array, " B"], capacity: int
    ) -> Bool[Array, "B 1 C"]:
        """Whole runs, one set for all heads."""
        slot, length = ordinals(capacity, 3), length[:, :1]
        if self.mode == "exact":
            before = slot < length[..., None] - self.window
            sums = chunk_sums(jnp.where(before, scores, 0.0), self.chunk)
            best = _fill(sums, length - self.window, budget - self.window, self.chunk, capacity)
            return best | (~before & (slot < length[..., None]))
        sums = chunk_sums(jnp.where(slot < length[..., None], scores, 0.0), self.chunk)
        sizes = _sizes(length, self.chunk, sums.shape[-1])
        means = sums / jnp.maximum(sizes, 1).astype(jnp.float32)
        return _fill(means, length, budget, self.chunk, capacity, whole=True)


def _sizes(rows: Int[Array, "B 1"], chunk: int, count: int) -> Int[Array, "B 1 count"]:
    """Rows in each of `count` runs that tile the first `rows` rows."""
    return jnp.clip(rows[..., None] - chunk * ordinals(count, 3), 0, chunk)


def _fill(
    scores: Float[Array, "B 1 count"],
    rows: Int[Array, "B 1"],
    counts: Int[Array, " B"],
    chunk: int,
    capacity: int,
    whole: bool = False,
) -> Bool[Array, "B 1 C"]:
    """The first rows of runs in the order of their scores, until `wanted` of the `rows` tiled are taken.

    `whole` counts a short run as a full one, so that it takes a full one's place.
    """
    count = scores.shape[-1]
    sizes = _sizes(rows, chunk, count)
    order = jnp.argsort(jnp.where(sizes > 0, -as_ranked(scores), jnp.inf), axis=-1, stable=True)
    cost = jnp.full_like(sizes, chunk) if whole else sizes
    behind = jnp.cumsum(jnp.take_along_axis(cost, order, axis=-1), axis=-1)
    ahead = behind - jnp.take_along_axis(cost, order, axis=-1)
    # Back from the order of scores to that of the rows.
    ahead = jnp.take_along_axis(ahead, jnp.argsort(order, axis=-1), axis=-1)
    take = jnp.minimum(jnp.clip(counts[:, None, None] - ahead, 0, chunk), sizes)
    selection = ordinals(chunk, 4) < take[..., None]
    return selection.reshape(*scores.shape[:2], count * chunk)[..., :capacity]
