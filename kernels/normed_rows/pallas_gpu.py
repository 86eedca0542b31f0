"""Normalised rows on GPU: one launch, where XLA sums the squares of a single token in one and divides in another.

A program per row.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import DTYPES, arange, call, power_of_two
from clusterkv_jax.kernels.normed_rows import reference

MOST_WIDTH = 2**15  # a row is held in registers
NUMBERS_OF_WARP = 512


def normed_rows(x, added, scale, *, eps, offset, rows, interpret=False):
    """See `clusterkv_jax.kernels.normed_rows.normed_rows`."""
    if x.dtype not in DTYPES or (added is not None and added.dtype != x.dtype):
        raise NotImplementedError(f"The GPU kernel of normed_rows takes states of one float type, got {x.dtype}.")
    if x.shape[1] > MOST_WIDTH or x.size == 0:
        raise NotImplementedError(f"The GPU kernel of normed_rows takes rows of up to {MOST_WIDTH}, got {x.shape}.")
    total, normed = _run((eps, offset, rows, interpret), x, added, scale)
    return x if added is None else total, normed


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, x, added, scale):
    eps, offset, rows, interpret = options
    return call(
        partial(_kernel, eps=eps, offset=offset),
        (
            None if added is None else jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype),
        ),
        x,
        added,
        scale,
        grid=(rows,),
        warps=min(16, max(1, power_of_two(x.shape[1]) // NUMBERS_OF_WARP)),
        interpret=interpret,
    )


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""
    eps, offset, rows, _ = options

    def definition(x, added, scale):
        total, normed = reference.normed_rows(x, added, scale, eps=eps, offset=offset, rows=rows)
        return None if added is None else total, normed

    return _run(options, *operands), jax.jvp(definition, operands, tangents)[1]


def _kernel(x, added, scale, total, normed, *, eps, offset):
    row, width = pl.program_id(0), x.shape[1]
    column = arange(power_of_two(width))
    inside = column < width

    @pl.when(row < x.shape[0])
    def _():
        load = lambda ref, *at: plgpu.load(ref.at[(*at, column)], mask=inside, other=0.0).astype(jnp.float32)  # noqa: E731
        y = load(x, row)
        if added is not None:
            y = (y + load(added, row)).astype(x.dtype)
            plgpu.store(total.at[row, column], y, mask=inside)
            y = y.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.sum(y * y) / width + eps) * (offset + load(scale))
        plgpu.store(normed.at[row, column], y.astype(normed.dtype), mask=inside)

    @pl.when(row >= x.shape[0])
    def _():
        plgpu.store(normed.at[row, column], jnp.zeros_like(column, normed.dtype), mask=inside)
