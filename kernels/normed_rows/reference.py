"""Normalised rows in plain XLA: the definition."""

import jax
import jax.numpy as jnp


def normed_rows(x, scale, weights=None, *, eps, offset):
    """See `clusterkv_jax.kernels.normed_rows.normed_rows`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    normed = (wide * (offset + scale.astype(jnp.float32)[None])).astype(x.dtype)
    if weights is None:
        return normed, None
    precision = jax.lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None
    options = {"precision": precision, "preferred_element_type": jnp.float32}
    return normed, jnp.einsum("nm,em->ne", normed, weights, **options)
