"""Products of few rows with weights in codes on GPU: one launch for all weights that rows are multiplied with.

    grid (blocks of the outputs of all weights, splits of the inputs)   a program: a split of the inputs of a block

Bytes: codes and scales, once. Bound: reads. The matrix unit takes 16 rows. Where there are fewer, rows of its tile are
parts of the inputs, and so are columns: a row's products with the columns of its own part are added up at the end, all
others are nothing. That gives each warp of a program a part of the inputs, and no row of the tile is empty.

What codes stand for is multiplied before any scale, exactly: a group's products are scaled in float32, an instruction
for 16 numbers of 128. The scales of a step are read while the one before is multiplied. Splits of the inputs are added
up in XLA, which joins that to what follows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.few_rows import ROWS
from clusterkv_jax.kernels.gpu import arange, call, dot, power_of_two, shared_memory, whole_block
from clusterkv_jax.kernels.quantised_linear import reference
from clusterkv_jax.kernels.quantised_linear.unpack_gpu import BIAS, numbers, words
from clusterkv_jax.kernels.weight_codes import PACKED
from clusterkv_jax.runtime.dispatch import LeftToXLA

# Parts of the inputs side by side, rows of codes of a part where no group says so, those of all parts in a step, warps,
# and steps on their way. `block` outputs of a program are so many that they have `COLUMNS` in all parts.
SIZES = {"parts": 8, "depth": 64, "step": 512, "warps": 8, "stages": 4}
COLUMNS, MOST_BLOCK = 256, 128
LEAST = 16  # rows of a tile, and words of two outputs, as the matrix unit wants
MOST_DEPTH = 256  # rows of a group, which are multiplied at once
LEAST_WARPS = 1024  # of eight words: fewer leave parts of multiprocessors without work
MOST_SPLITS = 8


def quantised_linear(x, *weights, sizes=None, interpret=False):
    """See `clusterkv_jax.kernels.quantised_linear.quantised_linear`.

    `sizes` go before those of the kernel.
    """
    if len(x) > ROWS:
        raise LeftToXLA(f"The GPU kernel of quantised_linear takes up to {ROWS} rows, got {len(x)}.")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"The GPU kernel of quantised_linear takes rows of bfloat16, got {x.dtype}.")
    tiles, launch = fitted(len(x), weights, sizes or {})
    return _run((tiles, tuple(launch.items()), interpret), x, weights)


def fitted(rows, weights, sizes):
    """Outputs, rows, tiles of a step and parts of each of these weights, whose blocks divide them; and what all share.

    `splits` of the inputs fill the device, and `stages` of steps have room.
    """
    sizes = SIZES | sizes
    blocks = [_block(own, sizes, ROWS // power_of_two(rows)) for own in weights]
    warps = sum(own.codes.shape[1] // 16 * parts for own, (*_, parts) in zip(weights, blocks, strict=True))
    splits = sizes.get("splits", min(MOST_SPLITS, power_of_two(pl.cdiv(LEAST_WARPS, warps))))
    tiles, stages = [], sizes["stages"]
    for own, (_, depth, parts) in zip(weights, blocks, strict=True):
        splits = min(splits, whole_block(splits, len(own.codes) // depth // parts))
    for own, (block, depth, parts) in zip(weights, blocks, strict=True):
        count = whole_block(max(1, sizes["step"] // (depth * parts)), len(own.codes) // (depth * parts * splits))
        tiles.append((block, depth, parts, count))
        halves = 2 if own.kind in PACKED else 1
        stages = max(1, min(stages, shared_memory() // (count * depth * (block * parts + 2 * ROWS * halves))))
    warps = min(sizes["warps"], *(block * parts // 16 for block, _, parts in blocks))  # eight words each at least
    return tuple(tiles), {"splits": splits, "warps": warps, "stages": stages}


def _block(weights, sizes, most):
    """Outputs of a program, rows of codes of a part in a tile, and up to `most` parts.

    The rows are those of a group, whose products have one scale.
    """
    (rows, outputs), groups = weights.codes.shape, weights.scales.shape[0]
    depth = whole_block(sizes["depth"], rows) if groups == 1 else rows // groups
    parts = whole_block(min(sizes["parts"], most), rows // depth)
    block = whole_block(sizes.get("block", min(MOST_BLOCK, COLUMNS // parts)), outputs)
    if min(block // 2, depth) < LEAST or depth & (depth - 1) or depth > MOST_DEPTH:
        raise NotImplementedError(
            f"The GPU kernel of quantised_linear takes outputs in blocks of {2 * LEAST} and groups of {LEAST} to "
            f"{MOST_DEPTH} rows of codes, a power of two, got {outputs} and {depth}."
        )
    return block, depth, parts


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
    (codes, scales, offsets), (block, depth, parts, tiles), (number, split) = weights, sizes, place
    grouped, packed, added = scales.shape[0] > 1, kind in PACKED, offsets is not None or kind in BIAS
    width, tokens = block // 2, power_of_two(x.shape[0])
    # Rows of the tile are the tokens of each part, columns the words of each part.
    row, column = arange(ROWS), arange(parts * width)
    token, row_part = jax.lax.rem(row, tokens), jax.lax.div(row, tokens)
    word, part = number * width + jax.lax.rem(column, width), jax.lax.div(column, width)
    there = ((token < x.shape[0]) & (row_part < parts))[:, None]
    count = codes.shape[0] // (depth * parts * splits)
    first = split * count

    def of_groups(step):
        """Scales and offsets of the tiles of a step."""
        at = [(first + step * tiles + i) * parts + part if grouped else 0 * part for i in range(tiles)]
        at = [jnp.minimum(group, scales.shape[0] - 1) for group in at[: tiles if grouped else 1]]
        return [_pairs(scales, offsets, group, word) for group in at]

    def products(tile):
        """Of even outputs, of odd ones, and of weights that are all ones where something is added to each."""
        start = (tile * parts + row_part) * (depth * (2 if packed and grouped else 1))
        further = depth if grouped else x.shape[1] // 2
        inputs = [start[:, None] + arange(depth, i * further)[None, :] for i in range(2 if packed else 1)]
        rows = [plgpu.load(x.at[token[:, None], at], mask=there, other=0.0) for at in inputs]
        at = ((tile * parts + part) * depth)[None, :] + arange(depth)[:, None]
        some = numbers(plgpu.load(codes.at[at, word[None, :]]), kind)
        if added:
            some = [*some, [jnp.ones(at.shape, x.dtype)] * len(rows)]
        return [sum(dot(a, b) for a, b in zip(rows, each, strict=True)) for each in some]

    def body(step, state):
        totals, own = state
        ahead = of_groups(step + 1) if grouped else own
        for i in range(tiles):
            sums = products(first + step * tiles + i)
            sums = _scaled(sums, own[i], BIAS.get(kind)) if grouped else sums
            totals = [total + part for total, part in zip(totals, sums, strict=True)]
        return totals, ahead

    zeros = jnp.zeros((ROWS, parts * width), jnp.float32)
    sums = 3 if added and not grouped else 2
    totals, own = jax.lax.fori_loop(0, count // tiles, body, ([zeros] * sums, of_groups(0)))
    totals = totals if grouped else _scaled(totals, own[0], BIAS.get(kind))
    at, word = arange(tokens)[:, None], number * width + arange(width)
    for i, total in enumerate(totals):
        own = jnp.where(row_part[:, None] == part[None, :], total, 0.0)
        own = jnp.sum(own.reshape(ROWS, parts, width), axis=1)
        own = jnp.sum(own.reshape(ROWS // tokens, tokens, width), axis=0)
        plgpu.store(out.at[split, at, 2 * word[None, :] + i], own, mask=at < x.shape[0])


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
