"""What attention to several spans of slots leaves where nobody has combined the spans yet."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SPLITS = 128  # of a head that a launch combines at once
COUNTERS = 16  # of a launch whose programs wait for each other


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Splits:
    """Attention of one token to each span of slots, a split.

    Attributes:
        parts: the outputs of each split, float32.
        lses: the base 2 logarithms of their sums.
        filled: splits of each KV head that have slots; what others have is never read.
        counters: zeros, for the launch that combines the splits to count its programs by, and for no other.
    """

    parts: Float[Array, "K S G D"]
    lses: Float[Array, "K S G"]
    filled: Int[Array, " K"]
    counters: Int[Array, " _"]


def combined(splits: Splits) -> Float[Array, "H D"]:
    """Attention to all slots, float32; zeros for a head without any."""
    there = jnp.arange(splits.parts.shape[1], dtype=jnp.int32)[None] < splits.filled[:, None]
    lses = jnp.where(there[..., None], splits.lses, -jnp.inf)
    peak = jnp.max(lses, axis=1, keepdims=True)
    weights = jnp.exp2(lses - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = jnp.sum(weights, axis=1, keepdims=True)
    shares = (weights / jnp.where(total > 0, total, 1.0))[..., None]
    mixed = jnp.sum(jnp.where(there[..., None, None], splits.parts, 0.0) * shares, axis=1)
    return mixed.reshape(-1, mixed.shape[-1])
