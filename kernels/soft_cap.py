"""Soft caps of attention scores, in kernels and out of them."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def capped(scores: Float[Array, "..."], soft_cap: float | None) -> Float[Array, "..."]:
    """c tanh(s / c) of scores s in float32; as they are without a cap c."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
