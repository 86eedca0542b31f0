"""Rows in 8 or 4 bits per number: codes, and one scale for each row.

    int8           a code is the number over the scale, rounded; the scale is the row's largest magnitude / 127
    float8_e4m3    the same in four bits of exponent and three of mantissa; the scale is the largest / 448
    int4           of the rotated row: 16 cells as wide as two scales, the scale is the largest / 16; code c = 0 ... 15
                   stands for (2 c - 15) scales, the middle of its cell. A byte holds column d below column d + D/2

A Hadamard rotation spreads what stands out in a row over all of its columns. It is orthonormal and its own inverse: a
score does not change if query and key are both rotated, and rotated values are turned back once they are mixed. Whoever
attends multiplies by numbers of codes, which bfloat16 holds exactly, and by the scales afterwards: the scale of a key
multiplies its score, that of a value its weight. No row is ever made whole for that.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

CacheDtype = Literal["int8", "float8_e4m3", "int4"]
CODES: dict[str, Any] = {"int8": jnp.int8, "float8_e4m3": jnp.float8_e4m3fn, "int4": jnp.uint8}
# The largest magnitude of a row in units of its scale.
SCALE_BYTES = 4
LARGEST = {"int8": 127.0, "float8_e4m3": 448.0, "int4": 16.0}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """Rows [..., D]: codes [..., D], of 4 bits [..., D/2], and a scale f32 [...] for each row.

    Whatever takes, moves or drops rows does it to codes and scales alike, so a row keeps its codes for as long as it
    stays.
    """

    codes: Num[Array, "... width"]
    scales: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows: [..., D]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * (2 if is_packed(self) else 1))


StoredRows = Array | Quantised


def as_array(rows: Any) -> Any:
    """The codes of quantised rows; other rows as they are."""
    return rows.codes if isinstance(rows, Quantised) else rows


def is_packed(rows: Quantised) -> bool:
    """Whether a byte holds two codes, of rotated rows."""
    return rows.codes.dtype == jnp.uint8


def kind(rows: Quantised) -> str:
    """The name of the rows' type, a `CacheDtype`."""
    return next(name for name, dtype in CODES.items() if rows.codes.dtype == dtype)


def row_bytes(name: str, dim: int) -> int:
    """Bytes of one row with its scale."""
    return dim // (2 if name == "int4" else 1) + SCALE_BYTES


def quantise(rows: Float[Array, "... D"], name: str) -> Quantised:
    """Rows in codes of this type; a row that is not finite gets a scale that is not.

    Raises ValueError if rows of 4 bits have a D that is no power of two.
    """
    rows = rows.astype(jnp.float32)
    return in_codes(jnp.split(rotated(rows), 2, axis=-1) if name == "int4" else [rows], name)


def in_codes(
    parts: list[Float[Array, "... width"]], name: str, nearest: Callable[[Array], Array] = jnp.round
) -> Quantised:
    """Rows whose columns stand in parts, as those of `numbers` do; of 4 bits they are rotated. `nearest` rounds."""
    scale = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(part), axis=-1) for part in parts]) / LARGEST[name]
    number = [part / jnp.where(scale > 0, scale, 1.0)[..., None] for part in parts]
    if name == "int8":
        return Quantised(jnp.clip(nearest(number[0]), -127, 127).astype(jnp.int8), scale)
    if name == "float8_e4m3":
        return Quantised(jnp.clip(number[0], -448, 448).astype(jnp.float8_e4m3fn), scale)
    low, high = (jnp.clip(jnp.floor(part / 2) + 8, 0, 15).astype(jnp.int32) for part in number)
    return Quantised((low | (high << 4)).astype(jnp.uint8), scale)


def dequantised(rows: StoredRows) -> Float[Array, "... D"]:
    """The rows in float32; rows that are no codes as they are."""
    if not isinstance(rows, Quantised):
        return rows
    whole = jnp.concatenate(numbers(rows.codes, jnp.float32), axis=-1) * rows.scales[..., None]
    return rotated(whole) if is_packed(rows) else whole


def row_squares(rows: StoredRows) -> Float[Array, "..."]:
    """|x|² of every row in float32; a rotation leaves it as it is."""
    if isinstance(rows, Quantised):
        return squares_of(numbers(rows.codes, jnp.float32)) * jnp.square(rows.scales)
    return squares_of([rows.astype(jnp.float32)])


def squares_of(parts: list[Float[Array, "... width"]]) -> Float[Array, "..."]:
    """Sums of squares of rows whose columns stand in parts."""
    return functools.reduce(jnp.add, [jnp.sum(jnp.square(part), axis=-1) for part in parts])


def with_changes(stored: StoredRows, rows: Float[Array, "... D"], changed: Bool[Array, "..."]) -> StoredRows:
    """`rows` as they are stored; they were `dequantised(stored)` before some changed, the others keep their codes."""
    if not isinstance(stored, Quantised):
        return rows
    new = quantise(rows, kind(stored))
    codes = jnp.where(changed[..., None], new.codes, stored.codes)
    return Quantised(codes, jnp.where(changed, new.scales, stored.scales))


def as_stored(rows: StoredRows, others: StoredRows, mean: Float[Array, "B K 1 D"] | None = None) -> Any:
    """Rows in the codes of `others`, where those are quantised and these are not, less the mean that they are less."""
    if isinstance(rows, Quantised) or not isinstance(others, Quantised):
        return rows
    return quantise(rows if mean is None else rows.astype(jnp.float32) - mean, kind(others))


def numbers(codes: Num[Array, "... width"], dtype: Any) -> list[Num[Array, "... width"]]:
    """What codes stand for, in units of the scale: all columns, or of two codes a byte those of each half."""
    if codes.dtype != jnp.uint8:
        return [codes.astype(dtype)]
    byte = codes.astype(jnp.int32)
    return [(2 * nibble - 15).astype(dtype) for nibble in (byte & 15, byte >> 4)]


def halves(x: Array, rows: Quantised) -> list[Array]:
    """The columns of `x` that go with each part of `numbers`."""
    return jnp.split(x, 2, axis=-1) if is_packed(rows) else [x]


def weight_dtype(dtype: Any) -> Any:
    """In what queries of this type mix codes: a weight times a scale may be smaller than float16 tells from zero."""
    return jnp.bfloat16 if dtype == jnp.float16 else dtype


def in_basis_of_codes(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of queries `q` over `keys` and `values`, its first arguments, with both rotated where the rows are."""

    @functools.wraps(attention)
    def turned(q: Array, keys: StoredRows, values: StoredRows, *args: Any, **options: Any) -> Any:
        if not (isinstance(keys, Quantised) and is_packed(keys)):
            return attention(q, keys, values, *args, **options)
        result = attention(rotated(q), keys, values, *args, **options)
        return (rotated(result[0]), *result[1:]) if isinstance(result, tuple) else rotated(result)

    return turned


def rotated(rows: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Rows times the Hadamard matrix over sqrt(D), in float32 throughout; twice is the identity."""
    dim = rows.shape[-1]
    signs = jnp.asarray(_hadamard(dim), jnp.float32)
    turned = jnp.matmul(rows.astype(jnp.float32), signs, precision=jax.lax.Precision.HIGHEST)
    return (turned * dim**-0.5).astype(rows.dtype)


@functools.cache
def _hadamard(dim: int) -> np.ndarray:
    """Sylvester's matrix of 1 and -1."""
    if dim < 2 or dim & (dim - 1):
        raise ValueError(f"Rows of int4 are rotated, which needs a head dim that is a power of two, got {dim}.")
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
