"""Scores of an index on GPU: every entry is read once, for all queries of its KV head.

    grid (tiles of entries, B K)

Bytes: those of the index. A KV head has too few queries to fill a matrix product in float32, so entries are multiplied
and summed as vectors.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from clusterkv_jax.kernels.gpu import DTYPES, arange, call, load_rows, power_of_two

TILE = 32  # entries read at a time
PROGRAMS = 528  # at most: four for each multiprocessor of an H200
LINE = 128  # bytes of an entry that are read at a time
MOST_QUERIES = 16  # of a KV head: each has its own code


def index_scores(
    q: Float[Array, "B K G D"],
    index: Float[Array, "B K C D"],
    *,
    tile: int = TILE,
    warps: int | None = None,
    line: int = LINE,
    programs: int = PROGRAMS,
    fence: bool = False,
    interpret: bool = False,
) -> Float[Array, "B K G C"]:
    """See `clusterkv_jax.kernels.index_scores.index_scores`."""
    batch, heads, entries, dim = index.shape
    queries = q.shape[2]
    if q.size == 0 or index.size == 0 or queries > MOST_QUERIES or power_of_two(dim) > 512:
        raise NotImplementedError(f"the GPU kernel of index_scores does not take {q.shape} with {index.shape}.")
    if q.dtype not in DTYPES or index.dtype not in DTYPES:
        raise NotImplementedError(f"the GPU kernel of index_scores does not read {q.dtype} with {index.dtype}.")
    tiles = pl.cdiv(entries, tile)
    programs = min(tiles, max(1, programs // (batch * heads)))
    warps = warps or (2 if programs == tiles else 4)
    scores = call(
        partial(
            _kernel,
            tile=tile,
            fence=fence and not interpret,
            span=pl.cdiv(entries, programs),
            step=min(line // index.dtype.itemsize, power_of_two(dim)),
        ),
        jax.ShapeDtypeStruct((batch * heads, queries, entries), jnp.float32),
        q.reshape(batch * heads, queries, dim),
        index.reshape(batch * heads, entries, dim),
        grid=(programs, batch * heads),
        warps=warps,
        interpret=interpret,
    )
    return scores.reshape(batch, heads, queries, entries)


def _kernel(q, index, out, *, tile, fence, span, step):
    """Scores of `span` entries; those of a tile are summed while the next ones are read."""
    program, head = pl.program_id(0), pl.program_id(1)
    (_, entries, width), queries = index.shape, q.shape[1]
    end = jnp.minimum((program + 1) * span, entries)
    lines = [arange(step, first) for first in range(0, width, step)]

    def read(i):
        number = program * span + i * tile + arange(tile)
        return tuple(load_rows(index, head, number, columns, number < end, width) for columns in lines)

    def score(i, parts):
        # Few lanes share an entry's part of a line, so that few sums across lanes are left at the end.
        sums = [jnp.zeros((tile, step), jnp.float32)] * queries
        for columns, part in zip(lines, parts, strict=True):
            entry = part.astype(jnp.float32)
            for g in range(queries):
                query = plgpu.load(q.at[head, g, columns], mask=columns < width, other=0.0).astype(jnp.float32)
                sums[g] += entry * query[None, :]
        number = program * span + i * tile + arange(tile)
        for g in range(queries):
            plgpu.store(out.at[head, g, number], jnp.sum(sums[g], axis=1), mask=number < end)

    def turn(i, parts):
        ahead = read(i + 1)
        if fence:  # so that the compiler does not put off what is read
            plgpu.debug_barrier()
        score(i, parts)
        return ahead

    last = pl.cdiv(span, tile) - 1
    score(last, jax.lax.fori_loop(0, last, turn, read(0)) if last else read(0))
