"""Weights in codes of 8 or 4 bits, in one layout for all files that hold such.

    kind    codes                               a code stands for
    int8    int8 [inputs, outputs]              itself
    int4    uint8 [inputs / 2, outputs]         itself - 8
    fp8     float8_e4m3fn [inputs, outputs]     itself
    mxfp4   uint8 [inputs / 2, outputs]         0, .5, 1, 1.5, 2, 3, 4 or 6, or less than 0 where its bit 3 is set

A weight is the number of its code times its scale, plus its offset where there are offsets; scales and offsets are
[groups, outputs], and each covers `inputs / groups` inputs that follow each other: all of them (a scale for each output
channel), or 32, 64 or 128. Scales of mxfp4 are exponents as its files store them, uint8: 2 to the power of scale - 127.

Outputs lie next to each other in memory. Products with few rows are bound by the bytes of the weights: a program takes
all inputs, or some groups of them, of a few outputs, and reads rows of codes, scales and offsets that are contiguous.
Within a group of g inputs, byte i holds input i in its low half and input i + g/2 in its high half. So the halves of a
tile of bytes are two tiles of g/2 neighbouring inputs: each is multiplied as it is with its part of x, and nothing is
interleaved. A group never lies on two devices. Experts have a dimension in front.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num, Shaped

from clusterkv_jax.runtime.dispatch import platform

WeightKind = Literal["int8", "int4", "fp8", "mxfp4"]
_LANES = 128
PACKED = ("int4", "mxfp4")  # two codes in a byte


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeights:
    """A parameter in codes, as the module describes.

    Arrays may be what stands for such: shapes, or places on a mesh.

    Attributes:
        codes: [*experts, inputs or half as many, outputs].
        scales: [*experts, groups, outputs], of mxfp4 uint8.
        offsets: the same, or None where all are 0.
        kind: static.
        shape: static; that of the parameter that the codes stand for.
        axes: static; its dimensions that are inputs, one behind the other.
        names: static; the logical axes of its dimensions.
    """

    codes: Any
    scales: Any
    offsets: Any = None
    kind: WeightKind = field(default="int8", metadata={"static": True})
    shape: tuple[int, ...] = field(default=(), metadata={"static": True})
    axes: tuple[int, ...] = field(default=(0,), metadata={"static": True})
    names: tuple[str | None, ...] = field(default=(), metadata={"static": True})

    def __getitem__(self, expert: Any) -> "QuantisedWeights":
        """The weights of one expert, in a dimension less."""
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, expert, keepdims=False), self)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The dimensions of the parameter that are neither inputs nor experts."""
        return tuple(i for i, name in enumerate(self.names) if i not in self.axes and name != "experts")

    @property
    def inputs(self) -> int:
        """Inputs of these codes: on a device, of its part."""
        return self.codes.shape[-2] * (2 if self.kind in PACKED else 1)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // self.scales.shape[-2]


def is_coded(weights: Any) -> bool:
    """Whether these are weights in codes."""
    return isinstance(weights, QuantisedWeights)


def scale_numbers(weights: QuantisedWeights) -> Float[Array, "*experts groups outputs"]:
    """The scales as numbers, float32."""
    if weights.kind != "mxfp4":
        return weights.scales.astype(jnp.float32)
    # The exponent of a bfloat16 has the same offset. The smallest power becomes 0.
    return jax.lax.bitcast_convert_type(weights.scales.astype(jnp.uint16) << 7, jnp.bfloat16).astype(jnp.float32)


def code_numbers(
    codes: Shaped[Array, "*experts rows outputs"], kind: WeightKind, dtype: Any = jnp.float32
) -> Num[Array, "*experts halves rows outputs"]:
    """What codes stand for, before any scale; of packed ones the first half of each group's inputs, then the second.

    All of these numbers are exact in bfloat16.
    """
    if kind not in PACKED:
        return codes.astype(dtype)[..., None, :, :]
    shifts = jnp.arange(0, 8, 4).reshape(*(1,) * (codes.ndim - 2), 2, 1, 1)
    return _of_four_bits(codes.astype(jnp.int32)[..., None, :, :] >> shifts & 15, kind, dtype)


def half_numbers(
    codes: Shaped[Array, "*experts rows outputs"], kind: WeightKind, half: int, dtype: Any = jnp.float32
) -> Num[Array, "*experts rows outputs"]:
    """`code_numbers` of the first half of each group's inputs, 0, or of the second one, 1; of others there is one."""
    if kind not in PACKED:
        return codes.astype(dtype)
    return _of_four_bits((codes >> 4 * half & 15).astype(jnp.int32), kind, dtype)


def _of_four_bits(codes: Int[Array, "..."], kind: WeightKind, dtype: Any) -> Num[Array, "..."]:
    if kind == "int4":
        return codes.astype(dtype) - 8
    # Its bits in those of a float16, whose exponent is offset by 14 more.
    bits = ((codes & 8) << 12 | (codes & 7) << 9).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(dtype) * 2**14


def dequantised(weights: Any, dtype: Any = jnp.float32) -> Float[Array | np.ndarray, "..."]:
    """The parameter that codes stand for, whole, of this type; one that is no codes as it is."""
    if not isinstance(weights, QuantisedWeights):
        return weights
    experts, (groups, outputs) = weights.codes.shape[:-2], weights.scales.shape[-2:]
    halves = code_numbers(weights.codes, weights.kind)
    halves = jnp.moveaxis(halves.reshape(*experts, halves.shape[-3], groups, -1, outputs), -4, -3)
    numbers = halves * scale_numbers(weights)[..., None, None, :]
    if weights.offsets is not None:
        numbers = numbers + weights.offsets.astype(jnp.float32)[..., None, None, :]
    order = (*range(len(experts)), *weights.axes, *weights.outputs)
    moved = numbers.astype(dtype).reshape([weights.shape[i] for i in order])
    return moved.transpose(np.argsort(order))


def output_numbers(weights: QuantisedWeights, ids: Int[Array, "*ids"], dtype: Any) -> Float[Array, "*ids inputs"]:
    """What the codes of these outputs stand for: of a head, the embeddings of tokens."""
    own = jax.tree.map(lambda x: _columns(x, ids.reshape(-1)), weights)
    rows = dequantised(replace(own, shape=(ids.size, own.inputs), axes=(1,), names=("outputs", "inputs")), dtype)
    return jnp.reshape(rows, (*ids.shape, -1))


def _columns(x: Shaped[Array, "rows outputs"], ids: Int[Array, " n"]) -> Shaped[Array, "rows n"]:
    if platform() != "tpu":
        return jnp.take(x, ids, axis=-1, mode="clip")
    # A tile of lanes after the other: a TPU would look several columns up in a copy of all, by rows.
    width = min(_LANES, x.shape[-1])

    def column(at: Int[Array, ""]) -> Shaped[Array, " rows"]:
        first = jnp.minimum(at // width * width, x.shape[-1] - width)
        tile = jax.lax.dynamic_slice_in_dim(x, first, width, axis=-1)
        return jnp.sum(jnp.where(jnp.arange(width) == at - first, tile, 0), axis=-1, dtype=x.dtype)

    return jax.lax.map(column, ids).T
