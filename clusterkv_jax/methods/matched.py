"""Rows of any method, with biases and values fitted to what the whole prompt answers (Zweiger et al., "Fast KV
Compaction via Attention Matching").
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.blocks.config import Rope
from clusterkv_jax.blocks.rope import rotate
from clusterkv_jax.cache.layers import LayerCache, StepInputs
from clusterkv_jax.learned.fit_rows import refit, squared_errors
from clusterkv_jax.methods.base import Compressed, Input, Method, Rows, State, StorageKind, compacted
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.methods.schedule import Protected, Schedule
from clusterkv_jax.runtime.errors import check_fields, is_count
from clusterkv_jax.runtime.sharding import over_heads

# One in so many reference queries is kept out of the fit, and judges it.
JUDGES = 4
MOST_QUERIES = 2**15
RIDGE = 1e-3
# Queries are turned to the next FUTURE positions; steps without a common factor mix the places they come from.
FUTURE, STEP = 128, 37


@dataclass(frozen=True)
class Matched(Method):
    """The rows that `method` leaves of a prompt, with biases and values fitted to `queries` queries per KV head.

    The queries are the prompt's own, turned to positions behind it. A head takes its fit where that answers queries
    which were kept out of it better than the rows did before. While decoding all is as `method` does it.

    Attributes:
        method: any method that holds tokens or centroids.
        queries: reference queries per KV head, over all of its query heads; 4 to 32,768.
    """

    method: Method
    queries: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = _is_simple(self.method) and self.method.storage in ("tokens", "centroids")
        once = not holds or "repetition" not in self.method.inputs(0)
        counts = is_count(self.queries, JUDGES) and self.queries <= MOST_QUERIES
        check_fields(
            self,
            ("method", holds, "one method that holds tokens or centroids, not pages, moved rows, an index or a pair"),
            ("method", not holds or self.method.cache_dtype is None, "one without a cache_dtype: give that to Matched"),
            ("method", not holds or self.method.degree_power == 1, "one with degree_power 1: degrees are fitted"),
            ("method", once, "one that reads a prompt once: a repetition leaves no queries to fit to"),
            ("queries", counts, f"a whole number between {JUDGES} and {MOST_QUERIES}"),
        )

    @property
    @override
    def storage(self) -> StorageKind:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.storage

    @property
    @override
    def protected(self) -> Protected:
        return self.method.protected

    @property
    @override
    def schedule(self) -> Schedule:
        return self.method.schedule

    @override
    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        return self.method.budget_rows(lengths, layer, request)

    @override
    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        self.method.check(lengths, request)

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        own: frozenset[Input] = frozenset({"queries"})
        return self.method.inputs(layer) | own

    @override
    def init_state(self, rows: Rows) -> State:
        return self.method.init_state(rows)

    @override
    def compress(self, rows: Rows) -> Compressed:
        """The method's rows, fitted head by head."""
        assert rows.queries is not None
        prompt: Any = rows.cache
        result = compacted(self.method.compress(rows))
        references = reference_queries(rows.queries, rows.position, prompt.keys.shape[1], self.queries, rows.plan.rope)
        return replace(result, cache=over_heads(fitted, result.cache, prompt, references))

    @override
    def recompress(self, rows: Rows) -> Compressed:
        return self.method.recompress(rows)

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        return self.method.step(group, state, tokens)


def reference_queries(
    queries: Float[Array, "B H N D"], lengths: Int[Array, " B"], kv_heads: int, count: int, rope: Rope | None
) -> Float[Array, "B K n D"]:
    """About `count` of the prompt's queries per KV head, from evenly spread places, turned to positions behind the
    prompt. The judges are the last ones; they come from places between the others.
    """
    batch, heads, _, dim = queries.shape
    group = heads // kv_heads
    each = max(count // group // JUDGES, 1) * JUDGES
    number = np.arange(each)
    number = np.concatenate([number[number % JUDGES > 0], number[number % JUDGES == 0]])[None]
    # number * length // each, which is too large for 32 bits in one product.
    whole, rest = lengths[:, None] // each, lengths[:, None] % each
    at = number * whole + number * rest // each
    drawn = jnp.take_along_axis(queries, at[:, None, :, None], axis=2).astype(jnp.float32)
    if rope is not None:
        forward = lengths[:, None] + number * STEP % FUTURE - at
        drawn = jnp.swapaxes(rotate(jnp.swapaxes(drawn, 1, 2), forward, rope), 1, 2)
    return jnp.swapaxes(drawn.reshape(batch, kv_heads, group, each, dim), 2, 3).reshape(batch, kv_heads, -1, dim)


def fitted(rows: LayerCache, prompt: LayerCache, queries: Float[Array, "B K n D"]) -> LayerCache:
    """The rows with degrees and values of their fit, in heads that hold fewer rows than the prompt and gain by it."""
    heads = prompt.keys, prompt.values, prompt.degree > 0, rows.keys, rows.values, rows.degree, queries
    one_by_one = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), heads)
    degree, values = jax.lax.map(lambda head: _fitted_head(*head), one_by_one)
    fewer = (rows.length < prompt.length)[..., None]
    return replace(
        rows,
        degree=jnp.where(fewer, degree.reshape(rows.degree.shape), rows.degree),
        values=jnp.where(fewer[..., None], values.reshape(rows.values.shape), rows.values),
    )


def _fitted_head(
    keys: Float[Array, "N D"],
    values: Float[Array, "N D"],
    real: Bool[Array, " N"],
    row_keys: Float[Array, "C D"],
    row_values: Float[Array, "C D"],
    degree: Float[Array, " C"],
    queries: Float[Array, "n D"],
) -> tuple[Float[Array, " C"], Float[Array, "C D"]]:
    count = queries.shape[0] // JUDGES * (JUDGES - 1)
    bias = jnp.where(degree > 0, jnp.log(jnp.where(degree > 0, degree, 1.0)), -jnp.inf)
    new_bias, new = refit(queries[:count], keys, values, row_keys, row_values, bias, ridge=RIDGE, real=real)
    new_values = new.astype(row_values.dtype)
    fits = (bias, row_values), (new_bias, new_values)
    before, after = squared_errors(queries[count:], keys, values, row_keys, fits, real=real)
    better = after < before
    return jnp.where(better, jnp.exp(new_bias), degree), jnp.where(better, new_values, row_values)


def _is_simple(method: Any) -> bool:
    """Whether it is a method, and none of methods."""
    return hasattr(type(method), "budget_rows") and not hasattr(method, "prefill") and not hasattr(method, "method")
