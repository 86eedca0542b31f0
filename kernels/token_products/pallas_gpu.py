"""Products of few tokens on GPU: one launch reads its weights once, normalises before and does the rest behind.

    grid (blocks of outputs)     a program: `block` outputs of one of the weights, over all inputs, `depth` at a time

Bytes: the weights, once. The tokens fill the 16 rows that the matrix unit wants. A norm's factor is one number a token,
known after the last input, so it multiplies sums rather than inputs: norm and products are one pass.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import arange, call, dot
from clusterkv_jax.kernels.token_products import reference
from clusterkv_jax.kernels.tuning import blocks

MOST_TOKENS, LEAST = 16, 16  # what the matrix unit takes at once
SIZES = {"block": 32, "depth": 128, "warps": 4, "stages": 4}


def token_products(
    x, weights, *, across, norm=None, after, residual=None, angles=None, sizes=None, interpret=False
) -> Any:
    """See `clusterkv_jax.kernels.token_products.token_products`.

    `sizes` go before what was measured on this device (`kernels.tuning`): outputs of a program, inputs at a time, warps
    and `stages`, blocks on their way at once.
    """
    if len(x) > MOST_TOKENS:
        raise NotImplementedError(f"The GPU kernel of token_products takes up to {MOST_TOKENS} tokens, got {len(x)}.")
    if any(w.dtype != jnp.bfloat16 for w in (x, *weights)):
        raise NotImplementedError(f"The GPU kernel of token_products takes bfloat16, got {[w.dtype for w in weights]}.")
    if after.gate not in (None, "silu"):
        raise NotImplementedError(f"The GPU kernel of token_products has no activation {after.gate!r}.")
    inputs, outputs = x.shape[1], [w.shape[1 if across else 0] for w in weights]
    shape = {"inputs": inputs, "outputs": sum(outputs), "across": int(across)}
    sizes = SIZES | blocks("token_products", **shape) | dict(sizes or {})
    halves = 1 if angles is None else 2
    block, depth = whole_block(sizes["block"], *(f // halves for f in outputs)), whole_block(sizes["depth"], inputs)
    if angles is not None:
        block = whole_block(block, after.head_dim // 2)
    if min(block, depth) < LEAST:
        raise NotImplementedError(
            f"The GPU kernel of token_products takes inputs and outputs in blocks of {LEAST}, got {inputs} inputs and "
            f"{outputs} outputs."
        )
    sizes |= {"block": block, "depth": depth}
    eps, offset = (0.0, 0.0) if norm is None else norm[1:]
    options = (across, after, eps, offset, tuple(sorted(sizes.items())), interpret)
    return _run(options, x, weights, None if norm is None else norm[0], residual, angles)


def whole_block(most: int, *sizes: int) -> int:
    """The largest power of two, up to `most`, of which all sizes are multiples."""
    common = math.gcd(*sizes)
    return min(most, common & -common)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, x, weights, scale, residual, angles):
    across, after, eps, offset, sizes, interpret = options
    sizes = dict(sizes)
    outputs = [w.shape[1 if across else 0] for w in weights][: 1 if after.gate else None]
    dtype = jnp.float32 if after.wide else x.dtype
    wide = sizes["block"] * (1 if angles is None else 2)
    static = {"across": across, "after": after, "eps": eps, "offset": offset}
    out = call(
        partial(_kernel, block=sizes["block"], depth=sizes["depth"], **static),
        tuple(jax.ShapeDtypeStruct((len(x), f), dtype) for f in outputs),
        x,
        weights,
        scale,
        residual,
        angles,
        grid=(sum(f // wide for f in outputs),),
        warps=sizes["warps"],
        stages=sizes["stages"],
        interpret=interpret,
    )
    return out if len(out) > 1 else out[0]


@_run.defjvp
def _run_jvp(options, args, tangents):
    """A kernel cannot be differentiated, the reference can."""
    across, after, eps, offset, *_ = options

    def definition(x, weights, scale, residual, angles):
        norm = None if scale is None else (scale, eps, offset)
        rest = {"across": across, "after": after, "residual": residual, "angles": angles}
        return reference.token_products(x, weights, norm=norm, **rest)

    return _run(options, *args), jax.jvp(definition, args, tangents)[1]


def _kernel(x, weights, scale, residual, angles, *outs, block, depth, across, after, eps, offset):
    """Programs of one of the weights after those of another; with a gate each has both."""
    program, first = pl.program_id(0), 0
    sums = partial(_sums, x, scale, depth=depth, across=across, eps=eps, offset=offset)
    row = arange(MOST_TOKENS)

    def store(out, columns, values):
        mask = (row < x.shape[0])[:, None] & (columns >= 0)[None, :]
        plgpu.store(out.at[row[:, None], columns[None, :]], values.astype(out.dtype), mask=mask)

    def load(array, columns):
        mask = (row < x.shape[0])[:, None] & (columns >= 0)[None, :]
        return plgpu.load(array.at[row[:, None], columns[None, :]], mask=mask, other=0.0).astype(jnp.float32)

    if after.gate is not None:
        columns = arange(block, program * block)
        gate, up = sums([(w, columns) for w in weights])
        return store(outs[0], columns, gate / (1 + jnp.exp(-gate)) * up)
    for number, (w, out) in enumerate(zip(weights, outs, strict=True)):
        count = out.shape[1] // (block * (1 if angles is None else 2))

        @pl.when((program >= first) & (program < first + count))
        def _(w=w, out=out, number=number, first=first):
            if angles is None:
                columns = arange(block, (program - first) * block)
                (values,) = sums([(w, columns)])
                return store(out, columns, values if residual is None else values + load(residual, columns))
            half = after.head_dim // 2
            parts = half // block
            head, part = (program - first) // parts, (program - first) % parts
            pair = arange(block, part * block)
            columns = head * after.head_dim + pair
            a, b = sums([(w, columns), (w, columns + half)])
            if number + 1 < len(weights):
                cos, sin = (load(angle, pair) for angle in angles)
                a, b = a * cos - b * sin, b * cos + a * sin
            store(out, columns, a)
            store(out, columns + half, b)

        first += count


def _sums(x, scale, tiles, *, depth, across, eps, offset):
    """Products of the normalised tokens with columns of weights, float32 [tokens, columns] of each tile."""
    row = arange(MOST_TOKENS)
    inputs = x.shape[1]

    def body(i, state):
        products, squares = state
        k = arange(depth, i * depth)
        some = plgpu.load(x.at[row[:, None], k[None, :]], mask=(row < x.shape[0])[:, None] & (k >= 0)[None], other=0.0)
        if scale is not None:
            wide = some.astype(jnp.float32)
            squares = squares + jnp.sum(wide * wide, axis=1)
            some = (wide * (offset + plgpu.load(scale.at[k]).astype(jnp.float32))[None, :]).astype(some.dtype)
        added = []
        for (w, columns), product in zip(tiles, products, strict=True):
            at = w.at[k[:, None], columns[None, :]] if across else w.at[columns[:, None], k[None, :]]
            added.append(product + dot(some, plgpu.load(at), (1, 0 if across else 1)))
        return added, squares

    start = [jnp.zeros((MOST_TOKENS, columns.shape[0]), jnp.float32) for _, columns in tiles]
    products, squares = jax.lax.fori_loop(0, inputs // depth, body, (start, jnp.zeros((MOST_TOKENS,), jnp.float32)))
    if scale is None:
        return products
    factor = jax.lax.rsqrt(squares / inputs + eps)[:, None]
    return [product * factor for product in products]
