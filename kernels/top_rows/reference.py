"""The highest scores in plain jnp, by counting bits: no accelerator sorts fast."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def top_rows(score, count):
    """See `clusterkv_jax.kernels.top_rows.top_rows`."""
    counts = count.reshape(count.shape[0], -1, 1)
    edge = score > -jnp.inf
    rank = _ordered_bits(jnp.where(edge, score, -jnp.inf))
    least = _kth_highest(rank, counts)
    above = edge & (rank > least)
    level = edge & (rank == least)
    room = counts - jnp.sum(above, axis=-1, keepdims=True)
    return (above | (level & (jnp.cumsum(level, axis=-1) <= room))) & (counts > 0)


def _ordered_bits(x: Float[Array, "B K A"]) -> UInt32[Array, "B K A"]:
    """float32 as integers of the same order: negative numbers flipped whole, the others in their sign bit; 0 = -0."""
    # Not by adding 0, which compilers leave out.
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _kth_highest(x: UInt32[Array, "B K A"], k: Int[Array, "B #K 1"]) -> UInt32[Array, "B K 1"]:
    """The k-th highest of every row, found bit by bit from the top: the largest t with at least k entries >= t.

    A count per bit instead of a sort: no accelerator sorts fast, and a sort takes seconds to compile on a TPU.
    """

    def body(i, t):
        trial = t | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        return jnp.where(jnp.sum(x >= trial, axis=-1, keepdims=True) >= k, trial, t)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros((*x.shape[:2], 1), jnp.uint32))
