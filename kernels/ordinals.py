"""Numbers along an axis, with the dimensions that broadcasting against other arrays takes."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def ordinals(count: int, ndim: int = 1) -> Int[Array, "..."]:
    """0 ... count - 1 along the last of `ndim` dimensions, i32."""
    return jnp.arange(count, dtype=jnp.int32).reshape((1,) * (ndim - 1) + (count,))
