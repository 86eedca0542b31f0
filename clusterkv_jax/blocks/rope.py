"""Rotary position embedding (Su et al., 2021) and the scalings of its frequencies that the families use."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.config import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling
from clusterkv_jax.runtime.dispatch import platform
from clusterkv_jax.runtime.sharding import ambient_mesh

ANGLES_AT_ONCE = 256  # positions


def frequencies(rope: Rope) -> np.ndarray:
    """Angle per position of each rotated pair, radians, f32 [dim / 2].

    Rounded to float32 at the same steps as in transformers: a last bit here turns a pair by 0.008 rad at position 128k.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / powers
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / np.float32(factor)
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case LongScaling(factors):
            return np.float32(1) / (np.asarray(factors, np.float32) * powers)
        case YarnScaling():
            return _yarn(powers, rope, rope.scaling)


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.original_max_positions / (2 * math.pi / plain)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(powers: np.ndarray, rope: Rope, scaling: YarnScaling) -> np.ndarray:
    def pair(turns: float) -> float:
        """Number of the pair that turns so often within the original positions."""
        share = math.log(scaling.original_max_positions / (2 * math.pi * turns)) / math.log(rope.theta)
        return rope.dim / 2 * share

    fast, slow = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, rope.dim - 1)
    width = slow - fast or 0.001  # as in transformers
    divide = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - np.float32(fast)) / np.float32(width), 0, 1)
    keep, one = 1 - divide, np.float32(1)
    return one / (np.float32(scaling.factor) * powers) * (1 - keep) + one / powers * keep


def encode(x: Float[Array, "B T heads D"], positions: Int[Array, "B T"], rope: Rope) -> Float[Array, "B T heads D"]:
    """`rotate`, and the rotated dimensions longer by the scaling's attention factor: queries and keys of a model."""
    return _rotate(x, positions, rope, rope.magnitude)


def decode(x: Float[Array, "B T heads D"], positions: Int[Array, "B T"], rope: Rope) -> Float[Array, "B T heads D"]:
    """The inverse of `encode`."""
    return _rotate(x, -positions, rope, 1 / rope.magnitude)


def rotate(x: Float[Array, "B T heads D"], positions: Int[Array, "B T"], rope: Rope) -> Float[Array, "B T heads D"]:
    """Rotate the first `rope.dim` dimensions of every head by its token's position; the other dimensions pass.

    Angles, sines and the rotation are float32 whatever the type of x: at position 128k bfloat16 could not even tell
    neighbours apart.
    """
    return _rotate(x, positions, rope, 1.0)


def cosines_and_sines(
    positions: Int[Array, "B T"], rope: Rope, magnitude: float | None = None
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """By which `encode` turns a token's pairs, float32; longer by `magnitude`, that of the scaling by default."""
    magnitude = rope.magnitude if magnitude is None else magnitude

    def of_positions(positions: Array) -> tuple[Array, Array]:
        angles = jnp.multiply.outer(positions[..., None].astype(jnp.float32), frequencies(rope))
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return (cos, sin) if magnitude == 1 else (magnitude * cos, magnitude * sin)

    if platform() != "cpu" or ambient_mesh() is not None or positions.shape[1] < 2 * ANGLES_AT_ONCE:
        return of_positions(positions)
    # A CPU's compiler computes them again for every head that they turn, but not what a loop has made.
    cos, sin = jax.lax.map(of_positions, positions.T, batch_size=ANGLES_AT_ONCE)
    return jnp.swapaxes(cos, 0, 1), jnp.swapaxes(sin, 0, 1)


def _rotate(x: Array, positions: Array, rope: Rope, magnitude: float) -> Array:
    return turn(x, *cosines_and_sines(positions, rope, magnitude), rope)


def turn(x: Float[Array, "*rows D"], cos: Float[Array, "..."], sin: Float[Array, "..."], rope: Rope) -> Array:
    """x with the pairs of its last dimension turned by angles of these cosines and sines, [..., rope.dim / 2].

    Both must broadcast against x by size. Means of cosines and sines give the mean of the rotations.
    """
    turned, rest = jnp.split(x, [rope.dim], axis=-1)
    turned = turned.astype(jnp.float32)
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
