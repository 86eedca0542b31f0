"""Products of few rows on GPU: one launch, where XLA splits the inputs, and adds up or gates in another.

    grid (blocks of outputs)   a program: all inputs

Bytes: the weights, once. Bound: reads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.few_rows import check_rows, fitted, products, tile_of_rows
from clusterkv_jax.kernels.gpu import arange, call, differentiated_by
from clusterkv_jax.kernels.row_products import reference

# Outputs of a program, inputs at a time, warps, and blocks of weights on their way at once.
SIZES = {"block": 32, "depth": 128, "warps": 4, "stages": 6}
NARROW_SIZES = {"block": 16, "depth": 256, "warps": 2, "stages": 6}
GATE_SIZES = {"block": 64, "depth": 64, "warps": 4, "stages": 4}
# A program that has a multiprocessor alone has room for twice the weights on their way.
LONE_GATE_SIZES = {"block": 64, "depth": 128, "warps": 2, "stages": 4}
LEAST_PROGRAMS = 128  # fewer leave multiprocessors without work


def row_products(x, weights, onto=None, gated=None, *, gate=None, share=1.0, sizes=None, interpret=False):
    """See `clusterkv_jax.kernels.row_products.row_products`.

    `sizes` go before those of the kernel.
    """
    inputs, outputs = weights.shape
    check_rows("row_products", x, weights, *([] if gated is None else [gated]))
    many, few = (GATE_SIZES, LONE_GATE_SIZES) if gate else (SIZES, NARROW_SIZES)
    options = (few if outputs // many["block"] < LEAST_PROGRAMS else many) | dict(sizes or {})
    options = fitted("row_products", options, inputs, [outputs], tiles=2 if gate else 1)
    return _run((gate, share, tuple(options.items()), interpret), x, weights, onto, gated)


@differentiated_by(lambda options: partial(reference.row_products, gate=options[0], share=options[1]))
def _run(options, x, weights, onto, gated):
    gate, share, sizes, interpret = options
    sizes, outputs = dict(sizes), weights.shape[1]
    return call(
        partial(_kernel, **{name: sizes[name] for name in ("block", "depth", "sums")}, gate=gate, share=share),
        jax.ShapeDtypeStruct((len(x), outputs), x.dtype),
        x,
        weights,
        onto,
        gated,
        grid=(outputs // sizes["block"],),
        warps=sizes["warps"],
        stages=sizes["stages"],
        interpret=interpret,
    )


def _kernel(x, weights, onto, gated, out, *, block, depth, sums, gate, share):
    column = arange(block, pl.program_id(0) * block)[None, :]
    sides = [weights] if gate is None else [weights, gated]
    row, there = tile_of_rows(x)
    # Read first: it comes while the weights do.
    more = None if onto is None else plgpu.load(onto.at[row, column], mask=there, other=0.0).astype(jnp.float32)

    def tiles(at):
        return [plgpu.load(side.at[at[:, None], column]) for side in sides]

    y, *other = products(x, tiles, block=block, count=len(sides), depth=depth, sums=sums, contract=(1, 0))
    if gate is not None:
        y = reference.GATES[gate](y) * other[0]
    if more is not None:
        y += share * more
    plgpu.store(out.at[row, column], y.astype(out.dtype), mask=there)
