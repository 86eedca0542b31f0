"""Products of few rows with weights in codes on GPU.

    grid (blocks of outputs, splits of the inputs)   a program: a split of the inputs of a block

Bytes: codes and scales, once. Bound: reads. What codes stand for is multiplied before any scale, exactly: a group's
products are scaled in float32, so that an instruction scales 16 numbers of 128. The scales of a step are read while the
one before is multiplied. Splits of the inputs are added up in XLA, which joins that to what follows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.few_rows import ROWS, tile_of_rows
from clusterkv_jax.kernels.gpu import arange, call, dot, power_of_two, shared_memory, whole_block
from clusterkv_jax.kernels.quantised_linear import reference
from clusterkv_jax.kernels.quantised_linear.unpack_gpu import BIAS, numbers, words
from clusterkv_jax.kernels.weight_codes import PACKED
from clusterkv_jax.runtime.dispatch import LeftToXLA

# Outputs of a program, rows of codes in a tile where no group says so and in a step, warps, and steps on their way.
SIZES = {"block": 64, "depth": 64, "step": 256, "warps": 4, "stages": 4}
LEAST = 16  # rows of a tile, and words of two outputs, as the matrix unit wants
MOST_DEPTH = 256  # rows of a group, which are multiplied at once
LEAST_PROGRAMS = 256  # fewer leave parts of multiprocessors without work
MOST_SPLITS = 8


def quantised_linear(x, weights, *, sizes=None, interpret=False):
    """See `clusterkv_jax.kernels.quantised_linear.quantised_linear`.

    `sizes` go before those of the kernel.
    """
    if len(x) > ROWS:
        raise LeftToXLA(f"The GPU kernel of quantised_linear takes up to {ROWS} rows, got {len(x)}.")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"The GPU kernel of quantised_linear takes rows of bfloat16, got {x.dtype}.")
    return _run((tuple(fitted(weights, dict(sizes or {})).items()), interpret), x, weights)


def fitted(weights, sizes):
    """Sizes whose blocks divide these weights, and whose stages have room; `splits` of the inputs fill the device."""
    sizes = SIZES | sizes
    rows, outputs = weights.codes.shape
    groups, packed = weights.scales.shape[0], weights.kind in PACKED
    block = whole_block(sizes["block"], outputs)
    depth = whole_block(sizes["depth"], rows) if groups == 1 else rows // groups  # a group's products have one scale
    if min(block // 2, depth) < LEAST or depth & (depth - 1) or depth > MOST_DEPTH:
        raise NotImplementedError(
            f"The GPU kernel of quantised_linear takes outputs in blocks of {2 * LEAST} and groups of {LEAST} to "
            f"{MOST_DEPTH} rows of codes, a power of two, got {outputs} and {depth}."
        )
    wanted = min(MOST_SPLITS, power_of_two(pl.cdiv(LEAST_PROGRAMS, outputs // block)))
    splits = whole_block(sizes.get("splits", wanted), rows // depth)
    tiles = whole_block(max(1, sizes["step"] // depth), rows // depth // splits)
    room = shared_memory() // (tiles * depth * (block + 2 * ROWS * (2 if packed else 1)))
    warps = min(sizes["warps"], block // LEAST)  # a warp has eight words at least
    stages = max(1, min(sizes["stages"], room))
    return {"block": block, "depth": depth, "tiles": tiles, "splits": splits, "warps": warps, "stages": stages}


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, x, weights):
    sizes, interpret = dict(options[0]), options[1]
    outputs = weights.codes.shape[1]
    y = call(
        partial(_kernel, kind=weights.kind, **{name: sizes[name] for name in ("block", "depth", "tiles", "splits")}),
        jax.ShapeDtypeStruct((sizes["splits"], len(x), outputs), jnp.float32),
        *(x, words(weights), weights.scales, weights.offsets),
        grid=(outputs // sizes["block"], sizes["splits"]),
        warps=sizes["warps"],
        stages=sizes["stages"],
        interpret=interpret,
    )
    return jnp.sum(y, axis=0)


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""
    return _run(options, *operands), jax.jvp(reference.quantised_linear, operands, tangents)[1]


def _kernel(x, codes, scales, offsets, out, *, kind, block, depth, tiles, splits):
    word, split = arange(block // 2, pl.program_id(0) * (block // 2)), pl.program_id(1)
    count, grouped, packed = codes.shape[0] // depth // splits, scales.shape[0] > 1, kind in PACKED
    first, (row, there) = split * count, tile_of_rows(x)
    added = offsets is not None or kind in BIAS

    def of_groups(step):
        """Scales and offsets of the tiles of a step."""
        at = [jnp.minimum(first + step * tiles + i, scales.shape[0] - 1) if grouped else 0 for i in range(tiles)]
        return [_pairs(scales, offsets, group, word) for group in at[: tiles if grouped else 1]]

    def products(tile):
        """Of even outputs, of odd ones, and of weights that are all ones where something is added to each."""
        start = tile * depth * (2 if packed and grouped else 1)
        further = depth if grouped else x.shape[1] // 2
        columns = [arange(depth, start + i * further) for i in range(2 if packed else 1)]
        rows = [plgpu.load(x.at[row, at[None, :]], mask=there, other=0.0) for at in columns]
        some = numbers(plgpu.load(codes.at[arange(depth, tile * depth)[:, None], word[None, :]]), kind)
        if added:
            some = [*some, [jnp.ones((depth, block // 2), x.dtype)] * len(rows)]
        return [sum(dot(a, b) for a, b in zip(rows, part, strict=True)) for part in some]

    def body(step, state):
        totals, own = state
        ahead = of_groups(step + 1) if grouped else own
        for i in range(tiles):
            sums = products(first + step * tiles + i)
            sums = _scaled(sums, *own[i], BIAS.get(kind)) if grouped else sums
            totals = [total + part for total, part in zip(totals, sums, strict=True)]
        return totals, ahead

    zeros = jnp.zeros((ROWS, block // 2), jnp.float32)
    sums = 3 if added and not grouped else 2
    totals, own = jax.lax.fori_loop(0, count // tiles, body, ([zeros] * sums, of_groups(0)))
    totals = totals if grouped else _scaled(totals, *own[0], BIAS.get(kind))
    for part, total in enumerate(totals):
        plgpu.store(out.at[split, row, 2 * word[None, :] + part], total, mask=there)


def _pairs(scales, offsets, group, word):
    """Scales of even and of odd outputs, and their offsets or None, as they are stored."""
    return [
        [None if ref is None else plgpu.load(ref.at[group, 2 * word + i]) for i in (0, 1)] for ref in (scales, offsets)
    ]


def _scaled(sums, scales, offsets, bias):
    """Products of a group in numbers; the third one goes with what is added to each weight."""
    totals = []
    for part, stored, offset in zip(sums[:2], scales, offsets, strict=True):
        scale = _numbers(stored)[None, :]
        shift = None if offset is None else offset.astype(jnp.float32)[None, :]
        if bias is not None:
            shift = -bias * scale if shift is None else shift - bias * scale
        totals.append(part * scale if shift is None else part * scale + sums[2] * shift)
    return totals


def _numbers(scales):
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
