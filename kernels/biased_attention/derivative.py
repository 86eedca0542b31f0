"""The derivative of biased attention, one rule for all backends.

A kernel cannot be differentiated, so the rule is given: its tangents, in plain XLA from the saved log-sum-exp. They are
linear, so that JAX transposes them into gradients; a given gradient (custom_vjp) would leave forward mode and second
derivatives undefined. What the transposition needs is computed again instead of saved.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.kernels.biased_attention.reference import log_degree
from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.kernels.soft_cap import capped


def differentiable(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of q, keys, values, degree and length, with derivatives for the first four; of quantised rows
    without any.
    """

    @functools.wraps(implementation)
    def attention(q, keys, values, degree, length, *, soft_cap=None, return_lse, return_probs):
        if isinstance(keys, Quantised):  # codes have no derivative
            options = {"soft_cap": soft_cap, "return_lse": return_lse, "return_probs": return_probs}
            return implementation(q, keys, values, degree, length, **options)
        out, lse, *probs = _attention(implementation, soft_cap, return_probs, q, keys, values, degree, length)
        result = [out, *([lse] if return_lse else []), *probs]
        return result[0] if len(result) == 1 else tuple(result)

    return attention


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _attention(implementation, soft_cap, return_probs, *operands):
    return implementation(*operands, soft_cap=soft_cap, return_lse=True, return_probs=return_probs)


@_attention.defjvp
def _attention_jvp(implementation, soft_cap, return_probs, operands, tangents):
    result = _attention(implementation, soft_cap, return_probs, *operands)
    changes = jax.checkpoint(functools.partial(_changes, soft_cap))(operands, result[1], tangents[:4])
    return result, tuple(x.astype(y.dtype) for x, y in zip(changes, result, strict=False))


def _changes(
    soft_cap: float | None, operands: tuple[Any, ...], lse: Float[Array, "B T H"], tangents: tuple[Array, ...]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"], Float[Array, "B H C"]]:
    """How output, log-sum-exp and summed probabilities change with q, keys, values and degree, to first order."""
    q, keys, values, degree = (x.astype(jnp.float32) for x in operands[:4])
    dq, dkeys, dvalues, ddegree = (x.astype(jnp.float32) for x in tangents)
    batch, tokens, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    bias = log_degree(degree, operands[4])
    occupied = bias > -jnp.inf
    # Empty slots may hold NaN, and 0 x NaN is no zero.
    keys, values, dkeys, dvalues = (jnp.where(occupied[..., None], x, 0.0) for x in (keys, values, dkeys, dvalues))
    dbias = jnp.where(occupied, ddegree / jnp.where(occupied, degree, 1.0), 0.0)
    q, dq = (x.reshape(batch, tokens, kv_heads, -1, dim) for x in (q, dq))
    lse = jnp.moveaxis(lse.reshape(batch, tokens, kv_heads, -1), 1, 3)[..., None]

    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = functools.partial(product, "btkgd,bkcd->bkgtc")
    scale = 1 / math.sqrt(dim)

    def over_slots(x):
        return x[:, :, None, None, :]

    product_with_keys = scores(q, keys) * scale
    score = capped(product_with_keys, soft_cap) + over_slots(bias)
    slope = 1.0 if soft_cap is None else 1 - jnp.tanh(product_with_keys / soft_cap) ** 2
    probs = jnp.where(over_slots(occupied), jnp.exp(score - jnp.where(lse == -jnp.inf, 0.0, lse)), 0.0)
    dscore = (scores(dq, keys) + scores(q, dkeys)) * (slope * scale) + over_slots(dbias)
    dlse = jnp.sum(probs * dscore, axis=-1, keepdims=True)
    dprobs = probs * (dscore - dlse)
    dout = product("bkgtc,bkcd->btkgd", dprobs, values) + product("bkgtc,bkcd->btkgd", probs, dvalues)
    return (
        dout.reshape(batch, tokens, heads, dim),
        jnp.moveaxis(dlse[..., 0], 3, 1).reshape(batch, tokens, heads),
        jnp.sum(dprobs, axis=3).reshape(batch, heads, capacity),
    )
