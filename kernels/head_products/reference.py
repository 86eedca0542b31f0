"""Queries, keys and values of few tokens in plain XLA: the definition."""

import jax
import jax.numpy as jnp


def head_products(x, weights, biases=None, angles=None, scale=None, surrogate=None, *, eps=0.0, offset=0.0):
    """See `clusterkv_jax.kernels.head_products.head_products`."""
    if scale is not None:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
        x = (wide * (offset + scale.astype(jnp.float32)[None])).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    options = {"precision": precision, "preferred_element_type": jnp.float32}
    heads = [jnp.einsum("nm,hdm->nhd", x, w, **options) for w in weights]
    if biases is not None:
        heads = [y + bias.astype(jnp.float32)[None] for y, bias in zip(heads, biases, strict=True)]
    if angles is not None:
        cos, sin = (y[:, None] for y in angles)
        halves = [jnp.split(y, 2, axis=-1) for y in heads[:2]]
        heads[:2] = [jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1) for a, b in halves]
    scores = None
    if surrogate is not None:
        rows, bias = surrogate
        scores = jnp.einsum("nm,sm->ns", x.astype(jnp.float32), rows, precision=jax.lax.Precision.HIGHEST) + bias[None]
    return *(y.astype(x.dtype) for y in heads), scores
