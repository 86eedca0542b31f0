"""Biased attention in plain jnp: the definition, and the path of platforms without a kernel."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.dispatch import matmul_operands, matmul_precision


def log_degree(degree: Float[Array, "B K C"], length: Int[Array, "B K"] | None) -> Float[Array, "B K C"]:
    """The bias of every slot, -inf for empty ones: degree 0 (or none at all), or at or beyond `length`."""
    occupied = degree > 0
    if length is not None:
        occupied &= jnp.arange(degree.shape[2]) < length[..., None]
    return jnp.where(occupied, jnp.log(jnp.where(occupied, degree.astype(jnp.float32), 1.0)), -jnp.inf)


def biased_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B K C D"],
    values: Float[Array, "B K C D"],
    degree: Float[Array, "B K C"],
    length: Int[Array, "B K"] | None,
    *,
    return_lse: bool,
    return_probs: bool,
):
    """See `clusterkv_jax.kernels.biased_attention.biased_attention`."""
    batch, tokens, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    precision = matmul_precision(q.dtype)

    bias = log_degree(degree, length)
    occupied = bias > -jnp.inf

    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    score = jnp.einsum(
        "btkgd,bkcd->bkgtc",
        *matmul_operands(grouped, keys),
        precision=precision,
        preferred_element_type=jnp.float32,
    ) / math.sqrt(dim)
    mask = occupied[:, :, None, None, :]
    score = jnp.where(mask, score + bias[:, :, None, None, :], -jnp.inf)
    peak = jnp.max(score, axis=-1, keepdims=True)
    weight = jnp.exp(score - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    probs = weight / jnp.where(total > 0, total, 1.0)

    values = jnp.where(occupied[..., None], values, jnp.zeros((), values.dtype))
    out = jnp.einsum(
        "bkgtc,bkcd->btkgd",
        *matmul_operands(probs.astype(values.dtype), values),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    result = [out.reshape(batch, tokens, heads, dim).astype(q.dtype)]
    if return_lse:
        lse = (peak + jnp.log(total))[..., 0]  # -inf + log 0 stays -inf
        result.append(jnp.moveaxis(lse, 3, 1).reshape(batch, tokens, heads))
    if return_probs:
        result.append(jnp.sum(probs, axis=3).reshape(batch, heads, capacity))
    return result[0] if len(result) == 1 else tuple(result)
