"""Expected Attention: keep what queries of the future are expected to attend to (Devoto et al., "Expected Attention: KV
Cache Compression by Estimating Attention from Future Queries Distribution").
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.cache.layers import StepInputs
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.learned.expected import Moments, before_rotation, expected_scores, joined_moments, query_moments
from clusterkv_jax.methods.base import Input, Rows, State
from clusterkv_jax.methods.families.eviction import Scoped
from clusterkv_jax.methods.schedule import Protected
from clusterkv_jax.methods.steps import append_and_attend
from clusterkv_jax.runtime.errors import check_fields, is_count, is_number


@dataclass(frozen=True)
class ExpectedAttention(Scoped):
    """Keep the first `sinks` rows, and those behind them of the greatest expected attention times length of the value.

    Queries of the next `future` positions are taken for normally distributed, with the moments of the queries so far.
    `covariance` False knows their mean only, `value_norm` False leaves the values out, `epsilon` is added to the
    attention before it is weighted: 1e-2 is best with scope "layer". While decoding the new
    queries count too.

    Attributes:
        budget: rows per KV head, sinks included; the mean of a layer with `scope="layer"`.
        sinks: first rows, which always stay; their queries do not count.
        future: positions behind the prompt whose rotations are averaged.
        covariance: whether the queries' covariance counts, or their mean alone.
        value_norm: whether the lengths of the values weigh the attention.
        epsilon: added to the attention before it is weighted.
        scope: "head": rows compete in their head; "layer": over all heads of a layer.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever.
    """

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    scope: Literal["head", "layer"] = "head"
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("sinks", is_count(self.sinks), "a whole number"),
            ("future", is_count(self.future, 1), "a whole number of at least 1"),
            ("covariance", isinstance(self.covariance, bool), "True or False"),
            ("value_norm", isinstance(self.value_norm, bool), "True or False"),
            ("epsilon", is_number(self.epsilon) and self.epsilon >= 0, "a number of at least 0"),
        )

    @property
    @override
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks)

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"queries"})

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        cache: Any = rows.cache
        behind = (cache.degree > 0) & (ordinals(cache.capacity, 3) >= self.sinks)
        moments = _remembered(rows.state, rows.position - self.sinks) if rows.state else self._of_prompt(rows)
        return expected_scores(
            *(moments, cache.keys, cache.values, behind, rows.position, rows.plan.rope),
            future=self.future,
            covariance=self.covariance,
            value_norm=self.value_norm,
            epsilon=self.epsilon,
        )

    @override
    def init_state(self, rows: Rows) -> State:
        """The moments of the queries, where there is compression while decoding."""
        return {} if self.decode_interval is None else _as_memory(self._of_prompt(rows))

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """Append, attend, and count the new queries."""
        attended, group, _ = append_and_attend(group, state, tokens)
        counts = tokens.real & (tokens.positions >= self.sinks)
        queries = before_rotation(jnp.swapaxes(tokens.q, 1, 2), tokens.positions, tokens.rope)
        before = _remembered(state, tokens.positions[:, 0] - self.sinks)
        new = query_moments(queries, counts, state["mean"].shape[1])
        return attended, group, state | _as_memory(joined_moments(before, new))

    def _of_prompt(self, rows: Rows) -> Moments:
        assert rows.queries is not None
        positions = ordinals(rows.queries.shape[2], 2)
        counts = (positions >= self.sinks) & (positions < rows.position[:, None])
        queries = before_rotation(rows.queries, jnp.broadcast_to(positions, counts.shape), rows.plan.rope)
        return query_moments(queries, counts, rows.cache.length.shape[1])


def _as_memory(moments: Moments) -> State:
    """Moments as arrays of a cache's shapes; how many queries they are of, the position tells."""
    _, mean, spread = moments
    return {"mean": mean, "spread": spread.reshape(*spread.shape[:2], -1, spread.shape[-1])}


def _remembered(state: State, count: Array) -> Moments:
    mean = state["mean"]
    spread = state["spread"].reshape(*mean.shape, mean.shape[-1])
    return jnp.maximum(count, 0).astype(jnp.float32), mean, spread
