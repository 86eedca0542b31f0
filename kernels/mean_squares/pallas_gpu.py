"""Mean squared lengths on GPU: a program per block of the list adds up its rows, and XLA the blocks.

Bytes: the listed rows once. XLA would read all rows, listed or not, which late rounds of clustering have few of.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, load_rows, power_of_two
from clusterkv_jax.kernels.mean_squares.reference import mean_of

BLOCK = 128  # rows of a program


def mean_squares(rows, index, length, *, interpret=False):
    """See `clusterkv_jax.kernels.mean_squares.mean_squares`."""
    check_dtypes("mean_squares", rows)
    batch, heads, slots, width = rows.shape
    listed = index.shape[2]
    if listed == 0:
        return jnp.ones((batch, heads), jnp.float32)
    sums = call(
        partial(_kernel, width=width),
        jax.ShapeDtypeStruct((batch * heads, pl.cdiv(listed, BLOCK)), jnp.float32),
        rows.reshape(batch * heads, slots, width),
        index.reshape(batch * heads, listed),
        length.reshape(-1),
        grid=(pl.cdiv(listed, BLOCK), batch * heads),
        warps=4,
        interpret=interpret,
    )
    return mean_of(jnp.sum(sums, axis=1).reshape(batch, heads), length)


def _kernel(rows, index, length, sums, *, width):
    block, head = pl.program_id(0), pl.program_id(1)
    number = block * BLOCK + arange(BLOCK)
    inside = number < jnp.minimum(length[head], index.shape[1])
    at = plgpu.load(index.at[head, number], mask=inside, other=0)
    x = load_rows(rows, head, at, arange(power_of_two(width, 16)), inside, width).astype(jnp.float32)
    sums[head, block] = jnp.sum(x * x)
