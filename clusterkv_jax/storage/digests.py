"""Arrays on the host: whether their numbers are finite, and digests that tell one from another."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

# Numbers looked at together: few enough to stay in a core's cache.
CHUNK = 2**18


def all_finite(x: np.ndarray) -> bool:
    """Whether a contiguous array of floats holds neither NaN nor an infinity; as fast as it can be read.

    Both have all bits of the exponent set, in every type, and integers compare much faster than bfloat16.
    """
    bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
    exponent = np.array(np.inf, x.dtype).view(bits.dtype)
    return all((bits[i : i + CHUNK] & exponent).max() != exponent for i in range(0, bits.size, CHUNK))


def digest(x: np.ndarray) -> str:
    """Of the type, the shape and every number."""
    found = hashlib.sha256(f"{x.dtype.name} {x.shape} ".encode())
    found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of all of an array, as jax gives it to who makes shards."""
    return tuple(slice(0, n) for n in shape)


def few(x: Any) -> Any:
    """At most 7 numbers along each dimension, evenly spread, of an array or of what is sliced as one."""
    return x[tuple(slice(None, None, max(1, n // 4)) for n in x.shape)]


def fingerprint(parameters: Iterable[np.ndarray]) -> str:
    """One text for the `few` numbers of all parameters, in their order."""
    return hashlib.sha256("".join(map(digest, parameters)).encode()).hexdigest()[:16]
