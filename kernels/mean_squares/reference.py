"""Mean squared lengths in plain jnp: the definition, and the path of platforms without a kernel."""

import jax.numpy as jnp

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import dequantised


def mean_squares(rows, index, length):
    """See `clusterkv_jax.kernels.mean_squares.mean_squares`."""
    square = jnp.sum(jnp.square(dequantised(rows).astype(jnp.float32)), axis=-1)
    listed = jnp.take_along_axis(square, index, axis=-1)
    total = jnp.sum(jnp.where(ordinals(index.shape[2], 3) < length[..., None], listed, 0.0), axis=-1)
    return mean_of(total, length)


def mean_of(total, length):
    """Of as many."""
    mean = total / jnp.maximum(length, 1).astype(jnp.float32)
    return jnp.where(mean > 0, mean, 1.0)
