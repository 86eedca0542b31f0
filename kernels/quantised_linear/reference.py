"""Products with weights in codes in plain XLA: the definition.

A tile of the outputs after the other is made numbers and multiplied. On a CPU a tile stays in the caches of a core:
that is faster than reading the same weights as numbers. What XLA would make of the whole product lies in memory.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights, code_numbers, scale_numbers
from clusterkv_jax.runtime.dispatch import matmul_precision, platform

# Numbers of a tile. On accelerators a tile fills the device, and takes no more than 64 MB in 16 bits.
_IN_CACHES, _IN_MEMORY = 2**17, 2**25
_LANES = 128  # outputs at least


def quantised_linear(x: Float[Array, "n inputs"], weights: QuantisedWeights) -> Float[Array, "n outputs"]:
    """See `clusterkv_jax.kernels.quantised_linear.quantised_linear`."""
    outputs = weights.codes.shape[-1]
    tile = min(outputs, max((_IN_CACHES if platform() == "cpu" else _IN_MEMORY) // weights.inputs, _LANES))
    parts = _in_parts(x, weights)
    if tile == outputs:
        return _product(parts, weights)
    # As many outputs in each tile as go into equally many tiles; the last one begins where it ends with the outputs.
    count = -(-outputs // tile)
    tile = -(-outputs // count)

    def step(number: Array, y: Array) -> Array:
        start = jnp.minimum(number * tile, outputs - tile)
        own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, tile, axis=1), weights)
        return jax.lax.dynamic_update_slice_in_dim(y, _product(parts, own), start, axis=1)

    return jax.lax.fori_loop(0, count, step, jnp.zeros((x.shape[0], outputs), jnp.float32))


def _in_parts(x: Float[Array, "n inputs"], weights: QuantisedWeights) -> list[Float[Array, "n part"]]:
    """The columns of x that go with each of `code_numbers`."""
    if weights.kind not in PACKED:
        return [x]
    halves = x.reshape(x.shape[0], weights.scales.shape[-2], 2, -1)
    return [halves[:, :, i].reshape(x.shape[0], -1) for i in (0, 1)]


def _product(parts: list[Float[Array, "n part"]], weights: QuantisedWeights) -> Float[Array, "n tile"]:
    groups, tile = weights.scales.shape
    scales, numbers = scale_numbers(weights), code_numbers(weights.codes, weights.kind)
    offsets = None if weights.offsets is None else weights.offsets.astype(jnp.float32)

    def every(of_groups: Array, rows: int) -> Array:
        return jnp.broadcast_to(of_groups[:, None], (groups, rows // groups, tile)).reshape(rows, tile)

    def product(x: Array, w: Array) -> Array:
        options = {"precision": matmul_precision(x.dtype), "preferred_element_type": jnp.float32}
        return jnp.matmul(x, w.astype(x.dtype), **options)

    if groups == 1:
        y = sum(product(x, w) for x, w in zip(parts, numbers, strict=True)) * scales
        return (
            y if offsets is None else y + sum(jnp.sum(x, axis=1, dtype=jnp.float32) for x in parts)[:, None] * offsets
        )
    numbers = [w * every(scales, len(w)) for w in numbers]
    if offsets is not None:
        numbers = [w + every(offsets, len(w)) for w in numbers]
    return sum(product(x, w) for x, w in zip(parts, numbers, strict=True))
