"""CaM: StreamingLLM whose evicted values live on in the next ones (Zhang et al., "CaM: Cache Merging for
Memory-efficient LLMs Inference").
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.cache.attention import attend_with_probabilities, with_sinks
from clusterkv_jax.cache.layers import LayerCache, StepInputs, take_rows
from clusterkv_jax.cache.slots import get_slots
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import as_stored, dequantised
from clusterkv_jax.methods.base import Compressed, Input, Rows, State
from clusterkv_jax.methods.families.streaming import Streaming, replace_row
from clusterkv_jax.methods.schedule import Schedule
from clusterkv_jax.methods.steps import append_tokens, one_by_one
from clusterkv_jax.runtime import prng
from clusterkv_jax.runtime.errors import check_fields, is_count
from clusterkv_jax.scores import group_mean, over_query_blocks


@dataclass(frozen=True)
class CaM(Streaming):
    """Keep the first `sinks` rows and the B - sinks latest; a row that leaves adds its value to those after it.

    When a token pushes row e out, each of the `merge_budget` values after e gets value_e / merge_budget more, with
    probability p = attention to e / mean attention to the ring's other rows, at most 1, by the token's own query. Keys
    stay. The draw is one per head; `stochastic=False` adds the expectation, p value_e / merge_budget. Prompts are read
    as if they had been decoded.

    Attributes:
        budget: rows per KV head, sinks included.
        sinks: first rows, which always stay.
        merge_budget: values that share the value of a row that leaves.
        stochastic: draw each merge; False adds the expectation.
    """

    merge_budget: int = 32
    stochastic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("merge_budget", is_count(self.merge_budget, 1), "a whole number of at least 1"),
            ("stochastic", isinstance(self.stochastic, bool), "True or False"),
        )

    @property
    @override
    def schedule(self) -> Schedule:
        return Schedule("token")

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"queries", "key"} if self.stochastic else {"queries"})

    @override
    def init_state(self, rows: Rows) -> State:
        """The key: every sequence's own copy, so that a sequence draws alike in any batch."""
        if not self.stochastic:
            return {}
        assert rows.key is not None
        data = jax.random.key_data(rows.key)
        return {"key": jnp.broadcast_to(data, (*rows.budget.shape, *data.shape))}

    @override
    def compress(self, rows: Rows) -> Compressed:
        """Let the prompt's rows leave one after the other."""
        prompt: Any = rows.cache
        assert rows.queries is not None
        ring = rows.budget - self.sinks
        number = jnp.arange(prompt.capacity)
        chance = _chances(rows.queries, prompt, ring, self.sinks)
        if self.stochastic:
            key: Any = rows.key
            draw = jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n), (chance.shape[1],)))
            chance = (chance > draw(number).T[None]).astype(jnp.float32)
        row = number[None, None]
        leaves = (row >= self.sinks) & (row < prompt.length[..., None] - ring[:, None, None])
        weight = jnp.where(leaves, chance, 0.0) / self.merge_budget
        values = _pass_on(prompt.values.astype(jnp.float32), weight, ring, self.merge_budget)
        over = (rows.position > rows.budget)[:, None, None, None]
        values = jnp.where(over, values.astype(prompt.values.dtype), prompt.values)
        stay = self.stay(prompt, rows.budget)
        return Compressed(take_rows(replace(prompt, values=values), stay, rows.plan.capacity)[0])

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """Append, attend, merge the oldest row's value into the next and drop it, token after token."""
        return one_by_one(self._step, group, state, tokens)

    def _step(self, group: LayerCache, state: State, token: StepInputs) -> tuple[Array, LayerCache, State]:
        group = append_tokens(group, token)
        among, attention = attend_with_probabilities(group, token.q, token.soft_cap, token.degree_power)
        slot, slots = self.oldest(group), group.capacity
        weight = self._weight(attention, group, slot, state)
        gone = dequantised(get_slots(group.values, slot[..., None])).astype(jnp.float32)
        drop = token.real[:, 0] & (group.length[:, 0] > state["budget"])
        group = replace_row(group, slot, drop)  # the new token now stands there, last in the ring

        ring = jnp.maximum(group.length - self.sinks, 1)[..., None]
        after = 1 + ordinals(self.merge_budget, 3)
        place = self.sinks + (slot[..., None] - self.sinks + after) % ring
        passed = drop[:, None, None] & (weight > 0)[..., None]
        place = jnp.where(passed & (after <= ring), place, slots)
        values = dequantised(get_slots(group.values, jnp.minimum(place, slots - 1)))
        values = values.astype(jnp.float32) + (weight / self.merge_budget)[..., None, None] * gone
        put = jax.vmap(jax.vmap(lambda v, at, x: v.at[at].set(x.astype(v.dtype), mode="drop")))
        merged = jax.tree.map(lambda v, x: put(v, place, x), group.values, as_stored(values, group.values))
        return with_sinks(among, token.sink_logits), replace(group, values=merged), state

    def _weight(
        self, attention: Float[Array, "B K C"], group: LayerCache, slot: Int[Array, "B K"], state: State
    ) -> Float[Array, "B K"]:
        """What share of the leaving row's value is passed on: 0 or 1, or the probability of 1."""
        number = ordinals(group.capacity, 3)
        others = (group.degree > 0) & (number >= self.sinks) & (number != slot[..., None])
        mean = _mean(attention, others)
        leaving = jnp.take_along_axis(attention, slot[..., None], axis=2)[..., 0]
        chance = _ratio(leaving, mean)
        if not self.stochastic:
            return chance
        assert group.positions is not None
        position = jnp.take_along_axis(group.positions, slot[..., None], axis=2)[:, 0, 0]

        def draw(data: Array, position: Int[Array, ""]) -> Array:
            return jax.random.uniform(jax.random.fold_in(prng.wrapped(data), position), (slot.shape[1],))

        return (jax.vmap(draw)(state["key"], position) < chance).astype(jnp.float32)


def _ratio(leaving: Array, mean: Array) -> Array:
    return jnp.clip(leaving / jnp.where(mean > 0, mean, 1.0), 0.0, 1.0)


def _mean(x: Float[Array, "... C"], rows: Bool[Array, "... C"]) -> Float[Array, "..."]:
    return jnp.sum(jnp.where(rows, x, 0.0), axis=-1) / jnp.maximum(jnp.sum(rows, axis=-1, dtype=jnp.float32), 1.0)


def _chances(
    queries: Float[Array, "B H N D"], prompt: LayerCache, ring: Int[Array, " B"], sinks: int
) -> Float[Array, "B K N"]:
    """For each row that leaves the prompt's ring: the probability that its value is passed on."""
    width = ring[:, None, None, None]

    def sees(query: Array, row: Array) -> Array:
        query, row = query[None, None], row[None, None, None]
        return (row <= query) & ((row < sinks) | (row >= query - width))

    def block(_: None, probs: Array, real: Array, numbers: Array) -> tuple[None, Float[Array, "B K T"]]:
        del real
        attention = group_mean(probs)
        row, leaves = ordinals(prompt.capacity, 3), numbers[None] - ring[:, None]  # [1, 1, N], [B, T]
        others = (row >= sinks) & (row > leaves[..., None]) & (row <= numbers[None, :, None])
        mean = _mean(attention, others[:, None])
        at = jnp.broadcast_to(jnp.maximum(leaves, 0)[:, None, :, None], (*attention.shape[:3], 1))
        return None, _ratio(jnp.take_along_axis(attention, at, axis=-1)[..., 0], mean)

    by_query = jnp.moveaxis(over_query_blocks(queries, prompt, sees, block, None)[1], 0, 2)
    by_query = by_query.reshape(*by_query.shape[:2], -1)
    pushed_by = jnp.minimum(ordinals(prompt.capacity, 3) + ring[:, None, None], by_query.shape[-1] - 1)
    return jnp.take_along_axis(by_query, jnp.broadcast_to(pushed_by, prompt.degree.shape), axis=-1)


def _pass_on(
    values: Float[Array, "B K N D"], weight: Float[Array, "B K N"], ring: Int[Array, " B"], span: int
) -> Float[Array, "B K N D"]:
    """x_j = values_j + sum of weight_i x_i over the rows i that j follows within `span` rows and the ring.

    A recurrence over rows, solved `span` rows at a time: within a block it is a triangular system.
    """
    batch, heads, rows, dim = values.shape
    count = -(-rows // span)
    place = jnp.arange(span)
    distance = (place[:, None] - place[None, :])[None]
    reach = jnp.minimum(ring, span)[:, None, None]
    inside = ((distance > 0) & (distance <= reach)).astype(jnp.float32)
    across = (distance + span <= reach).astype(jnp.float32)

    def split(x: Array) -> Array:  # [B, K, N, ...] -> [count, B, K, span, ...]
        x = jnp.pad(x, [(0, 0), (0, 0), (0, count * span - rows)] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(batch, heads, count, span, *x.shape[3:]), 2, 0)

    def block(before: Float[Array, "B K span D"], now: tuple[Array, Array]) -> tuple[Array, Array]:
        x, w = now
        right = x + jnp.einsum("bji,bkid->bkjd", across, before, precision=jax.lax.Precision.HIGHEST)
        system = jnp.eye(span)[None, None] - inside[:, None] * w[:, :, None]
        x = jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)
        return x * w[..., None], x

    _, out = jax.lax.scan(block, jnp.zeros((batch, heads, span, dim)), (split(values), split(weight)))
    return jnp.moveaxis(out, 0, 2).reshape(batch, heads, count * span, dim)[:, :, :rows]
