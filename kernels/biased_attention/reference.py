"""Biased attention in plain jnp: the definition, and the path of platforms without a kernel."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.dispatch import head_after_head, matmul_operands, matmul_precision, platform
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import Quantised, Rows, halves, in_basis_of_codes, numbers, weight_dtype
from clusterkv_jax.kernels.soft_cap import capped


def log_degree(degree: Float[Array, "B K C"], length: Int[Array, "B K"] | None) -> Float[Array, "B K C"]:
    """The bias of every slot, -inf for empty ones: degree 0 (or none at all), or at or beyond `length`."""
    occupied = degree > 0
    if length is not None:
        occupied &= ordinals(degree.shape[2], 3) < length[..., None]
    return jnp.where(occupied, jnp.log(jnp.where(occupied, degree.astype(jnp.float32), 1.0)), -jnp.inf)


@in_basis_of_codes
def biased_attention(q, keys, values, degree, length, *, soft_cap=None, return_lse, return_probs):
    """See `clusterkv_jax.kernels.biased_attention.biased_attention`."""
    batch, tokens, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    bias = log_degree(degree, length)
    by_head = jnp.moveaxis(q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim), 1, 3)
    # What a CPU makes of one head's rows stays in its cache.
    one_head = partial(_one_head, soft_cap=soft_cap)
    every_head = partial(head_after_head, one_head) if platform() == "cpu" else jax.vmap(jax.vmap(one_head))
    out, lse, probs = every_head(by_head, keys, values, bias)
    result = [jnp.moveaxis(out, 3, 1).reshape(batch, tokens, heads, dim).astype(q.dtype)]
    if return_lse:
        result.append(jnp.moveaxis(lse, 3, 1).reshape(batch, tokens, heads))
    if return_probs:
        result.append(probs.reshape(batch, heads, capacity))
    return result[0] if len(result) == 1 else tuple(result)


def _one_head(
    q: Float[Array, "G T D"], keys: Rows, values: Rows, bias: Float[Array, " C"], soft_cap: float | None
) -> tuple[Float[Array, "G T D"], Float[Array, "G T"], Float[Array, "G C"]]:
    """Output, log-sum-exp, and probabilities summed over the tokens, of one KV head's queries; all in float32."""
    occupied = bias > -jnp.inf
    score = capped(_scores(q, keys) / math.sqrt(q.shape[-1]), soft_cap)
    score = jnp.where(occupied[None, None], score + bias[None, None], -jnp.inf)
    peak = jnp.max(score, axis=-1, keepdims=True)
    weight = jnp.exp(score - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    probs = weight / jnp.where(total > 0, total, 1.0)
    lse = (peak + jnp.log(total))[..., 0]  # -inf + log 0 stays -inf
    return _mixed(probs, values, occupied, q.dtype), lse, jnp.sum(probs, axis=1)


def _scores(q: Float[Array, "G T D"], keys: Rows) -> Float[Array, "G T C"]:
    """q k; the scale of a key multiplies its score."""
    product = partial(
        jnp.einsum, "gtd,cd->gtc", precision=matmul_precision(q.dtype), preferred_element_type=jnp.float32
    )
    if not isinstance(keys, Quantised):
        return product(*matmul_operands(q, keys))
    parts = zip(halves(q, keys), numbers(keys.codes, q.dtype), strict=True)
    return sum(product(*matmul_operands(*part)) for part in parts) * keys.scales[None, None]


def _mixed(
    probs: Float[Array, "G T C"], values: Rows, occupied: Bool[Array, " C"], dtype: Any
) -> Float[Array, "G T D"]:
    """The values by their probabilities; the scale of a value multiplies its probability."""
    product = partial(jnp.einsum, "gtc,cd->gtd", precision=matmul_precision(dtype), preferred_element_type=jnp.float32)
    if isinstance(values, Quantised):
        probs = probs * jnp.where(occupied, values.scales, 0.0)[None, None]
        parts = numbers(values.codes, weight_dtype(dtype))
    else:
        parts = [values]
    # Empty slots may hold NaN, and 0 x NaN is no zero.
    parts = [jnp.where(occupied[:, None], part, jnp.zeros((), part.dtype)) for part in parts]
    outs = [product(*matmul_operands(probs.astype(part.dtype), part)) for part in parts]
    return jnp.concatenate(outs, axis=-1) if len(outs) > 1 else outs[0]
