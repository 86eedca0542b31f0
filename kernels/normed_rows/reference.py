"""Normalised rows in plain XLA: the definition."""

import jax
import jax.numpy as jnp


def normed_rows(x, added, scale, weights=None, *, eps, offset):
    """See `clusterkv_jax.kernels.normed_rows.normed_rows`."""
    if added is not None:
        x = x + jnp.sum(added.astype(jnp.float32), axis=0).astype(x.dtype)
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    normed = (wide * (offset + scale.astype(jnp.float32)[None])).astype(x.dtype)
    if weights is None:
        return x, normed, None
    precision = jax.lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None
    options = {"precision": precision, "preferred_element_type": jnp.float32}
    return x, normed, jnp.einsum("nm,em->ne", normed, weights, **options)
