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
from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights, WeightKind
from clusterkv_jax.models.parameters import TensorSpec, input_axes
from clusterkv_jax.runtime.errors import shown
from clusterkv_jax.storage.digests import whole

WeightsAs = Literal["stored", "dequantised", "int8", "int4"]
# Where products with codes are not slower than those with numbers.
_KEEP_CODES = ("cpu",)
_SCALES: dict[WeightKind, Any] = {"int8": jnp.float32, "int4": jnp.float16, "mxfp4": jnp.uint8}


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

    None for a parameter that is no product's, and for what the layout cannot hold: codes whose groups are no part
    of all inputs, and numbers.
    """
    axes = input_axes(name, spec)
    if axes is None or how == "dequantised":
        return None
    kind = kind_of(name, how)
    if isinstance(parameter, CodesInOrbax):
        return parameter.read() if parameter.arrays.kind in (how, kind) or how == "stored" else None
    parts = _stored(parameter)
    if kind is not None and (parts is None or parts[0].kind not in (how, kind)):
        parts = _rounded(parameter, spec, axes, kind, moments)
    return None if parts is None else repacked(parts, spec, axes)


def kind_of(name: str, weights: str | None) -> Any:
    """Of which kind a parameter of this name is where weights are rounded so, None where they are not.

    Where layers are in int4 a head is in int8, and so is the table of embeddings that it may be, as in the files of
    others: no layer makes good what it loses.
    """
    kind = "int8" if name in ("embed", "lm_head") and weights == "int4" else weights
    return kind if kind in _SCALES else None


def code_shapes(
    spec: TensorSpec, name: str, weights: str | None, mesh: Mesh | AbstractMesh | None
) -> QuantisedWeights | None:
    """What a parameter would be in codes of this kind, in shapes with their places on a mesh.

    None where it would not be in codes. Of "mxfp4" experts alone are.
    """
    axes, experts = input_axes(name, spec), spec.shape[: int(spec.axes[:1] == ("experts",))]
    if axes is None or weights not in _SCALES or (weights == "mxfp4" and not experts):
        return None
    inputs = math.prod(spec.shape[i] for i in axes)
    outputs = math.prod(spec.shape) // inputs // math.prod(experts)
    size = {"int8": inputs, "int4": group_size(inputs), "mxfp4": 32 if inputs % 32 == 0 else None}[weights]
    if size is None:
        return None
    packed = weights in PACKED
    codes = jax.ShapeDtypeStruct((*experts, inputs // (1 + packed), outputs), jnp.uint8 if packed else jnp.int8)
    scales = jax.ShapeDtypeStruct((*experts, inputs // size, outputs), _SCALES[weights])
    offsets = scales if weights == "int4" else None
    shapes = QuantisedWeights(codes, scales, offsets, weights, spec.shape, axes, spec.axes)
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
