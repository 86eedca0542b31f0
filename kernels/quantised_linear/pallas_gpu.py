"""Products of few rows with weights in codes on GPU: one launch for all weights that rows are multiplied with.

    grid (blocks of the outputs of all weights, splits of the inputs)   a program: a split of the inputs of a block

Bytes: codes and scales, once. Bound: reads, of which a program keeps several steps on their way, scales too. Rows of a
block are whole lines of memory. Codes are the first operand of the matrix unit, which takes 16 outputs and 8 tokens at
once: half of the products and sums that tiles of 16 tokens would take.

What codes stand for is multiplied before any scale, exactly: a group's products are scaled in float32, an instruction
for 16 numbers of 128. Splits of the inputs are added up in XLA, which joins that to what follows.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.few_rows import ROWS
from clusterkv_jax.kernels.gpu import arange, call, dot, power_of_two, shared_memory, whole_block
from clusterkv_jax.kernels.quantised_linear import many_rows_gpu, reference
from clusterkv_jax.kernels.quantised_linear.unpack_gpu import (
    BIAS,
    multiply_add,
    numbers,
    numbers_of_pair,
    pair,
    pair_words,
    words,
)
from clusterkv_jax.kernels.weight_codes import PACKED

# Outputs of a program, rows of codes of a tile where no group says so, those of a step, groups whose scales a program
# holds, warps, and steps on their way.
SIZES = {"block": 128, "depth": 64, "step": 64, "held": 8, "warps": 4, "stages": 4}
LEAST = 16  # rows of a tile, words of two outputs of a warp, as the matrix unit wants
TOKENS = 8  # of a tile at least, as it wants too
MOST_DEPTH = 256  # rows of a group, which are multiplied at once
LONG = 64  # rows of a group, of which a program has few
LEAST_WARPS = 1024  # fewer leave multiprocessors with a program at a time, which waits
MOST_SPLITS = 16


def quantised_linear(x, *weights, dtype=jnp.float32, sizes=None, interpret=False):
    """See `clusterkv_jax.kernels.quantised_linear.quantised_linear`.

    `sizes` go before those of the kernel.
    """
    if len(x) > ROWS:
        return [many_rows_gpu.quantised_linear(x, own, dtype) for own in weights]
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"The GPU kernel of quantised_linear takes rows of bfloat16, got {x.dtype}.")
    tiles, launch = fitted(weights, sizes or {})
    return [y.astype(dtype) for y in _run((tiles, tuple(launch.items()), interpret), x, None, weights)]


def quantised_experts(x, owners, *weights, sizes=None, interpret=False):
    """See `clusterkv_jax.kernels.quantised_linear.quantised_experts`.

    `sizes` go before those of the kernel.
    """
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"The GPU kernel of quantised_experts takes rows of bfloat16, got {x.dtype}.")
    tiles, launch = fitted(weights, sizes or {}, len(owners))
    return _run((tiles, tuple(launch.items()), interpret), x, owners, weights)


def fitted(weights, sizes, times=1):
    """Outputs, rows and tiles of a step of each of these weights, whose blocks divide them, whether a program holds all
    its scales; and what all share.

    `splits` of the inputs fill the device, in a launch of so many `times` their programs, and leave no more groups to a
    program than it can hold the scales of. `stages` of steps have room.
    """
    sizes = SIZES | sizes
    blocks = [_block(own, sizes) for own in weights]
    counts = [own.codes.shape[-2] // depth for own, (_, depth) in zip(weights, blocks, strict=True)]
    grouped = [own.scales.shape[-2] > 1 for own in weights]
    warps = times * sum(own.codes.shape[-1] // (2 * LEAST) for own in weights)
    # Groups of few rows would leave a program hardly any.
    long = [count for count, (_, depth) in zip(counts, blocks, strict=True) if depth >= LONG and all(grouped)]
    wanted = max(pl.cdiv(LEAST_WARPS, warps), *(pl.cdiv(count, sizes["held"]) for count in long), 1)
    splits = _divisor(math.gcd(*counts), sizes.get("splits", min(MOST_SPLITS, power_of_two(wanted))))
    tiles, stages = [], sizes["stages"]
    for own, (block, depth), count, of_groups in zip(weights, blocks, counts, grouped, strict=True):
        holds = of_groups and count // splits <= sizes["held"]
        # Scales that are read a step ahead are on their way for the time of a step.
        step = sizes["step"] if holds or not of_groups else 2 * sizes["step"]
        number = _divisor(count // splits, max(1, step // depth))
        tiles.append((block, depth, number, holds))
        halves = 2 if own.kind in PACKED else 1
        stages = max(1, min(stages, shared_memory() // (number * depth * (block + 2 * ROWS * halves))))
    warps = min(sizes["warps"], *(block // (2 * LEAST) for block, _ in blocks))
    return tuple(tiles), {"splits": splits, "warps": warps, "stages": stages}


def _divisor(number, most):
    """The largest one up to `most`."""
    return next(part for part in range(most, 0, -1) if number % part == 0)


def _block(weights, sizes):
    """Outputs of a program, and rows of codes of a tile: those of a group, whose products have one scale."""
    (rows, outputs), groups = weights.codes.shape[-2:], weights.scales.shape[-2]
    block = whole_block(sizes["block"], outputs)
    depth = whole_block(sizes["depth"], rows) if groups == 1 else rows // groups
    if min(block // 2, depth) < LEAST or depth & (depth - 1) or depth > MOST_DEPTH:
        raise NotImplementedError(
            f"The GPU kernel of quantised_linear takes outputs in blocks of {2 * LEAST} and groups of {LEAST} to "
            f"{MOST_DEPTH} rows of codes, a power of two, got {outputs} and {depth}."
        )
    return block, depth


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, x, owners, weights):
    tiles, launch, interpret = options[0], dict(options[1]), options[2]
    outputs, splits = [own.codes.shape[-1] for own in weights], launch["splits"]
    rows, times = (len(x), 1) if owners is None else (len(owners), len(owners))
    parts = call(
        partial(_kernel, stored=tuple((own.kind, own.scales.dtype) for own in weights), tiles=tiles, splits=splits),
        [jax.ShapeDtypeStruct((splits, rows, width), jnp.float32) for width in outputs],
        *(x, owners, [(words(own), pair_words(own.scales), pair_words(own.offsets)) for own in weights]),
        grid=(sum(width // block for width, (block, *_) in zip(outputs, tiles, strict=True)), splits, times),
        warps=launch["warps"],
        stages=launch["stages"],
        interpret=interpret,
    )
    return [jnp.sum(part, axis=0) for part in parts]


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""

    def definition(x, owners, weights):
        if owners is None:
            return reference.quantised_linear(x, *weights)
        return reference.quantised_experts(x, owners, *weights)

    return _run(options, *operands), jax.jvp(definition, operands, tangents)[1]


def _kernel(x, owners, weights, *outs, stored, tiles, splits):
    program, split, row = (pl.program_id(axis) for axis in range(3))
    # Of experts, a program has one row; otherwise all.
    rows = (0, x.shape[0], 0) if owners is None else (row // (owners.shape[0] // x.shape[0]), 1, row)
    expert = () if owners is None else (owners[row],)
    for own, out, types, sizes in zip(weights, outs, stored, tiles, strict=True):
        programs = out.shape[-1] // sizes[0]

        @pl.when((program >= 0) & (program < programs))
        def _(own=own, out=out, types=types, sizes=sizes, number=program):
            _outputs(x, own, out, (number, split, rows, expert), types, sizes, splits)

        program -= programs


def _outputs(x, weights, out, place, types, sizes, splits):
    """A split of the inputs of a block of one of the weights."""
    (codes, scales, offsets), (kind, dtype), (block, depth, tiles, held) = weights, types, sizes
    number, split, (first_row, tokens, first_out), expert = place
    word, token = arange(block // 2, number * (block // 2)), arange(power_of_two(tokens, TOKENS))[None, :]
    there, grouped, packed = token < tokens, scales.shape[-2] > 1, kind in PACKED
    added = offsets is not None or kind in BIAS
    count = codes.shape[-2] // depth // splits
    first = split * count

    def of_groups(step):
        """Scales and offsets of the tiles of a step, as they are stored."""
        at = [first + step * tiles + i if grouped else 0 for i in range(tiles if grouped else 1)]
        at = [jnp.minimum(group, scales.shape[-2] - 1) for group in at]
        return [[pair(ref, (*expert, group), word, dtype) for ref in (scales, offsets)] for group in at]

    def products(tile):
        """Of even outputs, of odd ones, and of weights that are all ones where something is added to each."""
        start, further = tile * depth * (2 if packed and grouped else 1), depth if grouped else x.shape[1] // 2
        inputs = [arange(depth, start + i * further)[:, None] for i in range(2 if packed else 1)]
        rows = [plgpu.load(x.at[first_row + token, at], mask=there, other=0.0) for at in inputs]
        own = codes.at[(*expert, arange(depth, tile * depth)[None, :], word[:, None])]
        some = numbers(plgpu.load(own), kind)
        if added:
            some = [*some, [jnp.ones((block // 2, depth), x.dtype)] * len(rows)]
        return [sum(dot(a, b) for a, b in zip(each, rows, strict=True)) for each in some]

    def body(step, state):
        totals, own = state
        own, ahead = (_at(step, own), own) if held else (own, of_groups(step + 1) if grouped else own)
        for i in range(tiles):
            sums = products(first + step * tiles + i)
            if grouped:
                totals = _scaled(totals, sums, own[i], dtype, BIAS.get(kind))
            else:
                totals = [total + part for total, part in zip(totals, sums, strict=True)]
        return totals, ahead

    zeros = jnp.zeros((block // 2, token.shape[1]), jnp.float32)
    sums = [zeros] * (3 if added and not grouped else 2)
    own = [of_groups(step) for step in range(count // tiles)] if held else of_groups(0)
    totals, own = jax.lax.fori_loop(0, count // tiles, body, (sums, own))
    totals = totals if grouped else _scaled([zeros] * 2, totals, own[0], dtype, BIAS.get(kind))
    for i, total in enumerate(totals):
        plgpu.store(out.at[split, first_out + token, 2 * word[:, None] + i], total, mask=there)


def _at(number, held):
    """The element of this number, of which each has as many arrays."""
    chosen = held[0]
    for i, part in enumerate(held[1:], 1):
        chosen = jax.tree.map(partial(jnp.where, number == i), part, chosen)
    return chosen


def _scaled(totals, sums, own, dtype, bias):
    """Products of a group in numbers, added to those before; the third one goes with what is added to each weight."""
    scales, offsets = (numbers_of_pair(part, dtype) for part in own)
    found = []
    for total, part, scale, shift in zip(totals, sums[:2], scales, offsets, strict=True):
        if bias is not None:
            shift = -bias * scale if shift is None else multiply_add(scale, jnp.float32(-bias), shift)
        total = multiply_add(part, scale[:, None], total)
        found.append(total if shift is None else multiply_add(sums[2], shift[:, None], total))
    return found
