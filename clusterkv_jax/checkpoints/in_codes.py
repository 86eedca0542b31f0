"""Which parameters of a checkpoint stay in codes, and their way onto the devices."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from clusterkv_jax.blocks.quantised_linear import partitions
from clusterkv_jax.checkpoints.orbax import CodesInOrbax
from clusterkv_jax.checkpoints.repack import Coded, group_size, is_finite, repacked
from clusterkv_jax.checkpoints.rounding import rounded
from clusterkv_jax.checkpoints.safetensors import CodedTensor, InFile, StackInFiles
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.models.parameters import TensorSpec, input_axes
from clusterkv_jax.runtime.errors import shown
from clusterkv_jax.storage.digests import whole

WeightsAs = Literal["stored", "dequantised", "int8", "int4"]
# Where products with codes are not slower than those with numbers.
_KEEP_CODES = ("cpu",)


def weights_as(weights: Any, platform: str) -> WeightsAs:
    """How weights are held on devices of this platform. Raises ValueError for what is no `WeightsAs` or None."""
    if weights is None:
        return "stored" if platform in _KEEP_CODES else "dequantised"
    if weights not in get_args(WeightsAs):
        allowed = ", ".join(map(repr, get_args(WeightsAs)))
        raise ValueError(f"weights must be one of {allowed}, or None, got {shown(weights)}.")
    return weights


def in_codes(
    parameter: Any, spec: TensorSpec, name: str, how: WeightsAs, moments: np.ndarray | None = None
) -> QuantisedWeights | None:
    """A parameter in codes, on the host: those of its file, or its numbers rounded, by `moments` where there are such.
    Codes of the kind that is wanted are not rounded again.

    None for a parameter that is no layer's product, and for what the layout cannot hold: codes whose groups are no part
    of all inputs, and numbers.
    """
    axes = input_axes(name, spec)
    if axes is None or how == "dequantised":
        return None
    if isinstance(parameter, CodesInOrbax):
        return parameter.read() if how in ("stored", parameter.arrays.kind) else None
    parts = _stored(parameter)
    if how != "stored" and (parts is None or parts[0].kind != how):
        parts = _rounded(parameter, spec, axes, how, moments)
    return None if parts is None else repacked(parts, spec, axes)


def code_shapes(
    spec: TensorSpec, name: str, weights: str | None, mesh: Mesh | AbstractMesh | None
) -> QuantisedWeights | None:
    """What a parameter rounded to "int8" or "int4" codes would be, in shapes with their places on a mesh.

    None where it would not be in codes.
    """
    axes = input_axes(name, spec)
    if axes is None or weights not in ("int8", "int4"):
        return None
    experts = spec.shape[: int(spec.axes[:1] == ("experts",))]
    inputs = math.prod(spec.shape[i] for i in axes)
    outputs = math.prod(spec.shape) // inputs // math.prod(experts)
    size = inputs if weights == "int8" else group_size(inputs)
    if size is None:
        return None
    packed = weights == "int4"
    codes = jax.ShapeDtypeStruct((*experts, inputs // (1 + packed), outputs), jnp.uint8 if packed else jnp.int8)
    scales = jax.ShapeDtypeStruct((*experts, inputs // size, outputs), jnp.float16 if packed else jnp.float32)
    shapes = QuantisedWeights(codes, scales, scales if packed else None, weights, spec.shape, axes, spec.axes)
    if mesh is None:
        return shapes
    places = jax.tree.map(partial(NamedSharding, mesh), partitions(shapes, mesh))
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)


def with_groups(shapes: QuantisedWeights, groups: int, *, offsets: bool) -> QuantisedWeights:
    """Shapes of codes that have so many groups, with offsets or without; the same where these cannot be."""
    if groups != shapes.scales.shape[-2] and (groups < 1 or shapes.inputs % (2 * groups)):
        return shapes
    scales = jax.ShapeDtypeStruct((*shapes.scales.shape[:-2], groups, shapes.scales.shape[-1]), shapes.scales.dtype)
    return replace(shapes, scales=scales, offsets=scales if offsets else None)


def on_devices(weights: QuantisedWeights, mesh: Mesh | None) -> QuantisedWeights:
    """Codes from the host, each device its own part."""
    if mesh is None:
        return jax.tree.map(lambda x: jax.device_put(x).block_until_ready(), weights)
    specs = partitions(weights, mesh)

    def place(x: np.ndarray, spec: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    offsets = None if weights.offsets is None else place(weights.offsets, specs.offsets)
    return replace(
        weights, codes=place(weights.codes, specs.codes), scales=place(weights.scales, specs.scales), offsets=offsets
    )


def _stored(parameter: Any) -> list[Coded] | None:
    """Codes of a file, of each expert's tensor, or None if one of these has none."""
    parts = parameter.parts if isinstance(parameter, StackInFiles) else (parameter,)
    found = []
    for part in parts:
        if not isinstance(part, InFile) or not isinstance(part.entry, CodedTensor):
            return None
        coded = part.entry.coded(part.place.numbers(np.arange(part.place.rows[0])))
        if coded is None or not is_finite(coded):  # who reads its numbers says what they are
            return None
        found.append(coded)
    return found if len({(part.kind, part.scales.dtype, part.offsets is None) for part in found}) == 1 else None


def _rounded(
    parameter: Any,
    spec: TensorSpec,
    axes: tuple[int, ...],
    kind: Literal["int8", "int4"],
    moments: np.ndarray | None,
) -> list[Coded] | None:
    view = parameter.view()
    experts = range(spec.shape[0]) if spec.axes[0] == "experts" else [None]
    found = [rounded(_matrix(view, spec, axes, expert), kind, moments) for expert in experts]
    return None if any(part is None for part in found) else [part for part in found if part is not None]


def _matrix(view: Any, spec: TensorSpec, axes: tuple[int, ...], expert: int | None) -> np.ndarray:
    """The numbers of a parameter, or of one expert, as [outputs, inputs]."""
    index = whole(spec.shape)
    if expert is not None:
        index = (slice(expert, expert + 1), *index[1:])
    numbers = np.asarray(view[index].astype(np.float32))
    others = [i for i in range(len(spec.shape)) if i not in axes]
    inputs = int(np.prod([spec.shape[i] for i in axes]))
    return numbers.transpose(*others, *axes).reshape(-1, inputs)
