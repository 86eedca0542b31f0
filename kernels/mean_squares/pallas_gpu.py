"""Mean squared lengths on GPU: a program per block of the list adds up its rows, and XLA the blocks.

Bytes: the listed rows once. XLA would read all rows, listed or not, which late rounds of clustering have few of.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, load_numbers, power_of_two
from clusterkv_jax.kernels.mean_squares.reference import mean_of
from clusterkv_jax.kernels.quantised import as_array

BLOCK = 64  # rows of a program


def mean_squares(rows, index, length, *, interpret=False):
    """See `clusterkv_jax.kernels.mean_squares.mean_squares`."""
    check_dtypes("mean_squares", rows)
    batch, heads, listed = index.shape
    flat = lambda x: x.reshape(batch * heads, *x.shape[2:])  # noqa: E731
    if listed == 0:
        return jnp.ones((batch, heads), jnp.float32)
    sums = call(
        _kernel,
        jax.ShapeDtypeStruct((batch * heads, pl.cdiv(listed, BLOCK)), jnp.float32),
        jax.tree.map(flat, rows),
        flat(index),
        length.reshape(-1),
        grid=(pl.cdiv(listed, BLOCK), batch * heads),
        warps=4,
        interpret=interpret,
    )
    return mean_of(jnp.sum(sums, axis=1).reshape(batch, heads), length)


def _kernel(rows, index, length, sums):
    width = as_array(rows).shape[2]
    block, head = pl.program_id(0), pl.program_id(1)
    number = block * BLOCK + arange(BLOCK)
    inside = number < jnp.minimum(length[head], index.shape[1])
    sums[head, block] = 0.0

    @pl.when(block * BLOCK < length[head])
    def _():
        at = plgpu.load(index.at[head, number], mask=inside, other=0)
        parts = load_numbers(rows, head, at, arange(power_of_two(width, 16)), inside)
        sums[head, block] = jnp.sum(sum(jnp.sum(part * part, axis=1) for part in parts))
