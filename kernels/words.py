"""Codes of quantised rows in words of 16 bits, as the GPU kernels read them.

    int8, float8_e4m3   word w holds columns 2 w and 2 w + 1; part p of a tile is byte p of every word
    int4                word w holds columns 2 w, 2 w + D/2, 2 w + 1, 2 w + 1 + D/2; part p is its four bits p

A matrix product takes numbers of two rows in a register. Codes that are loaded byte by byte cost more instructions for
that than the memory leaves time for; words are loaded as numbers of 16 bits are, and each part of a pair of words takes
two to four instructions. Parts are float16, which holds every code exactly: 1024 with a byte in its last bits is 1024
and that byte.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.runtime.dispatch import platform

# Two words in $1 become two numbers in $0; {shift} brings the part to the end of its word, {bytes} is what prmt picks.
_PARTS = {
    # ((word >> shift) & 255) ^ 0x6480 is 1024 and the byte with its sign turned; - 1152
    "int8": "{{ .reg .b32 t, c; shr.b32 t, $1, {shift}; lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A; "
    "mov.b32 c, 0x64806480; sub.f16x2 $0, t, c; }}",
    "float8_e4m3": "{{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $1, $1, {bytes}; mov.b32 {{low, high}}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, low; }}",
    # ((word >> shift) & 15) | 0x6400 is 1024 and the four bits; * 2 - 2048 - 15
    "int4": "{{ .reg .b32 t, c, d; shr.b32 t, $1, {shift}; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; "
    "mov.b32 c, 0x40004000; mov.b32 d, 0xE800E800; fma.rn.f16x2 t, t, c, d; "
    "mov.b32 c, 0x4B804B80; sub.f16x2 $0, t, c; }}",
}
_BYTES = ("0x0020", "0x0031")


def in_words(rows: Quantised) -> Quantised:
    """The same codes as i16 [..., W/2], without a copy; W must be even."""
    codes = rows.codes.reshape(*rows.codes.shape[:-1], rows.codes.shape[-1] // 2, 2)
    return Quantised(jax.lax.bitcast_convert_type(codes, jnp.int16), rows.scales)


def out_of_words(rows: Quantised, dtype: Any) -> Quantised:
    """What `in_words` was given, codes of `dtype`."""
    codes = jax.lax.bitcast_convert_type(rows.codes, dtype)
    return Quantised(codes.reshape(*codes.shape[:-2], -1), rows.scales)


def columns_of_parts(words: Array, kind: str, width: int) -> list[Array]:
    """The columns of a row of `width` that each part holds, by word."""
    if kind == "int4":
        return [2 * words + part // 2 + part % 2 * (width // 2) for part in range(4)]
    return [2 * words + part for part in range(2)]


def parts(words: Array, kind: str) -> list[Array]:
    """What the codes of a tile of words stand for, in units of the scale, float16."""
    return [_part(words, kind, part) for part in range(4 if kind == "int4" else 2)]


def _part(words: Array, kind: str, part: int) -> Array:
    shift = part * (4 if kind == "int4" else 8)
    if platform() == "cpu":
        return _part_in_jnp(words, kind, shift)
    return plgpu.elementwise_inline_asm(
        _PARTS[kind].format(shift=shift, bytes=_BYTES[part % 2]),
        args=[words],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
    )[0]


def _part_in_jnp(words: Array, kind: str, shift: int) -> Array:
    """The same for the interpreter."""
    word = words.astype(jnp.int32) >> shift
    if kind == "int4":
        return (2 * (word & 15) - 15).astype(jnp.float16)
    byte = (word & 255).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(byte, jnp.int8 if kind == "int8" else jnp.float8_e4m3fn).astype(jnp.float16)
