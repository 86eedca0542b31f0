"""Keys of draws: one implementation whatever JAX's default is, so that a seed draws the same numbers everywhere.

The draws of a request depend on its seed and on the number of the token alone, not on its place in a batch or on its
neighbours. JAX's other implementations mix the draws of keys that are mapped over.
"""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Key, UInt32

IMPLEMENTATION = "threefry2x32"
WORDS = 2  # of a key
# A key is made of 32 bits.
MOST_SEED = 2**32 - 1

wrapped = partial(jax.random.wrap_key_data, impl=IMPLEMENTATION)


def seed_words(seed: int) -> UInt32[np.ndarray, " words"]:
    """The key of a seed as its numbers, on the host."""
    return np.asarray([0, seed], np.uint32)


def seed_key(seed: int) -> Key[Array, ""]:
    """The key of a seed: `jax.random.key` of this implementation."""
    return wrapped(jax.device_put(seed_words(seed)))


def seed_keys(seeds: Sequence[int]) -> Key[Array, " B"]:
    """The key of each seed."""
    return wrapped(jax.device_put(np.stack([seed_words(seed) for seed in seeds])))


def own_key(key: Array | None) -> Key[Array, ""]:
    """A caller's key in this implementation, that of seed 0 for None; of another one its last words count."""
    if key is None:
        return seed_key(0)
    words = jax.random.key_data(key) if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return wrapped(words[-WORDS:])


def spread(seed: int | Sequence[int], count: int) -> list[int]:
    """A seed for each of `count` requests: those of a list, or of one seed s s, s + 1, ..., so that equal requests
    differ.
    """
    if isinstance(seed, int | np.integer):
        return [(int(seed) + i) % (MOST_SEED + 1) for i in range(count)]
    return [int(each) for each in seed]
