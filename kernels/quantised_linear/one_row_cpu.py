"""One row times weights in codes on a CPU: codes become numbers in registers, and are multiplied there.

The sum over a few inputs is written out, for all outputs at once: of that LLVM makes vectors of neighbouring outputs,
which it does not of a reduction over inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights, scale_numbers
from clusterkv_jax.runtime.dispatch import LeftToXLA

_ROWS = 8  # of codes, in a sum that is written out: with more of them programs compile longer, and are not faster


def quantised_linear(
    x: Float[Array, "n inputs"], *weights: QuantisedWeights, dtype: Any = jnp.float32
) -> list[Float[Array, "n outputs"]]:
    """See `clusterkv_jax.kernels.quantised_linear.quantised_linear`.

    Raises:
        LeftToXLA: for more than one row, for floats in codes, and for groups of another number of inputs.
    """
    if x.shape[0] != 1:
        raise LeftToXLA(f"Products on a CPU take one row, got {x.shape[0]}.")
    for own in weights:
        if own.kind not in ("int8", "int4") or _rows_of_a_group(own) % _ROWS:
            raise LeftToXLA(
                f"Products on a CPU take int8 and int4 in groups of {_ROWS} rows of codes or a multiple, got "
                f"{own.kind} and {_rows_of_a_group(own)}."
            )
    return [_of_one(x, own).astype(dtype) for own in weights]


def _of_one(x: Float[Array, "1 inputs"], weights: QuantisedWeights) -> Float[Array, "1 outputs"]:
    # Each call reads the codes: XLA would take what it makes of them out of a loop over tokens, and hold it.
    x, weights = jax.lax.optimization_barrier((x.astype(jnp.float32), weights))
    (groups, outputs), halves = weights.scales.shape, 2 if weights.kind in PACKED else 1
    codes = weights.codes.reshape(groups, -1, _ROWS, outputs)
    # The inputs of each row of codes: [groups, halves, sums, rows].
    inputs = x.reshape(groups, halves, -1, _ROWS)
    totals = jnp.sum(inputs, axis=(1, 3))[:, :, None]
    sums = jnp.zeros((groups, codes.shape[1], outputs), jnp.float32)
    for row in range(_ROWS):
        numbers, low = codes[:, :, row].astype(jnp.float32), inputs[:, 0, :, row, None]
        sums += low * numbers
        if halves == 2:  # a byte is its low code and 16 times its high one
            sums += (inputs[:, 1, :, row, None] - 16 * low) * jnp.floor(numbers / 16)
    if weights.kind == "int4":
        sums -= 8 * totals
    sums *= scale_numbers(weights)[:, None]
    if weights.offsets is not None:
        sums += totals * weights.offsets.astype(jnp.float32)[:, None]
    # As a product: XLA would write a sum over all of them into the loop above, which then has no vectors.
    ones = jnp.ones((1, sums.shape[0] * sums.shape[1]), jnp.float32)
    return jnp.matmul(ones, sums.reshape(-1, outputs), precision="highest")


def _rows_of_a_group(weights: QuantisedWeights) -> int:
    return weights.codes.shape[-2] // weights.scales.shape[-2]
