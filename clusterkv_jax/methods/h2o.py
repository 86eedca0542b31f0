"""H2O: keep the rows that have received most attention so far, and the latest ones (Zhang et al., "H2O: Heavy-Hitter
Oracle for Efficient Generative Inference of Large Language Models").
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from typing_extensions import override

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.attention import attend_with_probabilities, with_sinks
from clusterkv_jax.cache.layers import LayerCache, StepInputs, take_rows
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.base import Compressed, Input, Method, Rows, State
from clusterkv_jax.methods.families.eviction import best_rows
from clusterkv_jax.methods.families.streaming import replace_row
from clusterkv_jax.methods.schedule import Protected, Schedule
from clusterkv_jax.methods.steps import append_tokens, one_by_one
from clusterkv_jax.runtime.errors import check_fields, is_count
from clusterkv_jax.scores import accumulated_scores


@dataclass(frozen=True)
class H2O(Method):
    """Keep the last `recent` rows and those before them with the largest sums of attention over all queries.

    `recent` None is half of the budget. Each step adds its own attention to the sums and then drops the row with the
    smallest, of equal ones the later. `normalize` divides a sum by the number of queries that have seen its row.

    Attributes:
        budget: rows per KV head, recent rows included.
        recent: latest rows that always stay; None is half of the budget.
        normalize: divide each sum by the number of queries that saw the row.
    """

    budget: Budget
    recent: int | None = None
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("recent", self.recent is None or is_count(self.recent), "a whole number of at least 0 or None"),
            ("normalize", isinstance(self.normalize, bool), "True or False"),
        )

    @property
    @override
    def protected(self) -> Protected:
        """The recent rows; half of the budget always leaves room."""
        return Protected(recent=self.recent or 0)

    @property
    @override
    def schedule(self) -> Schedule:
        return Schedule("token")

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"queries"})

    def _recent(self, rows: Int[Array, " B"]) -> Int[Array, " B"]:
        return rows // 2 if self.recent is None else jnp.full_like(rows, self.recent)

    def _ranked(self, sums: Float[Array, "B K C"], group: LayerCache, now: Int[Array, " B"]) -> Float[Array, "B K C"]:
        """What rows compete by, `now` being the last token's position."""
        if not self.normalize:
            return sums
        assert group.positions is not None
        return sums / jnp.maximum(now[:, None, None] - group.positions + 1, 1).astype(jnp.float32)

    @override
    def init_state(self, rows: Rows) -> State:
        """Of rows that another method kept nothing is known: their sums begin with the first step."""
        return {"sums": jnp.zeros(rows.cache.degree.shape, jnp.float32)}

    @override
    def compress(self, rows: Rows) -> Compressed:
        """Sum the attention of all queries, and keep the heavy hitters and the recent rows."""
        prompt: Any = rows.cache
        assert rows.queries is not None
        sums = accumulated_scores(rows.queries, prompt)
        slot = ordinals(prompt.capacity, 3)
        recent = self._recent(rows.budget)
        old = slot < (rows.position - recent)[:, None, None]
        ranked = jnp.where(old, self._ranked(sums, prompt, rows.position - 1), -jnp.inf)
        keep = best_rows(ranked, rows.budget - recent) | (~old & (slot < prompt.length[..., None]))
        keep = jnp.where((rows.position > rows.budget)[:, None, None], keep, prompt.degree > 0)
        layer, source = take_rows(prompt, keep, rows.plan.capacity)
        sums = jnp.where(layer.degree > 0, jnp.take_along_axis(sums, source, axis=2), 0.0)
        return Compressed(layer, {"sums": sums})

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """Append, attend, add up, drop the lightest row, token after token."""
        return one_by_one(self._step, group, state, tokens)

    def _step(self, group: LayerCache, state: State, token: StepInputs) -> tuple[Array, LayerCache, State]:
        group = append_tokens(group, token)
        assert group.positions is not None
        among, attention = attend_with_probabilities(group, token.q, token.soft_cap, token.degree_power)
        real, now = token.real[:, 0], token.positions[:, 0]
        sums = jnp.where(real[:, None, None], state["sums"] + attention, state["sums"])

        old = group.positions <= (now - self._recent(state["budget"]))[:, None, None]
        ranked = jnp.where(old & (group.degree > 0), self._ranked(sums, group, now), jnp.inf)
        least = ranked == jnp.min(ranked, axis=-1, keepdims=True)
        slot = jnp.argmax(jnp.where(least, group.positions, -1), axis=-1).astype(jnp.int32)
        drop = real & (group.length[:, 0] > state["budget"])

        last = group.length - 1
        here, end = (ordinals(group.capacity, 3) == at[..., None] for at in (slot, last))
        sums_after = jnp.where(end, 0.0, jnp.where(here, jnp.take_along_axis(sums, last[..., None], axis=2), sums))
        sums = jnp.where(drop[:, None, None], sums_after, sums)
        attended = with_sinks(among, token.sink_logits)
        return attended, replace_row(group, slot, drop), state | {"sums": sums}
