"""What the clustering methods share: when to cluster, the slots that takes, and clustering in place while decoding."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax import soft_matching
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import HeadGroups, KVCache, Layer, LayerCache, from_tokens, groups, resize, select_heads
from clusterkv_jax.checks import check_fields, is_count
from clusterkv_jax.kernels.dispatch import platform
from clusterkv_jax.methods.base import MOST_ROWS, LayerPlan, Method, Request, aligned, budget_rows
from clusterkv_jax.sharding import over_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clustered:
    """State of a clustered layer: the rows each batch row may keep, and the rounds done in its life."""

    budget: Int[Array, " B"]
    rounds: Int[Array, " B"]


class Clustering(Method):
    """Chunked soft matching down to a budget, after the prompt and every `interval` generated tokens.

    The dataclasses below it have these fields, each in its own order, and say with `ratios` and `merge_of` how many
    edges a round merges, and with `prefill_slack` how far above its budget a prompt must be to be clustered at all.
    """

    budget: Budget
    sinks: int
    recent: int
    chunk: int
    merge_of: str
    interval: int

    @property
    def ratios(self) -> tuple[float, ...]:
        """Share of the middle (or of A) merged in each round; the last serves all later rounds."""
        raise NotImplementedError

    @property
    def prefill_slack(self) -> int:
        """A prompt of n tokens is clustered if n >= B + prefill_slack."""
        return 0

    def full_heads(self, layer: int, request: Request) -> tuple[int, ...]:
        """KV heads of this layer that keep all their tokens."""
        del layer, request
        return ()

    def __post_init__(self) -> None:
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("sinks", is_count(self.sinks), "a whole number of at least 0"),
            ("recent", is_count(self.recent), "a whole number of at least 0"),
            ("chunk", is_count(self.chunk, 2) and self.chunk % 2 == 0, "an even number of rows, at least 2"),
            ("interval", is_count(self.interval, 1), "a whole number of at least 1"),
            ("merge_of", self.merge_of in ("A", "middle"), '"A" or "middle"'),
        )

    def rows(self, lengths: np.ndarray, request: Request) -> np.ndarray:
        """B of each prompt (see `Budget`); without any merging (all ratios 0) more than there can be."""
        if not any(self.ratios):
            return np.full(np.shape(lengths), MOST_ROWS, np.int64)
        return budget_rows(self.budget, lengths, request, self.default_base)

    def check(self, lengths: Iterable[int], request: Request) -> None:
        """Raise ValueError if a prompt that is or will be clustered has no room for more than sinks and recent rows."""
        lengths = np.asarray(tuple(lengths))
        for n, b in zip(lengths, self.rows(lengths, request), strict=True):
            clustered = b < n or n + request.reserve >= b + self.interval
            if clustered and b <= self.sinks + self.recent:
                raise ValueError(
                    f"{type(self).__name__}: a prompt of {n} tokens has a budget of {b} rows, "
                    f"which must be more than sinks + recent = {self.sinks} + {self.recent}."
                )

    def plan(self, layer: int, request: Request) -> LayerPlan:
        """Full heads get a slot per token; the others the most rows they can come to hold."""
        full = self.full_heads(layer, request)
        rest = tuple(head for head in range(request.num_kv_heads) if head not in full)
        capacity = request.longest + request.reserve
        groups = [(full, capacity, True), (rest, min(capacity, self._most_rows(request)), False)]
        heads, capacities, keep_all = zip(*(group for group in groups if group[0]), strict=True)
        return LayerPlan(heads, tuple(map(aligned, capacities)), keep_all)

    def _most_rows(self, request: Request) -> int:
        lengths = np.asarray(request.lengths)
        budget = self.rows(lengths, request)
        # Traced lengths cannot be checked: no budget leaves fewer rows than sinks, recent ones and one centroid.
        budget = np.maximum(budget, self.sinks + self.recent + 1)
        clustered = (lengths > budget) & (lengths >= budget + self.prefill_slack)
        kept = np.where(clustered, budget, lengths)
        if request.reserve == 0:
            return int(np.max(kept))
        # A step begins with at most B + interval - 1 rows, or with what the prompt left, and appends step_tokens.
        most = np.maximum(kept, budget + self.interval - 1) + request.step_tokens
        return int(np.max(np.where(clustered, most, np.minimum(most, lengths + request.reserve))))

    def compress(
        self,
        queries: Float[Array, "B H N D"] | None,
        keys: Float[Array, "B K N D"],
        values: Float[Array, "B K N D"],
        lengths: Int[Array, " B"],
        rows: Int[Array, " B"],
        plan: LayerPlan,
        key: Array | None,
    ) -> tuple[Layer, Clustered | None]:
        """Cluster the prompt of every head that is not a full one."""
        del queries, key
        layer = from_tokens(keys, values, lengths)
        rounds = jnp.zeros(lengths.shape, jnp.int32)
        made = []
        for heads, capacity, keep_all in zip(plan.heads, plan.capacities, plan.keep_all, strict=True):
            group = layer if len(plan.heads) == 1 else select_heads(layer, heads)
            if not keep_all:
                target = jnp.where(lengths >= rows + self.prefill_slack, rows, lengths)
                cluster = partial(self._cluster, slots=min(capacity, group.capacity))
                group, rounds = over_heads(cluster, group, target, rounds)
            made.append(resize(group, capacity))
        state = None if all(plan.keep_all) else Clustered(rows, rounds)
        return (made[0] if len(made) == 1 else HeadGroups(tuple(made), plan.heads)), state

    def _cluster(self, group: LayerCache, budget: Int[Array, " B"], rounds: Int[Array, " B"], slots: int | None = None):
        return soft_matching.cluster(
            group,
            budget,
            rounds,
            soft_matching.merge_schedule(group.capacity, self.chunk, self.ratios, self.merge_of),
            sinks=self.sinks,
            recent=self.recent,
            chunk=self.chunk,
            slots=slots,
        )

    def due(self, cache: KVCache) -> Bool[Array, ""] | None:
        """True when a batch row holds `interval` rows more than its budget in some layer."""
        full = [
            jnp.any(groups(layer)[-1].length >= (state.budget + self.interval)[:, None])
            for layer, state in zip(cache.layers, cache.state, strict=True)
            if state is not None
        ]
        return jnp.any(jnp.stack(full)) if full else None

    def recompress(self, cache: KVCache) -> KVCache:
        """Cluster the batch rows that are due, layer by layer, in place."""
        made = [self._recompress_layer(layer, s) for layer, s in zip(cache.layers, cache.state, strict=True)]
        return replace(cache, layers=tuple(layer for layer, _ in made), state=tuple(state for _, state in made))

    def _recompress_layer(self, layer: Layer, state: Clustered | None) -> tuple[Layer, Clustered | None]:
        if state is None:
            return layer, None
        group = groups(layer)[-1]  # full heads, where there are any, come first
        held = group.length[:, 0]
        target = jnp.where(held >= state.budget + self.interval, state.budget, held)
        # The GPU kernels work in place on all heads at once; elsewhere float32 copies are made, so one head at a time.
        cluster = self._cluster if platform() == "gpu" else self._cluster_in_place
        clustered, rounds = over_heads(cluster, group, target, state.rounds)
        if isinstance(layer, HeadGroups):
            clustered = replace(layer, groups=(*layer.groups[:-1], clustered))
        return clustered, replace(state, rounds=rounds)

    def _cluster_in_place(self, group: LayerCache, budget: Int[Array, " B"], rounds: Int[Array, " B"]):
        """One head of one batch row at a time: a loop that carries the cache works in place, and its float32 copies are
        those of a single head instead of a whole layer's.
        """
        batch, heads = group.length.shape

        def body(i, carry):
            group, done = carry
            row, head = i // heads, i % heads

            def start(x: Array) -> tuple[Array, ...]:
                return (row, head, *[jnp.int32(0)] * (x.ndim - 2))

            def cut(x: Array) -> Array:
                return jax.lax.dynamic_slice(x, start(x), (1, 1, *x.shape[2:]))

            def put(x: Array, part: Array) -> Array:
                return jax.lax.dynamic_update_slice(x, part, start(x))

            part, after = self._cluster(jax.tree.map(cut, group), budget[row][None], rounds[row][None])
            return jax.tree.map(put, group, part), done.at[row].set(after[0])

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(batch * heads), body, (group, rounds))
