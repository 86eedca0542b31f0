"""Codes of quantised files, and those made of numbers, repacked once into the layout of `kernels.weight_codes`.

Here a weight is a matrix as its file has it, [outputs, inputs], and codes are one a byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Num, Shaped, UInt8

from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights, WeightKind
from clusterkv_jax.models.parameters import TensorSpec

# Inputs that share a scale where a file says nothing, or has one for all of them and two codes in a byte.
GROUPS = (128, 64, 32)
_HALF = np.finfo(np.float16)


@dataclass(frozen=True, eq=False)
class Coded:
    """Rows of a weight in codes.

    Attributes:
        kind: see `kernels.weight_codes`, as for what codes stand for.
        codes: [outputs, inputs]; int8, float8_e4m3fn, or uint8 from 0 to 15.
        scales: [outputs, groups].
        offsets: the same, or None.
    """

    kind: WeightKind
    codes: Shaped[np.ndarray, "outputs inputs"]
    scales: Num[np.ndarray, "outputs groups"]
    offsets: Float[np.ndarray, "outputs groups"] | None = None


def group_size(inputs: int) -> int | None:
    """How many of so many inputs share a scale where a file does not say it; None where nothing divides them."""
    return next((size for size in GROUPS if inputs % size == 0), None)


def repacked(parts: Sequence[Coded], spec: TensorSpec, axes: tuple[int, ...]) -> QuantisedWeights:
    """A parameter of this spec, whose dimensions `axes` are inputs, on the host; each part is an expert's."""
    kind = parts[0].kind
    stacked = spec.axes[0] == "experts"

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        transposed = [np.ascontiguousarray(x.T) for x in arrays]
        return np.stack(transposed) if stacked else transposed[0]

    codes = [_packed(part) if kind in PACKED else part.codes for part in parts]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    scales = joined([part.scales for part in parts])
    return QuantisedWeights(
        joined(codes), scales, joined(offsets) if offsets else None, kind, spec.shape, axes, spec.axes
    )


def in_groups(coded: Coded) -> Coded | None:
    """The same in groups that the layout can hold, or None: packed codes have no group of all inputs, or an odd one."""
    inputs, groups = coded.codes.shape[1], coded.scales.shape[1]
    if inputs % groups:
        return None
    if coded.kind not in PACKED or (groups > 1 and inputs // groups % 2 == 0):
        return coded
    size = group_size(inputs)
    if groups > 1 or size is None:
        return None
    offsets = None if coded.offsets is None else np.repeat(coded.offsets, inputs // size, axis=1)
    return Coded(coded.kind, coded.codes, np.repeat(coded.scales, inputs // size, axis=1), offsets)


def with_scales(
    kind: WeightKind,
    codes: np.ndarray,
    scales: Float[np.ndarray, "outputs groups"],
    offsets: Float[np.ndarray, "outputs groups"] | None = None,
) -> Coded:
    """Codes with scales of 16 bits where these hold all of them, else of 32."""
    small = np.abs(scales[scales != 0])
    halves = small.size == 0 or (small.min() >= _HALF.smallest_normal and small.max() <= _HALF.max)
    halves = halves and (offsets is None or np.abs(offsets).max(initial=0) <= _HALF.max)
    if scales.dtype.itemsize > 2 and halves:
        scales = scales.astype(np.float16)
    return Coded(kind, codes, scales, None if offsets is None else offsets.astype(np.float16 if halves else np.float32))


def dequantised_rows(coded: Coded) -> Float[np.ndarray, "outputs inputs"]:
    """The numbers that codes of int8, int4 or fp8 stand for, float32."""
    numbers = coded.codes.astype(np.float32) - (8 if coded.kind == "int4" else 0)
    each = numbers.shape[1] // coded.scales.shape[1]
    numbers *= np.repeat(coded.scales.astype(np.float32), each, axis=1)
    return numbers if coded.offsets is None else numbers + np.repeat(coded.offsets.astype(np.float32), each, axis=1)


def halves_of(raw: UInt8[np.ndarray, "R bytes"]) -> UInt8[np.ndarray, "R codes"]:
    """The codes of bytes that hold two, the low half first."""
    codes = np.empty((len(raw), 2 * raw.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = raw & 15, raw >> 4
    return codes


def _packed(coded: Coded) -> UInt8[np.ndarray, "outputs bytes"]:
    """Two codes a byte, from the halves of each group."""
    halves = coded.codes.reshape(len(coded.codes), coded.scales.shape[1], 2, -1)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(coded.codes), -1)


def is_finite(coded: Coded) -> bool:
    """Whether all codes stand for numbers."""
    if coded.kind == "mxfp4":
        return not bool((coded.scales == 255).any())
    arrays: list[Any] = [coded.scales, *([] if coded.offsets is None else [coded.offsets])]
    if coded.kind == "fp8":
        arrays.append(coded.codes)
    return all(bool(np.isfinite(x.astype(np.float32)).all()) for x in arrays)
