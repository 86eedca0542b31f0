"""Normalised and turned heads in plain XLA: the definition."""

import jax
import jax.numpy as jnp


def turned_heads(q, k, q_scale, k_scale, cos, sin, *, eps, offset):
    """See `clusterkv_jax.kernels.turned_heads.turned_heads`."""

    def turned(x, scale):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
        a, b = jnp.split(wide * (offset + scale.astype(jnp.float32))[None, None], 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(x.dtype)

    return turned(q, q_scale), turned(k, k_scale)
