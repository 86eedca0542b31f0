"""OrbitKV: rows that matter stay as they are, GravityKV's rule draws the others together (docs/methods/orbitkv.md).

One head, B = 8 of 16 rows, merged = 0.3:

    rows     s s . . x . . x . . . . . . r r      s sink, r recent, x a high score, . the rest
    after    s s     x     x     o     o r r      o centroids of the rest, where they stand
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax import soft_matching
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.layers import LayerCache, mask_to_slots
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.row_merge import Squares
from clusterkv_jax.kernels.top_rows import top_rows
from clusterkv_jax.methods.base import Compressed, Input, Rows, State
from clusterkv_jax.methods.families.eviction import protected_rows, share_of, unprotected
from clusterkv_jax.methods.families.merging import Merging
from clusterkv_jax.methods.families.scored import scores_of, take_scores
from clusterkv_jax.methods.request import GroupPlan
from clusterkv_jax.methods.schedule import Protected, Schedule, recompress_every
from clusterkv_jax.runtime.dispatch import traits
from clusterkv_jax.runtime.errors import check_fields, is_count, is_number
from clusterkv_jax.runtime.sharding import over_heads
from clusterkv_jax.soft_matching import Edges

# GravityKV's defaults.
CHUNK, MERGE_RATIO, EDGES = 256, 0.3, Edges(1.0, 0.05)
# The score of a single row that has none.
LEAST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class OrbitKV(Merging):
    """Keep the first `sinks` rows, the last `recent` and those of the highest scores; merge the others into the share
    `merged` of what is left of the budget. A head with less than the mean share of the budget merges everything.

    Scores are those of the model's surrogate, which `clusterkv calibrate` fits; heads get the shares that were measured
    with it. The same happens again every `interval` generated tokens; a centroid then is one of the others: its score
    is -inf, since a row's degree may be fitted (`Matched`).

    Attributes:
        budget: rows per KV head on the average, sinks and recent rows included.
        sinks: first rows, never merged.
        recent: last rows, never merged.
        merged: part of the free rows that are centroids, in heads with at least the mean share.
        interval: generated tokens between two compressions.
        degree_power: a centroid of n rows counts as n to this power: 1 is the log degree of the papers, 0 one row.
    """

    budget: Budget
    sinks: int = 4
    recent: int = 8
    merged: float = 0.15
    interval: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("sinks", is_count(self.sinks), "a whole number of at least 0"),
            ("recent", is_count(self.recent), "a whole number of at least 0"),
            ("merged", is_number(self.merged) and 0 <= self.merged <= 1, "between 0 and 1"),
            ("interval", is_count(self.interval, 1), "a whole number of at least 1"),
        )

    @property
    @override
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks, recent=self.recent)

    @property
    @override
    def schedule(self) -> Schedule:
        return recompress_every(self.interval)

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"scores", "layers"})

    @override
    def init_state(self, rows: Rows) -> State:
        scores = scores_of(rows)
        if "scores" not in rows.state:
            # A number for each: how many rows stay, and so the rounds that merge the others, depends on none.
            scores = jnp.fmax(scores.astype(jnp.float32), LEAST)
        assert rows.budget_share is not None
        return {"scores": scores, "share": rows.budget_share}

    @override
    def compress(self, rows: Rows) -> Compressed:
        """After the prompt as while decoding."""
        cache: Any = rows.cache
        expected = self._expected(cache.capacity, rows.plan)
        merge = {"expected": expected, "enough": bool(expected) and rows.plan.exact}

        state = rows.state
        merged = partial(self._merged, capacity=rows.plan.capacity, **merge)
        centroids = self._centroids(rows.budget, state["share"], rows.plan.most_rows)
        args = cache, state["scores"], rows.budget, centroids, rows.squares
        group, slots, scores = over_heads(merged, *args)
        return Compressed(group, state | {"scores": scores}, slots=slots)

    def _merged(
        self,
        cache: LayerCache,
        scores: Float[Array, "B K C"],
        budget: Int[Array, " B"],
        centroids: Int[Array, " B"],
        squares: Squares | None,
        *,
        capacity: int,
        **merge: Any,
    ) -> tuple[LayerCache, Int[Array, "B K slots"], Float[Array, "B K slots"]]:
        """`budget` rows of every head, where they lie, their `capacity` slots, and their scores."""
        centroids = jnp.where(cache.length[:, 0] > budget, centroids, 0)
        stay = self._stay(cache, scores, budget, centroids)
        others = (cache.degree > 0) & ~stay
        listed = jnp.maximum(mask_to_slots(others, cache.capacity), 0)
        apart = replace(cache, length=jnp.sum(others, axis=-1, dtype=jnp.int32))
        apart, listed, _ = soft_matching.merge_listed(
            *(apart, listed, centroids, jnp.zeros_like(budget), _schedule(cache.capacity)),
            chunk=CHUNK,
            edges=EDGES,
            squares=squares,
            **merge,
        )
        scores = jnp.where(apart.degree > cache.degree, -jnp.inf, scores)
        slots = mask_to_slots(stay | _mask_of(listed, apart.length, cache.capacity), capacity)
        apart = replace(apart, length=jnp.sum(slots >= 0, axis=-1, dtype=jnp.int32))
        return apart, slots, take_scores(scores, slots)

    def _stay(
        self, cache: LayerCache, scores: Float[Array, "B K C"], budget: Int[Array, " B"], centroids: Int[Array, " B"]
    ) -> Bool[Array, "B K C"]:
        """The rows that stay single: all of them in sequences that hold no more than their budget."""
        free = unprotected(scores, cache.length, self.protected)
        count = budget - centroids - self.sinks - self.recent
        single = scores != -jnp.inf
        best = top_rows(jnp.where(free & single, jnp.fmax(scores, LEAST), -jnp.inf), count)
        over = cache.length[:, 0] > budget
        return jnp.where(over[:, None, None], best | protected_rows(free, cache.length), cache.degree > 0)

    def _centroids(self, budget: Int[Array, " B"], share: Float[Array, " B"], most_rows: int) -> Int[Array, " B"]:
        """Rows of the budget that the others are merged into, at least one: nothing is dropped.

        They are all free rows in heads that mix what they read; heads that look single rows up are those with at least
        the mean share.
        """
        free = budget - self.sinks - self.recent
        part = share_of(self.merged, free, most_rows)
        return jnp.maximum(1, jnp.where(share >= 1, part, free))

    def _expected(self, rows: int, plan: GroupPlan) -> tuple[int, ...]:
        """As `Clustering` expects them on a GPU; of heads of any share as many as may be."""
        budget = plan.fewest_rows
        if not traits().host_driven or budget >= rows:
            return ()
        centroids = max(1, int((self.merged if plan.budget_share >= 1 else 1.0) * (budget - self.sinks - self.recent)))
        # Heads of other shares merge everything, into all that is free.
        slowest, largest = (rows - budget + centroids, centroids), (rows, plan.most_rows)
        return soft_matching.rows_by_round(slowest, largest, _schedule(rows), sinks=0, recent=0, chunk=CHUNK)


def _schedule(rows: int) -> np.ndarray:
    return soft_matching.merge_schedule(rows, CHUNK, (MERGE_RATIO,), "middle")


def _mask_of(listed: Int[Array, "B K R"], length: Int[Array, "B K"], slots: int) -> Bool[Array, "B K slots"]:
    """The first `length` listed slots as a mask."""
    at = jnp.where(ordinals(listed.shape[2], 3) < length[..., None], listed, slots)
    put = jax.vmap(jax.vmap(lambda at: jnp.zeros(slots, bool).at[at].set(True, mode="drop")))
    return put(at)
