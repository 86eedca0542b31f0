"""A Cartridge: the rows of one context's compressed cache as parameters, trained to answer as its full cache does.

After Eyuboglu et al., "Cartridges: Lightweight and general-purpose long context representations via self-study"
(2025): a small cache is trained on questions made from the context, by the KL divergence from what the model says with
the whole context before it. Here it starts from the rows that a method keeps, and their degrees are trained too.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache.kinds import with_groups
from clusterkv_jax.cache.layers import KVCache, groups
from clusterkv_jax.decoding import append_step
from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.methods import Method
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params

# For each layer and each group of its heads: keys, values and log degrees.
TrainedRows = tuple[tuple[dict[str, Array], ...], ...]


def rows_of(cache: KVCache) -> TrainedRows:
    """What of a cache is trained. Empty slots are zeros there, and stay so: their gradient is zero.

    Raises ValueError for rows that are codes.
    """

    def of_group(group: Any) -> dict[str, Array]:
        if isinstance(group.keys, Quantised):
            raise ValueError("Rows of a cache_dtype are codes, which cannot be trained; use rows of the model's type.")
        log_degree = jnp.log(jnp.where(group.degree > 0, group.degree, 1.0))
        return {"keys": group.keys, "values": group.values, "log_degree": log_degree}

    return tuple(tuple(map(of_group, groups(layer))) for layer in cache.layers)


def with_rows(cache: KVCache, rows: TrainedRows) -> KVCache:
    """The cache with these rows in the place of its own, as `save_cache` and the decode loop take it."""

    def put(group: Any, row: dict[str, Array]) -> Any:
        degree = jnp.where(group.degree > 0, jnp.exp(row["log_degree"]), 0.0)
        return replace(group, keys=row["keys"], values=row["values"], degree=degree)

    layers = (
        with_groups(layer, [put(group, row) for group, row in zip(groups(layer), parts, strict=True)])
        for layer, parts in zip(cache.layers, rows, strict=True)
    )
    return replace(cache, layers=tuple(layers))


def logits_after(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    tokens: Int[Array, "Q T"],
    places: Int[Array, "Q P"],
) -> Float[Array, "Q P V"]:
    """Logits after these of the tokens of Q texts, each of which follows the same cache of one context, not copied."""
    count = jnp.full(1, tokens.shape[1], jnp.int32)

    def follow(text: Array, at: Array) -> Array:
        return append_step(params, config, method, cache, text[None], count, at[None])[1][0]

    return jax.vmap(follow)(tokens, places)


def divergence(
    teacher: Float[Array, "Q P V"], student: Float[Array, "Q P V"], learned: Bool[Array, "Q P"]
) -> Float[Array, ""]:
    """Mean KL divergence of the student's distributions from the teacher's, in nats, over the learned places."""
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    each = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    weights = learned.astype(jnp.float32)
    return jnp.sum(each * weights) / jnp.maximum(jnp.sum(weights), 1.0)
