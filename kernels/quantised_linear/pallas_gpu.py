"""Products of few rows with weights in codes on GPU: one launch for all weights that rows are multiplied with.

    grid (blocks of the outputs of all weights, splits of the inputs)   a program: a split of the inputs of a block

Bytes: codes and scales, once. Bound: reads, of which a program keeps several steps on their way, scales too. Rows of a
block are whole lines of memory. Codes are the first operand of the matrix unit, which takes 16 outputs and 8 tokens at
once: half of the products and sums that tiles of 16 tokens would take.

What codes stand for is multiplied before any scale, exactly: a group's products are scaled in float32, an instruction
for 16 numbers of 128. Splits of the inputs are added up in XLA, which joins that to what follows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.few_rows import ROWS
from clusterkv_jax.kernels.gpu import arange, call, dot, power_of_two, shared_memory, whole_block
from clusterkv_jax.kernels.quantised_linear import reference
from clusterkv_jax.kernels.quantised_linear.unpack_gpu import (
    BIAS,
    numbers,
    numbers_of_pair,
    pair,
    pair_words,
    passed_on,
    words,
)
from clusterkv_jax.kernels.weight_codes import PACKED
from clusterkv_jax.runtime.dispatch import LeftToXLA

# Outputs of a program, rows of codes of a tile where no group says so, those of a step, warps, and steps on their way.
SIZES = {"block": 128, "depth": 64, "step": 64, "warps": 4, "stages": 4}
AHEAD = 4  # steps whose scales are on their way
LEAST = 16  # rows of a tile, words of two outputs of a warp, as the matrix unit wants
TOKENS = 8  # of a tile at least, as it wants too
MOST_DEPTH = 256  # rows of a group, which are multiplied at once
LEAST_PROGRAMS = 256  # fewer leave multiprocessors with a program at a time, which waits
MOST_SPLITS = 16


def quantised_linear(x, *weights, sizes=None, interpret=False):
    """See `clusterkv_jax.kernels.quantised_linear.quantised_linear`.

    `sizes` go before those of the kernel.
    """
    if len(x) > ROWS:
        raise LeftToXLA(f"The GPU kernel of quantised_linear takes up to {ROWS} rows, got {len(x)}.")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"The GPU kernel of quantised_linear takes rows of bfloat16, got {x.dtype}.")
    tiles, launch = fitted(weights, sizes or {})
    return _run((tiles, tuple(launch.items()), interpret), x, weights)


def fitted(weights, sizes):
    """Outputs, rows and tiles of a step of each of these weights, whose blocks divide them; and what all share.

    `splits` of the inputs fill the device, and `stages` of steps have room.
    """
    sizes = SIZES | sizes
    blocks = [_block(own, sizes) for own in weights]
    programs = sum(own.codes.shape[1] // block for own, (block, _) in zip(weights, blocks, strict=True))
    splits = sizes.get("splits", min(MOST_SPLITS, power_of_two(pl.cdiv(LEAST_PROGRAMS, programs))))
    splits = min(whole_block(splits, len(own.codes) // depth) for own, (_, depth) in zip(weights, blocks, strict=True))
    tiles, stages = [], sizes["stages"]
    for own, (block, depth) in zip(weights, blocks, strict=True):
        count = whole_block(max(1, sizes["step"] // depth), len(own.codes) // depth // splits)
        tiles.append((block, depth, count))
        halves = 2 if own.kind in PACKED else 1
        stages = max(1, min(stages, shared_memory() // (count * depth * (block + 2 * ROWS * halves))))
    warps = min(sizes["warps"], *(block // (2 * LEAST) for block, _ in blocks))
    return tuple(tiles), {"splits": splits, "warps": warps, "stages": stages}


def _block(weights, sizes):
    """Outputs of a program, and rows of codes of a tile: those of a group, whose products have one scale."""
    (rows, outputs), groups = weights.codes.shape, weights.scales.shape[0]
    block = whole_block(sizes["block"], outputs)
    depth = whole_block(sizes["depth"], rows) if groups == 1 else rows // groups
    if min(block // 2, depth) < LEAST or depth & (depth - 1) or depth > MOST_DEPTH:
        raise NotImplementedError(
            f"The GPU kernel of quantised_linear takes outputs in blocks of {2 * LEAST} and groups of {LEAST} to "
            f"{MOST_DEPTH} rows of codes, a power of two, got {outputs} and {depth}."
        )
    return block, depth


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, x, weights):
    tiles, launch, interpret = options[0], dict(options[1]), options[2]
    outputs, splits = [own.codes.shape[1] for own in weights], launch["splits"]
    parts = call(
        partial(_kernel, stored=tuple((own.kind, own.scales.dtype) for own in weights), tiles=tiles, splits=splits),
        [jax.ShapeDtypeStruct((splits, len(x), width), jnp.float32) for width in outputs],
        *(x, [(words(own), pair_words(own.scales), pair_words(own.offsets)) for own in weights]),
        grid=(sum(width // block for width, (block, *_) in zip(outputs, tiles, strict=True)), splits),
        warps=launch["warps"],
        stages=launch["stages"],
        interpret=interpret,
    )
    return [jnp.sum(part, axis=0) for part in parts]


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""

    def definition(x, weights):
        return reference.quantised_linear(x, *weights)

    return _run(options, *operands), jax.jvp(definition, operands, tangents)[1]


def _kernel(x, weights, *outs, stored, tiles, splits):
    program, split = pl.program_id(0), pl.program_id(1)
    for own, out, types, sizes in zip(weights, outs, stored, tiles, strict=True):
        programs = out.shape[-1] // sizes[0]

        @pl.when((program >= 0) & (program < programs))
        def _(own=own, out=out, types=types, sizes=sizes, number=program):
            _outputs(x, own, out, (number, split), types, sizes, splits)

        program -= programs


def _outputs(x, weights, out, place, types, sizes, splits):
    """A split of the inputs of a block of one of the weights."""
    (codes, scales, offsets), (kind, dtype), (block, depth, tiles), (number, split) = weights, types, sizes, place
    word, token = arange(block // 2, number * (block // 2)), arange(power_of_two(x.shape[0], TOKENS))[None, :]
    there, grouped, packed = token < x.shape[0], scales.shape[-2] > 1, kind in PACKED
    added = offsets is not None or kind in BIAS
    count = codes.shape[0] // depth // splits
    first = split * count

    def of_groups(step):
        """Scales and offsets of the tiles of a step, as they are stored."""
        at = [first + step * tiles + i if grouped else 0 for i in range(tiles if grouped else 1)]
        at = [jnp.minimum(group, scales.shape[-2] - 1) for group in at]
        return [[pair(ref, group, word, dtype.itemsize == 4) for ref in (scales, offsets)] for group in at]

    def products(tile):
        """Of even outputs, of odd ones, and of weights that are all ones where something is added to each."""
        start, further = tile * depth * (2 if packed and grouped else 1), depth if grouped else x.shape[1] // 2
        inputs = [arange(depth, start + i * further)[:, None] for i in range(2 if packed else 1)]
        rows = [plgpu.load(x.at[token, at], mask=there, other=0.0) for at in inputs]
        some = numbers(plgpu.load(codes.at[arange(depth, tile * depth)[None, :], word[:, None]]), kind)
        if added:
            some = [*some, [jnp.ones((block // 2, depth), x.dtype)] * len(rows)]
        return [sum(dot(a, b) for a, b in zip(each, rows, strict=True)) for each in some]

    def body(step, state):
        totals, (own, *later) = state
        last = of_groups(step + AHEAD) if grouped else own
        for i in range(tiles):
            sums = products(first + step * tiles + i)
            sums = _scaled(sums, own[i], dtype, BIAS.get(kind)) if grouped else sums
            totals = [total + part for total, part in zip(totals, sums, strict=True)]
        return totals, [*passed_on(later), last]

    zeros = jnp.zeros((block // 2, token.shape[1]), jnp.float32)
    ahead = [of_groups(step) for step in range(AHEAD if grouped else 1)]
    sums = [zeros] * (3 if added and not grouped else 2)
    totals, (own, *_) = jax.lax.fori_loop(0, count // tiles, body, (sums, ahead))
    totals = totals if grouped else _scaled(totals, own[0], dtype, BIAS.get(kind))
    for i, total in enumerate(totals):
        plgpu.store(out.at[split, token, 2 * word[:, None] + i], total, mask=there)


def _scaled(sums, own, dtype, bias):
    """Products of a group in numbers; the third one goes with what is added to each weight."""
    scales, offsets = (numbers_of_pair(part, dtype) for part in own)
    totals = []
    for part, scale, shift in zip(sums[:2], scales, offsets, strict=True):
        if bias is not None:
            shift = -bias * scale if shift is None else shift - bias * scale
        scaled = part * scale[:, None]
        totals.append(scaled if shift is None else scaled + sums[2] * shift[:, None])
    return totals
