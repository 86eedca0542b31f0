"""Biased attention in plain jnp: the definition, and the path of platforms without a kernel."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import Quantised, StoredRows, halves, in_basis_of_codes, numbers, weight_dtype
from clusterkv_jax.kernels.soft_cap import capped
from clusterkv_jax.runtime.dispatch import head_after_head, matmul_operands, matmul_precision, platform


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
    group = heads // kv_heads
    by_head = jnp.moveaxis(q.reshape(batch, tokens, kv_heads, group, dim), 1, 3)
    by_head = by_head.reshape(batch, kv_heads, group * tokens, dim)
    one_head = partial(_one_head, tokens=tokens, soft_cap=soft_cap)
    if platform() != "cpu":
        out, lse, probs = jax.vmap(jax.vmap(one_head))(by_head, keys, values, bias)
    elif group * tokens < dim:  # scores are less than the rows they are made of
        out, lse, probs = _all_heads(by_head, keys, values, bias, tokens, soft_cap)
    else:  # what a CPU makes of one head's rows stays in its cache
        out, lse, probs = head_after_head(one_head, by_head, keys, values, bias)

    def by_token(x):
        return jnp.moveaxis(x.reshape(batch, kv_heads, group, tokens, *x.shape[3:]), 3, 1)

    result = [by_token(out).reshape(batch, tokens, heads, dim).astype(q.dtype)]
    if return_lse:
        result.append(by_token(lse).reshape(batch, tokens, heads))
    if return_probs:
        result.append(probs.reshape(batch, heads, capacity))
    return result[0] if len(result) == 1 else tuple(result)


def _one_head(
    q: Float[Array, "R D"],
    keys: StoredRows,
    values: StoredRows,
    bias: Float[Array, " C"],
    tokens: int,
    soft_cap: float | None,
) -> tuple[Float[Array, "R D"], Float[Array, " R"], Float[Array, "G C"]]:
    """Output, log-sum-exp, and probabilities summed over the tokens, of one KV head's queries; all in float32."""
    probs, lse = _probabilities(q, keys, bias, soft_cap)
    return _mixed(probs, values, bias > -jnp.inf, q.dtype), lse, _over_tokens(probs, tokens)


def _all_heads(
    q: Float[Array, "B K R D"],
    keys: StoredRows,
    values: StoredRows,
    bias: Float[Array, "B K C"],
    tokens: int,
    soft_cap: float | None,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"], Float[Array, "B K G C"]]:
    """`_one_head` of all heads at once, without a copy of the values wherever empty slots hold numbers."""

    def every(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(jax.vmap(function))

    probs, lse = every(partial(_probabilities, soft_cap=soft_cap))(q, keys, bias)
    out = every(partial(_mixed, occupied=None, dtype=q.dtype))(probs, values)
    guarded = partial(every(partial(_mixed, dtype=q.dtype)), probs, values, bias > -jnp.inf)
    # A loop of one round or none: under vmap a conditional would run both branches, always.
    spoiled = ~jnp.all(jnp.isfinite(out))
    out, _ = jax.lax.while_loop(lambda state: state[1], lambda _: (guarded(), jnp.zeros_like(spoiled)), (out, spoiled))
    return out, lse, every(partial(_over_tokens, tokens=tokens))(probs)


def _probabilities(
    q: Float[Array, "R D"], keys: StoredRows, bias: Float[Array, " C"], soft_cap: float | None
) -> tuple[Float[Array, "R C"], Float[Array, " R"]]:
    """Those of one KV head's rows, and the log-sum-exp of the scores."""
    score = capped(_scores(q, keys) / math.sqrt(q.shape[-1]), soft_cap)
    score = jnp.where(bias[None] > -jnp.inf, score + bias[None], -jnp.inf)
    peak = jnp.max(score, axis=-1, keepdims=True)
    weight = jnp.exp(score - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    probs = weight / jnp.where(total > 0, total, 1.0)
    return probs, (peak + jnp.log(total))[..., 0]  # -inf + log 0 stays -inf


def _over_tokens(probs: Float[Array, "R C"], tokens: int) -> Float[Array, "G C"]:
    return jnp.sum(probs.reshape(-1, tokens, probs.shape[-1]), axis=1)


def _scores(q: Float[Array, "R D"], keys: StoredRows) -> Float[Array, "R C"]:
    """q k; the scale of a key multiplies its score."""
    product = partial(jnp.einsum, "rd,cd->rc", precision=matmul_precision(q.dtype), preferred_element_type=jnp.float32)
    if not isinstance(keys, Quantised):
        return product(*matmul_operands(q, keys))
    parts = zip(halves(q, keys), numbers(keys.codes, q.dtype), strict=True)
    return sum(product(*matmul_operands(*part)) for part in parts) * keys.scales[None]


def _mixed(
    probs: Float[Array, "R C"], values: StoredRows, occupied: Bool[Array, " C"] | None, dtype: Any
) -> Float[Array, "R D"]:
    """The values by their probabilities; the scale of a value multiplies its probability. With `occupied` None all
    slots count.
    """
    product = partial(jnp.einsum, "rc,cd->rd", precision=matmul_precision(dtype), preferred_element_type=jnp.float32)
    # Empty slots may hold NaN, and 0 x NaN is no zero.
    rows = None if occupied is None else occupied[:, None]
    if isinstance(values, Quantised):
        probs = probs * _where(occupied, values.scales)[None]
        parts = numbers(values.codes, weight_dtype(dtype))
    else:
        parts = [values]
    parts = [_where(rows, part) for part in parts]
    outs = [product(*matmul_operands(probs.astype(part.dtype), part)) for part in parts]
    return jnp.concatenate(outs, axis=-1) if len(outs) > 1 else outs[0]


def _where(condition: Bool[Array, "..."] | None, x: Array) -> Array:
    return x if condition is None else jnp.where(condition, x, jnp.zeros((), x.dtype))
