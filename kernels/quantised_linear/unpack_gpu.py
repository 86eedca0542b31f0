"""Codes of weights in words of 16 bits, as the GPU kernel reads them, and what they stand for in bfloat16.

    int8, fp8      word w of a row has outputs 2 w and 2 w + 1 in its bytes
    int4, mxfp4    byte p of word w has output 2 w + p, of an input of the first half of a group and one of the second

A matrix product takes numbers of two rows in a register. So words are loaded as numbers of 16 bits are, and what a pair
of words holds becomes two numbers by two to six instructions. bfloat16 holds every code exactly, and takes rows of any
size, which float16 would not. A code of int4 stands for `BIAS` more than itself there: an instruction less.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights, WeightKind, code_numbers
from clusterkv_jax.runtime.dispatch import platform

# Two words in $1 become two numbers in $0; {shift} brings a code to the end of its word, {up} a byte to its start.
_NUMBERS = {
    # 128 and the last seven bits, less 128 or, where the first bit is set, 256.
    "int8": "{{ .reg .b32 t, s, one; shr.b32 t, $1, {shift}; lop3.b32 s, t, 0x00800080, 0xC300C300, 0xEA; "
    "lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, t, one, s; }}",
    # 128 and the code, which stands for 8 less.
    "int4": "{{ .reg .b32 t; shr.b32 t, $1, {shift}; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }}",
    # Sign, exponent and mantissa in their places; exponents are offset by 120 less, and by 126.
    "fp8": "{{ .reg .b32 t, c, z; shl.b32 t, $1, {up}; shr.b32 c, t, 4; and.b32 c, c, 0x07F007F0; "
    "lop3.b32 c, t, 0x80008000, c, 0xEA; mov.b32 t, 0x7B807B80; mov.b32 z, 0x80008000; "
    "fma.rn.bf16x2 $0, c, t, z; }}",
    "mxfp4": "{{ .reg .b32 t, c, z; shr.b32 t, $1, {shift}; shl.b32 c, t, 6; and.b32 c, c, 0x01C001C0; "
    "shl.b32 t, t, 12; lop3.b32 c, t, 0x80008000, c, 0xEA; mov.b32 t, 0x7E807E80; mov.b32 z, 0x80008000; "
    "fma.rn.bf16x2 $0, c, t, z; }}",
}

BIAS = {"int4": 136}


def words(weights: QuantisedWeights) -> Array:
    """The codes [rows, outputs] as i16 [rows, outputs / 2], without a copy."""
    pairs = weights.codes.reshape(*weights.codes.shape[:-1], -1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.int16)


def pair_words(scales: Array | None) -> Array | None:
    """Scales [..., outputs] of 16 or 8 bits by words of two outputs, and those of 32 by outputs, without a copy."""
    if scales is None:
        return None
    bits = {4: jnp.int32, 2: jnp.int32, 1: jnp.int16}[scales.dtype.itemsize]
    pairs = scales if scales.dtype.itemsize == 4 else scales.reshape(*scales.shape[:-1], -1, 2)
    return jax.lax.bitcast_convert_type(pairs, bits)


def pair(stored: Any, group: tuple[Any, ...], word: Array, dtype: Any) -> list[Array] | None:
    """The scales of this type that `pair_words` has of these words of a group, in words of 32 bits; None of none."""
    if stored is None:
        return None
    at = [2 * word, 2 * word + 1] if dtype.itemsize == 4 else [word]
    return [plgpu.load(stored.at[(*group, each)]).astype(jnp.int32) for each in at]


def numbers_of_pair(pair: list[Array] | None, dtype: Any) -> list[Any]:
    """Scales of this type of even outputs and of odd ones, float32."""
    if pair is None:
        return [None, None]
    if len(pair) == 2:
        return [jax.lax.bitcast_convert_type(part, jnp.float32) for part in pair]
    if dtype == jnp.uint8:  # exponents
        return [jax.lax.bitcast_convert_type((pair[0] >> bit & 255) << 23, jnp.float32) for bit in (0, 8)]
    parts = [(pair[0] >> bit).astype(jnp.int16) for bit in (0, 16)]
    return [jax.lax.bitcast_convert_type(part, dtype).astype(jnp.float32) for part in parts]


def multiply_add(a: Array, b: Array, c: Array) -> Array:
    """a b + c in float32 by an instruction, which Triton would not make of the two."""
    if platform() == "cpu":
        return a * b + c
    shape = jnp.broadcast_shapes(a.shape, b.shape, c.shape)
    return plgpu.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[jnp.broadcast_to(x, shape) for x in (a, b, c)],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )[0]


def numbers(tile: Array, kind: WeightKind) -> list[list[Array]]:
    """What a tile of words stands for and the bias of its kind, before any scale.

    Of even outputs and of odd ones, each in the parts of `code_numbers`.
    """
    if platform() == "cpu":
        parts = [code_numbers(_byte(tile, part, kind), kind, jnp.bfloat16) for part in (0, 1)]
        return [[half + BIAS.get(kind, 0) for half in part] for part in parts]
    halves = (0, 4) if kind in PACKED else (0,)
    return [[_numbers(tile, kind, 8 * part + half) for half in halves] for part in (0, 1)]


def _numbers(tile: Array, kind: WeightKind, shift: int) -> Array:
    return plgpu.elementwise_inline_asm(
        _NUMBERS[kind].format(shift=shift, up=8 - shift),
        args=[tile],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(tile.shape, jnp.bfloat16)],
    )[0]


def _byte(tile: Array, part: int, kind: WeightKind) -> Any:
    """The same for the interpreter."""
    byte = ((tile.astype(jnp.int32) >> 8 * part) & 255).astype(jnp.uint8)
    types = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
    return jax.lax.bitcast_convert_type(byte, types[kind]) if kind in types else byte
