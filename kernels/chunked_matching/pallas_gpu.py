"""Chunked matching on GPU: a program per chunk reads its rows once and writes an edge per A row.

Rows are gathered by number, so that rounds of clustering read what is left of a cache where it lies. Products are
accumulated in float32 and scaled by the float32 norms afterwards, as in the reference: a program sums the squares of
features itself, those of keys and values are given, since that takes a fifth less. Codes of quantised rows are
multiplied as integers of 8 bits, those of float8 in bf16, which holds them exactly, and by their scales afterwards.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, dot, load_codes, load_rows, load_scales, power_of_two
from clusterkv_jax.kernels.quantised import Quantised, as_array, kind, row_squares
from clusterkv_jax.kernels.tuning import blocks

MOST_ROWS = 128  # A or B rows of a tile, unless sizes say fewer
LEAST_NUMBERS, LEAST_CODES = 16, 32  # columns that a matrix unit multiplies at once, of 16 bits and of 8
# Columns read at once, rows of a tile; warps of one with MOST_ROWS; stages.
SIZES = {"columns": 64, "a_rows": MOST_ROWS, "b_rows": MOST_ROWS, "warps": 8, "stages": 2}
# Of keys and values, what little shared memory holds at any width.
VALUES_SIZES = SIZES | {"a_rows": MOST_ROWS // 2}


def chunked_matching(
    features, *, chunk, bias, normalize, start, length, index=None,
    values=None, key_weight=None, value_weight=1.0, squares=(None, None), interpret=False,
):  # fmt: skip
    """See `clusterkv_jax.kernels.chunked_matching.chunked_matching`."""
    check_dtypes("chunked_matching", features, *([] if values is None else [values]))
    batch, heads, slots, _ = features.shape
    stored = as_array(features)
    listed = slots if index is None else index.shape[2]
    edges = (listed + 1) // 2
    if batch * heads * edges == 0:
        return jnp.zeros((batch, heads, edges), jnp.int32), jnp.zeros((batch, heads, edges), jnp.float32)
    chunk = min(chunk, listed + listed % 2)
    first = jnp.broadcast_to(jnp.asarray(0 if start is None else start, jnp.int32), (batch, heads))
    count = listed - first if length is None else jnp.broadcast_to(jnp.asarray(length, jnp.int32), (batch, heads))
    count = jnp.minimum(count, listed - first)

    # tf32 products keep several copies of a float32 tile in shared memory.
    most = MOST_ROWS // 2 if stored.dtype == jnp.float32 else MOST_ROWS
    tile = min(power_of_two(chunk // 2, 16), most)
    shape = {"chunk": chunk, "width": stored.shape[3], "itemsize": stored.dtype.itemsize}
    sizes = SIZES if values is None else VALUES_SIZES
    sizes = sizes | blocks("chunked_matching", **shape, values=int(values is not None))
    a_tile, tile = (min(tile, sizes[rows]) for rows in ("a_rows", "b_rows"))
    across = pl.cdiv(chunk // 2, a_tile)

    def flat(x):
        return x.reshape(batch * heads, *x.shape[2:])

    optional = {"bias": bias, "index": index, "values": values, "key_weight": key_weight}
    if values is not None:
        both = [
            row_squares(x) if known is None else known for x, known in zip((features, values), squares, strict=True)
        ]
        optional |= {"key_squares": both[0], "value_squares": both[1]}
    optional = {name: jax.tree.map(flat, x) for name, x in optional.items() if x is not None}
    kernel = partial(
        _kernel,
        chunk=chunk,
        tile=tile,
        a_tile=a_tile,
        step=sizes["columns"],
        edges=edges,
        normalize=normalize,
        value_weight=value_weight,
        names=tuple(optional),
    )
    shape = (batch * heads, edges)
    match, score = call(
        kernel,
        (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        jax.tree.map(flat, features),
        first.reshape(-1),
        count.reshape(-1),
        *optional.values(),
        grid=(pl.cdiv(edges, chunk // 2) * across, batch * heads),
        warps=sizes["warps"] if max(a_tile, tile) == MOST_ROWS else 4,
        stages=1 if stored.dtype == jnp.float32 else sizes["stages"],
        interpret=interpret,
    )
    return match.reshape(batch, heads, edges), score.reshape(batch, heads, edges)


def _kernel(features, first, count, *refs, chunk, tile, a_tile, step, edges, normalize, value_weight, names):
    """Edges of one tile of A rows of one chunk of one head."""
    optional, (match, score) = dict(zip(names, refs[:-2], strict=True)), refs[-2:]
    half, blocks, across = chunk // 2, pl.cdiv(chunk // 2, tile), pl.cdiv(chunk // 2, a_tile)
    head, number = pl.program_id(1), pl.program_id(0) // across
    n, begin = count[head], first[head]

    def locate(block: Array | int, parity: int, tile: int) -> tuple[Array, Array, Array]:
        """Of one tile of A or B rows: number within the side, whether there is such a row, and where it lies."""
        k = block * tile + arange(tile)
        offset = number * chunk + 2 * k + parity
        inside = (k < half) & (offset < n)
        slot = begin + offset
        if "index" in optional:
            slot = plgpu.load(optional["index"].at[head, slot], mask=inside, other=0)
        return k, inside, slot

    a, a_inside, a_rows = locate(pl.program_id(0) % across, 0, a_tile)
    out = number * half + a
    weight = optional["key_weight"][head] if "key_weight" in optional else 1.0
    real = (a < half) & (out < edges)

    def number_of(name: str, at: Array, inside: Array) -> Array:
        return plgpu.load(optional[name].at[head, at], mask=inside, other=0.0).astype(jnp.float32)

    def alone(at: Array, inside: Array) -> Array:
        """What a row adds to the scores of all its edges, in units of the keys' weight; -inf for none."""
        number = number_of("bias", at, inside) / weight if "bias" in optional else jnp.zeros(at.shape, jnp.float32)
        if "values" in optional:
            number = number - number_of("key_squares", at, inside) / 2
        return jnp.where(inside, number, -jnp.inf)

    @pl.when(number * chunk < n)
    def _():
        def best_of(block, best):
            b, b_inside, b_rows = locate(block, 1, tile)
            sides = (head, a_rows, a_inside, b_rows, b_inside, step)
            if "values" in optional:
                squares = number_of("value_squares", a_rows, a_inside), number_of("value_squares", b_rows, b_inside)
                value = _with_values(features, optional["values"], sides, squares, value_weight / weight)
            else:
                value, (a_square, b_square) = _products(features, *sides, squared=normalize)
                if normalize:
                    value = value * _scale(a_square)[:, None] * _scale(b_square)[None, :]
            # What an A row adds changes nothing about its best B row, so it comes last.
            value = value + alone(b_rows, b_inside)[None, :]
            top = jnp.max(value, axis=1)
            lowest = jnp.min(jnp.where(value == top[:, None], b[None, :], half), axis=1)
            better = top > best[1]  # an earlier tile's b wins a tie
            return jnp.where(better, lowest, best[0]), jnp.where(better, top, best[1])

        best = (jnp.zeros((a_tile,), jnp.int32), jnp.full((a_tile,), -jnp.inf, jnp.float32))
        best = best_of(0, best) if blocks == 1 else jax.lax.fori_loop(0, blocks, best_of, best)
        highest = (best[1] + alone(a_rows, a_inside)) * weight
        partner = jnp.where(highest > -jnp.inf, begin + number * chunk + 2 * best[0] + 1, -1)
        plgpu.store(match.at[head, out], partner, mask=real)
        plgpu.store(score.at[head, out], highest, mask=real)

    @pl.when(number * chunk >= n)
    def _():
        plgpu.store(match.at[head, out], jnp.full((a_tile,), -1, jnp.int32), mask=real)
        plgpu.store(score.at[head, out], jnp.full((a_tile,), -jnp.inf, jnp.float32), mask=real)


def _with_values(features, values, sides, squares, share):
    """Products of keys and, times `share`, cosines of values: these first, so that one tile of sums serves both."""
    value, _ = _products(values, *sides)
    a_scale = _scale(squares[0]) * share
    a_scale = jnp.minimum(a_scale, jnp.finfo(jnp.float32).max)  # of a row of zeros, beside huge keys
    return _products(features, *sides, value=value * a_scale[:, None] * _scale(squares[1])[None, :])[0]


def _products(rows, head, a_rows, a_inside, b_rows, b_inside, step, value=None, squared=False):
    """Dot products of A and B rows, added to `value`, and if asked for the sums of squares of both, over tiles of
    columns.
    """
    coded = isinstance(rows, Quantised)
    width = as_array(rows).shape[2]
    step = min(power_of_two(width, LEAST_CODES if coded else LEAST_NUMBERS), step)
    a_square, b_square = jnp.zeros(a_rows.shape, jnp.float32), jnp.zeros(b_rows.shape, jnp.float32)
    product = jnp.zeros((*a_rows.shape, *b_rows.shape), jnp.float32) if value is None or coded else value
    for start in range(0, width, step):
        columns = arange(step, start)
        a_parts = _parts(rows, head, a_rows, columns, a_inside)
        b_parts = _parts(rows, head, b_rows, columns, b_inside)
        for x, y in zip(a_parts, b_parts, strict=True):
            product += dot(x, y, (1, 1))
            if squared:
                a_square += jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1)
                b_square += jnp.sum(jnp.square(y.astype(jnp.float32)), axis=1)
    if not coded:
        return product, (a_square, b_square)
    a_scale, b_scale = load_scales(rows, head, a_rows, a_inside), load_scales(rows, head, b_rows, b_inside)
    product = product * a_scale[:, None] * b_scale[None, :]
    return product if value is None else product + value, (a_square * a_scale**2, b_square * b_scale**2)


def _parts(rows, head, at, columns, inside):
    """A tile of rows as it is multiplied, in parts of its columns."""
    if isinstance(rows, Quantised):
        return load_codes(rows, head, at, columns, inside, jnp.bfloat16 if kind(rows) == "float8_e4m3" else jnp.int8)
    return [load_rows(rows, head, at, columns, inside, rows.shape[2])]


def _scale(square: Array) -> Array:
    return jax.lax.rsqrt(jnp.maximum(square, jnp.finfo(jnp.float32).tiny))
