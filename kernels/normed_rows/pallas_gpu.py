"""Normalised rows on GPU: one launch, where XLA sums the squares of a single token in one and divides in another.

A program per row. With weights several programs have the same row, which each of them normalises for outputs of its
own: that takes less than a launch.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import DTYPES, arange, call, differentiated_by, power_of_two
from clusterkv_jax.kernels.normed_rows import reference

MOST_WIDTH = 2**15  # a row is held in registers
NUMBERS_OF_WARP = 512
OUTPUTS = 4  # of a program


def normed_rows(x, scale, weights=None, *, eps, offset, interpret=False):
    """See `clusterkv_jax.kernels.normed_rows.normed_rows`."""
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"The GPU kernel of normed_rows takes states of float types, got {x.dtype}.")
    if x.shape[1] > MOST_WIDTH or x.size == 0:
        raise NotImplementedError(f"The GPU kernel of normed_rows takes rows of up to {MOST_WIDTH}, got {x.shape}.")
    if weights is not None and weights.dtype != x.dtype:
        raise NotImplementedError(f"The GPU kernel of normed_rows takes weights of {x.dtype}, got {weights.dtype}.")
    return _run((eps, offset, interpret), x, scale, weights)


@differentiated_by(lambda options: partial(reference.normed_rows, eps=options[0], offset=options[1]))
def _run(options, x, scale, weights):
    eps, offset, interpret = options
    outputs = 1 if weights is None else len(weights)
    return call(
        partial(_kernel, eps=eps, offset=offset),
        (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            None if weights is None else jax.ShapeDtypeStruct((len(x), outputs), jnp.float32),
        ),
        *(x, scale, weights),
        grid=(len(x), pl.cdiv(outputs, OUTPUTS)),
        warps=min(16, max(1, power_of_two(x.shape[1]) // NUMBERS_OF_WARP)),
        interpret=interpret,
    )


def _kernel(x, scale, weights, normed, products, *, eps, offset):
    row, width = pl.program_id(0), x.shape[1]
    column = arange(power_of_two(width))
    inside = column < width
    first, output = pl.program_id(1) == 0, arange(OUTPUTS, pl.program_id(1) * OUTPUTS)

    def load(ref, *at):
        return plgpu.load(ref.at[(*at, column)], mask=inside, other=0.0).astype(jnp.float32)

    if weights is not None:  # read first, so that they come while the row is normalised
        there = output < weights.shape[0]
        at = weights.at[output[:, None], column[None, :]]
        weight = plgpu.load(at, mask=there[:, None] & inside[None, :], other=0.0).astype(jnp.float32)
    y = load(x, row)
    y = y * jax.lax.rsqrt(jnp.sum(y * y) / width + eps) * (offset + load(scale))
    y = y.astype(normed.dtype)
    plgpu.store(normed.at[row, column], y, mask=inside & first)
    if weights is not None:
        product = jnp.sum(weight * y.astype(jnp.float32)[None, :], axis=1)
        plgpu.store(products.at[row, output], product, mask=there)
