"""Normalised rows in plain XLA: the definition."""

import jax
import jax.numpy as jnp


def normed_rows(x, added, scale, *, eps, offset, rows):
    """See `clusterkv_jax.kernels.normed_rows.normed_rows`."""
    x = x if added is None else x + added[: len(x)]
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    normed = (wide * (offset + scale.astype(jnp.float32)[None])).astype(x.dtype)
    return x, jnp.pad(normed, ((0, rows - len(x)), (0, 0)))
