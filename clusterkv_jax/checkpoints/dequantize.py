"""Numbers of quantised weights: every byte of a file stands for one or two codes, each code for a number.

Formats differ in three things: the numbers of a byte, the rows and columns that share a scale, and whether codes have a
zero of their own.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8

from clusterkv_jax.storage.digests import CHUNK

_BYTES = np.arange(256, dtype=np.uint8)
_NIBBLES = np.stack([_BYTES & 15, _BYTES >> 4], axis=1)  # the low one is the first
# A bit for the sign, two for the exponent, one for the fraction.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The numbers of a byte, by the kind of code. Packed integers are offset, so that no code is negative.
TABLES = {
    "e4m3": _BYTES.view(jnp.float8_e4m3fn).astype(np.float32)[:, None],
    "int8": _BYTES.view(np.int8).astype(np.float32)[:, None],
    "offset8": _BYTES.astype(np.float32)[:, None] - 128,
    "offset4": _NIBBLES.astype(np.float32) - 8,
    "e2m1": np.concatenate([_E2M1, -_E2M1])[_NIBBLES],
}
# Scales of one byte are powers of two, and 255 is NaN.
POWERS = _BYTES.view(jnp.float8_e8m0fnu).astype(np.float32)


def decode(raw: UInt8[np.ndarray, "R bytes"], code: str) -> Float[np.ndarray, "R C"]:
    """The numbers of rows of bytes, before any scale."""
    table = TABLES[code]
    # The numbers of a byte as one: that is several times faster.
    return table.view(f"u{table.itemsize * table.shape[1]}")[:, 0].take(raw).view(np.float32)


def dequantise(
    raw: UInt8[np.ndarray, "R bytes"],
    scales: Float[np.ndarray, "groups_r groups_c"],
    zeros: Float[np.ndarray, "groups_r groups_c"] | None,
    *,
    code: str,
    block: tuple[int, int],
    rows: Int[np.ndarray, " part_r"],
    columns: Int[np.ndarray, " part_c"],
) -> Float[np.ndarray, "part_r part_c"]:
    """The numbers of some rows and columns, both in rising order, in float32: (codes - zeros) * scales.

    `block` has the rows and columns that share a scale. Only these rows are read, from the first to the last column.
    """
    each = TABLES[code].shape[1]
    first, last = columns[0] // each, columns[-1] // each + 1
    inside, down, across = _run(columns - first * each), rows // block[0], columns // block[1]
    across = across[:1] if scales.shape[1] == 1 else across
    numbers = np.empty((len(rows), len(columns)), np.float32)
    step = max(1, CHUNK // (int(last - first) * each))
    for i in range(0, len(rows), step):
        part = decode(raw[_run(rows[i : i + step]), first:last], code)[:, inside]
        if zeros is not None:
            part -= zeros[down[i : i + step]].take(across, axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(part, scales[down[i : i + step]].take(across, axis=1), out=numbers[i : i + step])
    return numbers


def _run(numbers: Int[np.ndarray, " n"]) -> slice | np.ndarray:
    """Numbers that follow each other as a slice, which copies nothing."""
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers
