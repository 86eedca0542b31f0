"""Queries, keys and values of few tokens on GPU: one launch, where XLA splits the inputs, and turns each in another.

    grid (blocks of the outputs of all three, and of a surrogate)   a program: all inputs

A block is some columns of a head's first half and those that lie a half further, so that a program turns its pairs. The
rows of a few pairs fit its registers: with a single token they are all read at once, and the token is normalised by
every program while they come. That takes less than a launch.

Bytes: the weights, once. Bound: reads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.few_rows import check_rows, fitted, products, tile_of_rows
from clusterkv_jax.kernels.gpu import arange, call, differentiated_by, power_of_two, whole_block
from clusterkv_jax.kernels.head_products import reference

# Pairs of a program, sums at once, inputs of each at a time, warps, and blocks of weights on their way at once.
SIZES = {"block": 32, "sums": 2, "depth": 128, "warps": 2, "stages": 4}
NARROW_SIZES = SIZES | {"block": 16}
LEAST_PROGRAMS = 64  # fewer leave more than half of the multiprocessors without work
# Of a single token: weights of a side of its pairs at least, and warps, for as many as their registers hold; and how
# many such blocks of a head a program takes one after another.
TOKEN_SIZES = {"numbers": 4096, "warps": 4, "turns": 2}
MOST_NUMBERS, MOST_INPUTS = 2**14, 2**14


def head_products(
    x, weights, biases=None, angles=None, scale=None, surrogate=None, *, eps=0.0, offset=0.0, sizes=None,
    interpret=False,
):  # fmt: skip
    """See `clusterkv_jax.kernels.head_products.head_products`.

    `sizes` go before those of the kernel.
    """
    check_rows("head_products", x, *weights)
    halves, inputs = [w.shape[1] // 2 for w in weights], x.shape[1]
    if len(x) == 1 and inputs <= MOST_INPUTS and all(half % 2 == 0 for half in halves):
        options = TOKEN_SIZES | dict(sizes or {})
        wanted = max(2, options["numbers"] // power_of_two(inputs))
        block = min(power_of_two(wanted), *(half & -half for half in halves))
        warps = options["warps"] * max(1, block * power_of_two(inputs) // MOST_NUMBERS)
        turns = min(whole_block(options["turns"], half // block) for half in halves)
        options |= {"block": block, "depth": None, "sums": 1, "warps": warps, "turns": turns}
    elif scale is not None or surrogate is not None:
        raise NotImplementedError(
            f"The GPU kernel of head_products normalises and scores one token of up to {MOST_INPUTS}, got {x.shape}."
        )
    else:
        programs = sum(len(w) * half for w, half in zip(weights, halves, strict=True)) // SIZES["block"]
        options = (NARROW_SIZES if programs < LEAST_PROGRAMS else SIZES) | dict(sizes or {})
        options = fitted("head_products", options, inputs, halves, tiles=2)
    norm = {"eps": eps, "offset": offset}
    static = tuple(norm.items()), tuple(({"turns": 1} | options).items()), interpret
    return _run(static, x, weights, biases, angles, scale, surrogate)


@differentiated_by(lambda options: partial(reference.head_products, **dict(options[0])))
def _run(options, x, weights, biases, angles, scale, surrogate):
    norm, sizes, interpret = dict(options[0]), dict(options[1]), options[2]
    pairs = sum(w.shape[0] * w.shape[1] // 2 for w in weights)
    scores = 0 if surrogate is None else len(surrogate[1])
    heads = (jax.ShapeDtypeStruct((len(x), *w.shape[:2]), x.dtype) for w in weights)
    return call(
        partial(_kernel, **{name: sizes[name] for name in ("block", "depth", "sums", "turns")}, **norm),
        (*heads, jax.ShapeDtypeStruct((len(x), scores), jnp.float32) if scores else None),
        *(x, weights, biases, angles, scale, surrogate),
        grid=(pairs // (sizes["block"] * sizes["turns"]) + pl.cdiv(scores, sizes["block"]),),
        warps=sizes["warps"],
        stages=sizes.get("stages", 1),
        interpret=interpret,
    )


def _kernel(x, weights, biases, angles, scale, surrogate, *outs, block, depth, sums, turns, eps, offset):
    program, before = pl.program_id(0), 0
    *heads, scores = outs
    for number, (weight, out) in enumerate(zip(weights, heads, strict=True)):
        half = weight.shape[1] // 2
        blocks = weight.shape[0] * half // (block * turns)
        bias, turned = None if biases is None else biases[number], angles if number < 2 else None

        @pl.when((program >= before) & (program < before + blocks))
        def _(weight=weight, out=out, bias=bias, turned=turned, half=half, place=program - before):
            each = half // (block * turns)
            head, pair = place // each, arange(block, place % each * block * turns)
            if depth is None:
                _token(x, weight, bias, turned, scale, out, head, pair, turns, eps, offset)
            else:
                _tokens(x, weight, bias, turned, out, head, pair, depth, sums)

        before += blocks
    if surrogate is not None:
        # A row of float32 takes as many registers as both sides of a pair.
        @pl.when(program >= before)
        def _():
            score = arange(block, (program - before) * block)
            _scores(x, surrogate, scale, scores, score, eps, offset)


def _tokens(x, weight, bias, angles, out, head, pair, depth, sums):
    """These pairs of a head of a tile of tokens."""
    sides, (row, there) = (pair, weight.shape[1] // 2 + pair), tile_of_rows(x)

    def tiles(at):
        return [plgpu.load(weight.at[head, side[:, None], at[None, :]]) for side in sides]

    if angles is not None:  # read first: they come while the weights do
        angles = [plgpu.load(ref.at[row, pair[None, :]], mask=there, other=0.0) for ref in angles]
    if bias is not None:
        bias = [plgpu.load(bias.at[head, side]).astype(jnp.float32)[None, :] for side in sides]
    y = products(x, tiles, block=len(pair), count=2, depth=depth, sums=sums, contract=(1, 1))
    for value, side in zip(_turned(y, bias, angles), sides, strict=True):
        plgpu.store(out.at[row, head, side[None, :]], value.astype(out.dtype), mask=there)


def _token(x, weight, bias, angles, scale, out, head, pair, turns, eps, offset):
    """The same of a single token, whole rows of weights at once; while one block is multiplied the next one comes."""
    column = arange(power_of_two(x.shape[1]))
    inside = column < x.shape[1]

    def sides(i):
        here = pair + i * len(pair)
        return here, weight.shape[1] // 2 + here

    def tiles(i):
        at = [weight.at[head, side[:, None], column[None, :]] for side in sides(i)]
        return [plgpu.load(ref, mask=inside[None, :], other=0.0) for ref in at]

    def finish(i, loaded):
        own, here = None if bias is None else [plgpu.load(bias.at[head, side]) for side in sides(i)], sides(i)
        own = None if own is None else [value.astype(jnp.float32) for value in own]
        by = None if angles is None else [plgpu.load(ref.at[0, here[0]]) for ref in angles]
        sums = [jnp.sum(tile.astype(jnp.float32) * y, axis=1) for tile in loaded]
        for value, side in zip(_turned(sums, own, by), here, strict=True):
            plgpu.store(out.at[0, head, side], value.astype(out.dtype))

    def body(i, loaded):
        ahead = tiles(i + 1)
        finish(i, loaded)
        return ahead

    first = tiles(0)
    y = _entering(x, scale, column, eps, offset)
    finish(turns - 1, jax.lax.fori_loop(0, turns - 1, body, first))


def _scores(x, surrogate, scale, out, score, eps, offset):
    """These scores of a single token."""
    rows, bias = surrogate
    column = arange(power_of_two(x.shape[1]))
    inside, there = column < x.shape[1], score < rows.shape[0]
    tile = plgpu.load(rows.at[score[:, None], column[None, :]], mask=there[:, None] & inside[None, :], other=0.0)
    shift = plgpu.load(bias.at[score], mask=there, other=0.0)
    sums = jnp.sum(tile * _entering(x, scale, column, eps, offset), axis=1)
    plgpu.store(out.at[0, score], sums + shift, mask=there)


def _entering(x, scale, column, eps, offset):
    """A single token after the norm, as it is rounded, [1, inputs]."""
    inside = column < x.shape[1]
    y = plgpu.load(x.at[0, column], mask=inside, other=0.0)
    if scale is not None:
        wide = y.astype(jnp.float32)
        factor = offset + plgpu.load(scale.at[column], mask=inside, other=0.0).astype(jnp.float32)
        y = (wide * jax.lax.rsqrt(jnp.sum(wide * wide) / x.shape[1] + eps) * factor).astype(y.dtype)
    return y.astype(jnp.float32)[None, :]


def _turned(pairs, bias, angles):
    """Both sides of pairs with their biases, turned."""
    a, b = pairs
    if bias is not None:
        a, b = a + bias[0], b + bias[1]
    if angles is None:
        return a, b
    cos, sin = angles
    return a * cos - b * sin, b * cos + a * sin
