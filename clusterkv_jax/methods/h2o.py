"""H2O: keep the rows that have received most attention so far, and the latest ones (Zhang et al., "H2O: Heavy-Hitter
Oracle for Efficient Generative Inference of Large Language Models").
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.attention import attend_with_probabilities
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import LayerCache, NewTokens, State, take_rows
from clusterkv_jax.errors import check_fields, is_count
from clusterkv_jax.kernels.row_merge import best_edges
from clusterkv_jax.methods.base import LayerPlan, append_new, one_by_one
from clusterkv_jax.methods.families.eviction import EveryStep, needed, replace_row
from clusterkv_jax.scores import accumulated_scores


@dataclass(frozen=True)
class H2O(EveryStep):
    """Keep the last `recent` rows and those before them with the largest sums of attention over all queries.

    `recent` None is half of the budget. Each step adds its own attention to the sums and then drops the row with the
    smallest, of equal ones the later. `normalize` divides a sum by the number of queries that have seen its row.
    """

    budget: Budget
    recent: int | None = None
    normalize: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("recent", self.recent is None or is_count(self.recent), "a whole number of at least 0 or None"),
            ("normalize", isinstance(self.normalize, bool), "True or False"),
        )

    @property
    def always_kept(self) -> dict[str, int]:
        """The recent rows; half of the budget always leaves room."""
        return {"recent": self.recent or 0}

    def _recent(self, rows: Int[Array, " B"]) -> Int[Array, " B"]:
        return rows // 2 if self.recent is None else jnp.full_like(rows, self.recent)

    def _ranked(self, sums: Float[Array, "B K C"], group: LayerCache, now: Int[Array, " B"]) -> Float[Array, "B K C"]:
        """What rows compete by, `now` being the last token's position."""
        if not self.normalize:
            return sums
        assert group.positions is not None
        return sums / jnp.maximum(now[:, None, None] - group.positions + 1, 1).astype(jnp.float32)

    def start(self, group: LayerCache, rows: Array, queries: Array | None, plan: LayerPlan, key: Any) -> State:
        """Of rows that another method kept nothing is known: their sums begin with the first step."""
        del queries, plan, key
        return {"budget": rows, "sums": jnp.zeros(group.degree.shape, jnp.float32)}

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
        """Sum the attention of all queries, and keep the heavy hitters and the recent rows."""
        del plan, key, handed
        lengths = prompt.length[:, 0]
        sums = accumulated_scores(needed(self, queries), prompt)
        slot = jnp.arange(prompt.capacity)
        recent = self._recent(rows)
        old = slot < (lengths - recent)[:, None, None]
        ranked = jnp.where(old, self._ranked(sums, prompt, lengths - 1), -jnp.inf)
        keep = best_edges(ranked, rows - recent) | (~old & (slot < lengths[:, None, None]))
        keep = jnp.where((lengths > rows)[:, None, None], keep, prompt.degree > 0)
        layer, source = take_rows(prompt, keep, capacity)
        sums = jnp.where(layer.degree > 0, jnp.take_along_axis(sums, source, axis=2), 0.0)
        return layer, {"budget": rows, "sums": sums}, None

    def step_group(
        self, group: LayerCache, state: Any, new: NewTokens
    ) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
        """Append, attend, add up, drop the lightest row, token after token."""
        return one_by_one(self._step, group, state, new)

    def _step(self, group: LayerCache, state: Any, new: NewTokens) -> tuple[Array, LayerCache, State]:
        group = append_new(group, new)
        assert group.positions is not None
        attended, attention = attend_with_probabilities(group, new.q)
        real, now = new.real[:, 0], new.positions[:, 0]
        sums = jnp.where(real[:, None, None], state["sums"] + attention, state["sums"])

        old = group.positions <= (now - self._recent(state["budget"]))[:, None, None]
        ranked = jnp.where(old & (group.degree > 0), self._ranked(sums, group, now), jnp.inf)
        least = ranked == jnp.min(ranked, axis=-1, keepdims=True)
        slot = jnp.argmax(jnp.where(least, group.positions, -1), axis=-1).astype(jnp.int32)
        drop = real & (group.length[:, 0] > state["budget"])

        last = group.length - 1
        here, end = (jnp.arange(group.capacity) == at[..., None] for at in (slot, last))
        moved = jnp.where(end, 0.0, jnp.where(here, jnp.take_along_axis(sums, last[..., None], axis=2), sums))
        sums = jnp.where(drop[:, None, None], moved, sums)
        return attended, replace_row(group, slot, drop), state | {"sums": sums}
