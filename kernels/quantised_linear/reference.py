"""Products with weights in codes in plain XLA: the definition.

A tile of the outputs after the other is made numbers and multiplied. On a CPU a tile stays in the caches of a core:
that is faster than reading the same weights as numbers. What XLA would make of the whole product lies in memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights, code_numbers, scale_numbers
from clusterkv_jax.runtime.dispatch import matmul_precision, platform

# Numbers of a tile. For few rows a CPU core has it in its cache, for many the product matters alone. On accelerators
# it fills the device, and takes no more than 64 MB in 16 bits.
_FEW, _OF_FEW, _OF_MANY, _ON_ACCELERATORS = 16, 2**16, 2**20, 2**25
_LANES = 128  # outputs at least


def quantised_linear(
    x: Float[Array, "n inputs"], *weights: QuantisedWeights, dtype: Any = jnp.float32
) -> list[Float[Array, "n outputs"]]:
    """See `clusterkv_jax.kernels.quantised_linear.quantised_linear`."""
    return [_of_one(x, own).astype(dtype) for own in weights]


def quantised_experts(
    x: Float[Array, "n inputs"], owners: Int[Array, " R"], *weights: QuantisedWeights
) -> list[Float[Array, "R outputs"]]:
    """See `clusterkv_jax.kernels.quantised_linear.quantised_experts`."""
    each = len(owners) // len(x)

    def row(number: Array) -> list[Array]:
        own = jax.lax.dynamic_slice_in_dim(x, number // each, 1)
        return [y[0] for y in quantised_linear(own, *(weight[owners[number]] for weight in weights))]

    return jax.lax.map(row, jnp.arange(len(owners)))


def _of_one(x: Float[Array, "n inputs"], weights: QuantisedWeights) -> Float[Array, "n outputs"]:
    outputs = weights.codes.shape[-1]
    size = _ON_ACCELERATORS if platform() != "cpu" else _OF_FEW if x.shape[0] <= _FEW else _OF_MANY
    most = max(size // weights.inputs, _LANES)
    # Equal tiles; the last one begins where it ends with the outputs.
    count = -(-outputs // most)
    tile = -(-outputs // count)
    x = _in_order_of_codes(x, weights)
    if count == 1:
        return _product(x, weights)

    def step(number: Array, y: Array) -> Array:
        start = jnp.minimum(number * tile, outputs - tile)
        own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, tile, axis=1), weights)
        return jax.lax.dynamic_update_slice_in_dim(y, _product(x, own), start, axis=1)

    # Numbers without a sign: no index is below 0, which would have to be looked at.
    first, last = jnp.uint32(0), jnp.uint32(count)
    return jax.lax.fori_loop(first, last, step, jnp.zeros((x.shape[0], outputs), jnp.float32))


def _in_order_of_codes(x: Float[Array, "n inputs"], weights: QuantisedWeights) -> Float[Array, "n inputs"]:
    """The columns of x in the order of `code_numbers`: the first halves of all groups before the second."""
    if weights.kind not in PACKED:
        return x
    return x.reshape(x.shape[0], weights.scales.shape[-2], 2, -1).swapaxes(1, 2).reshape(x.shape)


def _product(x: Float[Array, "n inputs"], weights: QuantisedWeights) -> Float[Array, "n tile"]:
    (groups, tile), inputs = weights.scales.shape, weights.inputs
    scales, numbers = scale_numbers(weights), code_numbers(weights.codes, weights.kind)
    offsets = None if weights.offsets is None else weights.offsets.astype(jnp.float32)
    options = {"precision": matmul_precision(x.dtype), "preferred_element_type": jnp.float32}
    if groups == 1:  # of all inputs: after the product
        y = jnp.matmul(x, numbers.reshape(inputs, tile).astype(x.dtype), **options) * scales
        return y if offsets is None else y + jnp.sum(x, axis=1, keepdims=True, dtype=jnp.float32) * offsets
    numbers = numbers.reshape(len(numbers), groups, -1, tile) * scales[None, :, None]
    if offsets is not None:
        numbers = numbers + offsets[None, :, None]
    return jnp.matmul(x, numbers.reshape(inputs, tile).astype(x.dtype), **options)
