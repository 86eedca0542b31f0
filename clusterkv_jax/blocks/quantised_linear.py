"""`linear` of weights in codes, each device of a mesh with its own part of them."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from clusterkv_jax.kernels.quantised_linear import quantised_linear
from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights
from clusterkv_jax.runtime.sharding import ambient_mesh, partition

Axes = tuple[str, ...]


def partitions(weights: QuantisedWeights, mesh: Any) -> QuantisedWeights:
    """The PartitionSpec of each array of these weights: devices share what they would share of the parameter.

    Inputs stay whole where a group of them would lie on two devices.
    """
    return _placed(weights, *_shared(weights, mesh))


def linear_of_codes(
    x: Float[Array, "*inputs"], *weights: QuantisedWeights, dtype: Any
) -> list[Float[Array, "*outputs"]]:
    """x [*tokens, *inputs] times each of these weights of one matrix: [*tokens, *outputs], in this type."""
    tokens, mesh = x.shape[: x.ndim - len(weights[0].axes)], ambient_mesh()
    rows = x.reshape(*tokens, -1)
    if mesh is None or mesh.size == 1 or mesh.manual_axes:  # within a shard_map, codes are a device's own
        found = _products(rows, *weights, dtype=dtype)
    else:
        found = [_on_mesh(rows, own, mesh, dtype) for own in weights]
    shapes = [[own.shape[i] for i in own.outputs] for own in weights]
    return [y.reshape(*tokens, *outputs) for y, outputs in zip(found, shapes, strict=True)]


def _on_mesh(
    rows: Float[Array, "*tokens inputs"], weights: QuantisedWeights, mesh: Any, dtype: Any
) -> Float[Array, "*outputs"]:
    tokens = rows.shape[:-1]
    names = ("batch", "tokens")[: len(tokens)] + (None,) * (len(tokens) - 2)
    spread = partition(names, tokens, mesh)
    taken = jax.tree.leaves(tuple(spread))
    inner, outer = (tuple(axis for axis in axes if axis not in taken) for axes in _shared(weights, mesh))

    def local(rows: Array, weights: QuantisedWeights) -> Array:
        (y,) = _products(rows, weights, dtype=jnp.float32 if inner else dtype)
        return jax.lax.psum(y, inner).astype(dtype) if inner else y

    specs = PartitionSpec(*spread, inner or None), _placed(weights, inner, outer)
    result = PartitionSpec(*spread, outer or None)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=result, check_vma=False)(rows, weights)


def _products(
    rows: Float[Array, "*tokens inputs"], *weights: QuantisedWeights, dtype: Any
) -> list[Float[Array, "*tokens outputs"]]:
    flat = quantised_linear(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]), *weights, dtype=dtype)
    return [y.reshape(*rows.shape[:-1], y.shape[-1]) for y in flat]


def _shared(weights: QuantisedWeights, mesh: Any) -> tuple[Axes, Axes]:
    """The axes of the mesh that share the inputs, and those that share the outputs."""
    spec = partition(weights.names, weights.shape, mesh)
    inner = tuple(jax.tree.leaves(spec[weights.axes[0]]))
    outer = tuple(jax.tree.leaves([spec[i] for i in weights.outputs]))
    groups = weights.scales.shape[-2]
    # A scale of all inputs is no group but where a byte has two of them.
    whole = (groups > 1 or weights.kind in PACKED) and groups % math.prod(mesh.shape[axis] for axis in inner)
    return () if whole else inner, outer


def _placed(weights: QuantisedWeights, inner: Axes, outer: Axes) -> QuantisedWeights:
    experts = (None,) * (len(weights.codes.shape) - 2)
    codes = PartitionSpec(*experts, inner or None, outer or None)
    scales = PartitionSpec(*experts, (inner if weights.scales.shape[-2] > 1 else ()) or None, outer or None)
    return replace(weights, codes=codes, scales=scales, offsets=None if weights.offsets is None else scales)
