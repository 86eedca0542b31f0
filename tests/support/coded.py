"""Parameters rounded to codes of 8 bits."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.models.parameters import TensorSpec, input_axes


def in_int8(params: Any, specs: Any) -> Any:
    """The parameters, products of layers with a scale for each output."""
    return jax.tree_util.tree_map_with_path(lambda path, x, spec: _rounded(x, spec, path[-1].key), params, specs)


def _rounded(x: jax.Array, spec: TensorSpec, name: str) -> Any:
    axes = input_axes(name, spec)
    if axes is None:
        return x
    experts = int(spec.axes[0] == "experts")
    moved = jnp.moveaxis(x, axes, range(experts, experts + len(axes)))
    matrix = moved.reshape(*x.shape[:experts], math.prod(x.shape[i] for i in axes), -1)
    scales = jnp.max(jnp.abs(matrix), axis=-2, keepdims=True) / 127
    codes = jnp.round(matrix / scales).astype(jnp.int8)
    return QuantisedWeights(codes, scales, None, "int8", x.shape, axes, spec.axes)
