"""Scores of an index on GPU: every entry is read once, for all queries of its KV head.

    grid (tiles of entries, B K)

Bytes: those of the index. Where it and the queries are of one 16-bit dtype, the matrix unit multiplies them, though few
queries leave most of its rows empty: products are exact, sums in float32. Other dtypes would take it several passes, so
entries are multiplied and summed as vectors.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from clusterkv_jax.kernels.gpu import DTYPES, arange, call, dot, load_rows, power_of_two

TILE = 32  # entries of a program
FEW = 528  # programs that an H200 runs at once with registers to spare: two warps each then read more at a time
MANY = 1056  # programs of which some would have to wait: products then take twice the entries
LINE = 128  # bytes of an entry that are read at a time
MOST_QUERIES = 16  # of a KV head: each has its own code


def index_scores(
    q: Float[Array, "B K G D"], index: Float[Array, "B K C D"], *, tile: int | None = None, interpret: bool = False
) -> Float[Array, "B K G C"]:
    """See `clusterkv_jax.kernels.index_scores.index_scores`."""
    batch, heads, entries, dim = index.shape
    queries = q.shape[2]
    if q.size == 0 or index.size == 0 or queries > MOST_QUERIES or power_of_two(dim) > 512:
        raise NotImplementedError(f"The GPU kernel of index_scores does not take {q.shape} with {index.shape}.")
    if q.dtype not in DTYPES or index.dtype not in DTYPES:
        raise NotImplementedError(f"The GPU kernel of index_scores does not read {q.dtype} with {index.dtype}.")
    products = q.dtype == index.dtype != jnp.float32
    many = pl.cdiv(entries, TILE) * batch * heads > MANY
    tile = tile or (2 * TILE if products and many else TILE)
    tiles = pl.cdiv(entries, tile)
    if products:
        kernel = partial(_products, tile=tile)
    else:
        kernel = partial(_sums, tile=tile, step=min(LINE // index.dtype.itemsize, power_of_two(dim)))
    scores = call(
        kernel,
        jax.ShapeDtypeStruct((batch * heads, queries, entries), jnp.float32),
        q.reshape(batch * heads, queries, dim),
        index.reshape(batch * heads, entries, dim),
        grid=(tiles, batch * heads),
        warps=2 if tiles * batch * heads <= FEW and dim <= 128 else 4,
        interpret=interpret,
    )
    return scores.reshape(batch, heads, queries, entries)


def _products(q, index, out, *, tile):
    number, head, g = pl.program_id(0) * tile + arange(tile), pl.program_id(1), arange(MOST_QUERIES)
    (_, entries, width), queries = index.shape, q.shape[1]
    columns = arange(power_of_two(width, 16))
    entry = load_rows(index, head, number, columns, number < entries, width)
    score = dot(load_rows(q, head, g, columns, g < queries, width), entry, (1, 1))
    inside = (g < queries)[:, None] & (number < entries)[None, :]
    plgpu.store(out.at[head, g[:, None], number[None, :]], score, mask=inside)


def _sums(q, index, out, *, tile, step):
    number, head = pl.program_id(0) * tile + arange(tile), pl.program_id(1)
    (_, entries, width), queries = index.shape, q.shape[1]
    inside = number < entries
    # Few lanes share an entry's part of a line, so that few sums across lanes are left at the end.
    sums = [jnp.zeros((tile, step), jnp.float32)] * queries
    for first in range(0, width, step):
        columns = arange(step, first)
        entry = load_rows(index, head, number, columns, inside, width).astype(jnp.float32)
        for g in range(queries):
            query = plgpu.load(q.at[head, g, columns], mask=columns < width, other=0.0).astype(jnp.float32)
            sums[g] += entry * query[None, :]
    for g in range(queries):
        plgpu.store(out.at[head, g, number], jnp.sum(sums[g], axis=1), mask=inside)
