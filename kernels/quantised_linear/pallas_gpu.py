"""Products of few rows with weights in codes on GPU: one launch for all weights that rows are multiplied with.

    grid (blocks of the outputs of all weights, splits of the inputs)   a program: a split of the inputs of a block

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
    warps = min(sizes["warps"], *(block // LEAST for block, _ in blocks))  # a warp has eight words at least
    return tuple(tiles), {"splits": splits, "warps": warps, "stages": stages}


def _block(weights, sizes):
    """Outputs of a program, and rows of codes of a tile: those of a group, whose products have one scale."""
    (rows, outputs), groups = weights.codes.shape, weights.scales.shape[0]
    block, depth = whole_block(sizes["block"], outputs), rows // groups
    depth = whole_block(sizes["depth"], rows) if groups == 1 else depth
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
        partial(_kernel, kinds=tuple(own.kind for own in weights), tiles=tiles, splits=splits),
        [jax.ShapeDtypeStruct((splits, len(x), width), jnp.float32) for width in outputs],
        *(x, [(words(own), own.scales, own.offsets) for own in weights]),
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


def _kernel(x, weights, *outs, kinds, tiles, splits):
    program, split = pl.program_id(0), pl.program_id(1)
    for own, out, kind, sizes in zip(weights, outs, kinds, tiles, strict=True):
        programs = out.shape[-1] // sizes[0]

        @pl.when((program >= 0) & (program < programs))
        def _(own=own, out=out, kind=kind, sizes=sizes, number=program):
            _outputs(x, own, out, (number, split), kind, sizes, splits)

        program -= programs


def _outputs(x, weights, out, place, kind, sizes, splits):
    """A split of the inputs of a block of one of the weights."""
    (codes, scales, offsets), (block, depth, tiles), (number, split) = weights, sizes, place
    word = arange(block // 2, number * (block // 2))
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
            sums = _scaled(sums, own[i], BIAS.get(kind)) if grouped else sums
            totals = [total + part for total, part in zip(totals, sums, strict=True)]
        return totals, ahead

    zeros = jnp.zeros((ROWS, block // 2), jnp.float32)
    sums = 3 if added and not grouped else 2
    totals, own = jax.lax.fori_loop(0, count // tiles, body, ([zeros] * sums, of_groups(0)))
    totals = totals if grouped else _scaled(totals, own[0], BIAS.get(kind))
    for part, total in enumerate(totals):
        plgpu.store(out.at[split, row, 2 * word[None, :] + part], total, mask=there)


def _pairs(scales, offsets, group, word):
    """Scales of even and of odd outputs, and their offsets or None, as they are stored."""
    both = [2 * word, 2 * word + 1]
    return [[None if ref is None else plgpu.load(ref.at[group, at]) for at in both] for ref in (scales, offsets)]


def _scaled(sums, own, bias):
    """Products of a group in numbers; the third one goes with what is added to each weight."""
    totals = []
    for part, stored, offset in zip(sums[:2], *own, strict=True):
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
