"""Products with weights in codes on TPU, in plain XLA: codes become numbers within the launch that multiplies them.

Half of a group's inputs after the other, since XLA brings both halves of a byte into memory as numbers of 32 bits
before it multiplies them. A half is converted, scaled and multiplied by one fusion, in the type of the rows: scaled in
float32, numbers would lie in memory.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights, half_numbers, scale_numbers
from clusterkv_jax.runtime.dispatch import matmul_precision


def quantised_linear(
    x: Float[Array, "n inputs"], *weights: QuantisedWeights, dtype: Any = jnp.float32
) -> list[Float[Array, "n outputs"]]:
    """See `clusterkv_jax.kernels.quantised_linear.quantised_linear`."""
    return [_product(x, own).astype(dtype) for own in weights]


def _product(x: Float[Array, "n inputs"], weights: QuantisedWeights) -> Float[Array, "n outputs"]:
    groups, outputs = weights.scales.shape
    scales, halves = scale_numbers(weights), 2 if weights.kind in PACKED else 1
    by_group = x.reshape(len(x), groups, halves, -1)
    total = jnp.zeros((len(x), outputs), jnp.float32)
    for half in range(halves):
        numbers = half_numbers(weights.codes, weights.kind, half, x.dtype)
        if groups > 1:
            numbers = (numbers.reshape(groups, -1, outputs) * scales[:, None].astype(x.dtype)).reshape(-1, outputs)
        rows = by_group[:, :, half].reshape(len(x), -1)
        options = {"precision": matmul_precision(x.dtype), "preferred_element_type": jnp.float32}
        total = total + jnp.matmul(rows, numbers, **options)
    total = total if groups > 1 else total * scales
    if weights.offsets is None:
        return total
    sums = jnp.sum(by_group, axis=(2, 3), dtype=jnp.float32)
    return total + jnp.matmul(sums, weights.offsets.astype(jnp.float32), precision=matmul_precision(jnp.float32))
