"""Which scores of a row are its k best, found in the registers of one program on a GPU: by bisection on the scores,
read as integers of the same order. No accelerator sorts fast.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from clusterkv_jax.kernels.gpu import power_of_two

MOST_SCORES = 32768  # scores of the only tile: 32 registers of each of 1,024 threads
LONG_TILE = 16384  # of one of many, which share the registers with what is counted of them
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def tile_of(scores: int) -> int:
    """Scores that are read at a time."""
    return power_of_two(scores, 32) if scores <= MOST_SCORES else LONG_TILE


def warps_of(scores: int) -> int:
    """Warps that hold a tile of them."""
    return min(32, max(4, power_of_two(scores) // 256))


def limit_of(
    load: Callable[[Any], tuple[Array, Array]], size: int, tiles: Any, last: Any, k: Array
) -> tuple[Array, Array]:
    """The key that the k best scores of a row have at least, and the last number of exactly that key that is among
    them: of equal scores the first are taken, and none of -inf or NaN.

    `load(tile)` gives the numbers and the scores of a tile of `size`, -inf where there is none. Where `tiles` is 1 as a
    Python number, they stay in registers. `last` is one beyond the highest number.
    """

    def keys_of(tile: Any) -> tuple[Array, Array]:
        number, score = load(tile)
        return number, jnp.where(score > -jnp.inf, key_of(score), LOWEST)

    only_tile = keys_of(0) if isinstance(tiles, int) and tiles == 1 else None

    def over_tiles(measure: Callable[..., Array], start: Any) -> Array:
        """`measure(numbers, keys, result so far)` of one tile after the other."""
        if only_tile is not None:
            return measure(*only_tile, start)
        return jax.lax.fori_loop(0, tiles, lambda i, result: measure(*keys_of(i), result), start)

    def count(is_one: Callable[[Array, Array], Array]) -> Array:
        """How many scores `is_one` is true for. Threads add up their own, so that they meet once, not in every tile."""

        def add(number, key, total):
            return total + is_one(number, key).astype(jnp.int32)

        return jnp.sum(over_tiles(add, jnp.zeros(size, jnp.int32)))

    def least(_, key, low):
        return jnp.minimum(low, jnp.min(jnp.where(key > LOWEST, key, HIGHEST)))

    lowest = over_tiles(least, jnp.int32(HIGHEST))
    highest = over_tiles(lambda _, key, high: jnp.maximum(high, jnp.max(key)), jnp.int32(LOWEST))

    # At least k scores reach low (or there are fewer than k), fewer than k reach high.
    def halve(state):
        low, high, reached = state
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        total = count(lambda _, key: key >= middle)
        enough = total >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle), jnp.where(enough, total, reached)

    def undecided(state):
        low, high, reached = state
        return (reached > k) & (low < high - 1)

    reached = count(lambda _, key: key > LOWEST)
    low, _, reached = jax.lax.while_loop(undecided, halve, (lowest, highest + 1, reached))

    # Of the scores of exactly that key the first few; all of them where no more reach it than are wanted.
    room = k - count(lambda _, key: key > low)

    def halve_last(state):
        low_number, high_number = state
        middle = (low_number + high_number) // 2
        total = count(lambda number, key: (key == low) & (number <= middle))
        return jnp.where(total < room, middle, low_number), jnp.where(total < room, high_number, middle)

    _, last = jax.lax.while_loop(
        lambda state: (reached > k) & (state[0] < state[1] - 1), halve_last, (jnp.int32(-1), jnp.int32(last))
    )
    none = k <= 0
    return jnp.where(none, HIGHEST, low), jnp.where(none, -1, last)


def key_of(score: Array) -> Array:
    """float32 as i32 of the same order; 0 = -0."""
    # Not by adding 0, which compilers leave out.
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(HIGHEST))


def is_best(score: Array, number: Array, limit: Array, last: Array) -> Array:
    """Whether these scores are among the best that `limit_of` found."""
    key = key_of(score)
    return (score > -jnp.inf) & ((key > limit) | ((key == limit) & (number <= last)))
