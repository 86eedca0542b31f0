"""A product in parts on GPU: one launch, where XLA pads the token to more rows, multiplies, and adds parts of its own.

    grid (blocks of outputs, parts)   a program: one part of the inputs

Bytes: the weights, once; 4 per output and part. Bound: reads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import DTYPES, arange, call, dot, only_row, shared_memory, whole_block
from clusterkv_jax.kernels.split_product import reference

LEAST = 16  # inputs and outputs of a block, as the matrix unit wants
SIZES = {"block": 64, "depth": 128, "warps": 2, "stages": 4}


def split_product(x, weights, *, parts, sizes=None, interpret=False):
    """See `clusterkv_jax.kernels.split_product.split_product`.

    `sizes` go before SIZES: outputs of a program, inputs at a time, warps and `stages`, blocks on their way at once.
    """
    if x.dtype not in DTYPES or weights.dtype != x.dtype:
        raise NotImplementedError(
            f"The GPU kernel of split_product takes one float type, got {x.dtype} and {weights.dtype}."
        )
    inputs, outputs = weights.shape
    options = SIZES | dict(sizes or {})
    block, depth = whole_block(options["block"], outputs), whole_block(options["depth"], inputs // parts)
    # A block of weights for each stage, and the token's inputs beside them.
    room = shared_memory() // (depth * (block + LEAST) * x.dtype.itemsize)
    options |= {"block": block, "depth": depth, "stages": max(1, min(options["stages"], room))}
    if min(options["block"], options["depth"]) < LEAST:
        raise NotImplementedError(
            f"The GPU kernel of split_product takes outputs and parts in blocks of {LEAST}, got {outputs} and {parts} "
            f"parts of {inputs}."
        )
    return _run((parts, tuple(sorted(options.items())), interpret), x, weights)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, x, weights):
    parts, sizes, interpret = options
    sizes, outputs = dict(sizes), weights.shape[1]
    return call(
        partial(_kernel, block=sizes["block"], depth=sizes["depth"], parts=parts),
        jax.ShapeDtypeStruct((parts, outputs), jnp.float32),
        x,
        weights,
        grid=(outputs // sizes["block"], parts),
        warps=sizes["warps"],
        stages=sizes["stages"],
        interpret=interpret,
    )


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""
    return _run(options, *operands), jax.jvp(partial(reference.split_product, parts=options[0]), operands, tangents)[1]


def _kernel(x, weights, out, *, block, depth, parts):
    part, columns = pl.program_id(1), arange(block, pl.program_id(0) * block)
    inputs = x.shape[0] // parts

    def body(i, total):
        row = arange(depth, part * inputs + i * depth)
        return total + dot(only_row(plgpu.load(x.at[row])), plgpu.load(weights.at[row[:, None], columns[None, :]]))

    total = jax.lax.fori_loop(0, inputs // depth, body, only_row(jnp.zeros((block,), jnp.float32)))
    plgpu.store(out.at[part, columns], jnp.sum(total, axis=0))
