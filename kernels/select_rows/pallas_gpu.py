"""Selection on GPU without a sort: one kernel, every cluster finds its own place.

    grid (tiles of clusters, B K J)

A cluster's first row goes behind the rows of all clusters that rank before it, so its place is the sum of their sizes:
one comparison with every other cluster, C^2 of them per selection, which all multiprocessors share. Then it writes its
rows there, those that there is room for. Sorting and prefix sums would be a chain of small kernels with few programs.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.gpu import arange, call

CLUSTERS = 16  # clusters of a program
OTHERS = 128  # clusters they are compared with at a time
ROWS = 64  # rows of each written at a time


def select_rows(
    scores: Float[Array, "B K J C"],
    sizes: Int[Array, "B K C"],
    starts: Int[Array, "B K C"],
    order: Int[Array, "B K N"] | None,
    room: Int[Array, " B"],
    *,
    count: int,
    warps: int = 4,
    interpret: bool = False,
) -> Int[Array, "B K J count"]:
    """See `clusterkv_jax.kernels.select_rows.select_rows`."""
    batch, heads, each, clusters = scores.shape
    if clusters == 0 or count == 0:
        raise NotImplementedError("the GPU kernel of select_rows needs clusters and room.")
    flat = lambda x: x.reshape(batch * heads, x.shape[-1])  # noqa: E731
    # The interpreter writes what is masked back as it was, so that it needs a place of its own.
    width = count + 1 if interpret else count
    rows = call(
        partial(_kernel, count=count, selections=heads * each, each=each, ordered=order is not None),
        jax.ShapeDtypeStruct((batch * heads * each, width), jnp.int32),
        scores.reshape(-1, clusters),
        flat(sizes),
        flat(starts),
        flat(starts if order is None else order),
        jnp.minimum(room, count),
        grid=(pl.cdiv(clusters, CLUSTERS), batch * heads * each),
        warps=warps,
        interpret=interpret,
    )
    return rows[:, :count].reshape(batch, heads, each, count)


def _kernel(scores, sizes, starts, order, room, out, *, count, selections, each, ordered):
    number, selection = pl.program_id(0) * CLUSTERS + arange(CLUSTERS), pl.program_id(1)
    head, clusters = selection // each, scores.shape[1]
    real = number < clusters
    score = plgpu.load(scores.at[selection, number], mask=real, other=-jnp.inf)[:, None]

    def body(i, state):
        place, total = state
        other = i * OTHERS + arange(OTHERS)
        inside = other < clusters
        against = plgpu.load(scores.at[selection, other], mask=inside, other=-jnp.inf)[None, :]
        size = plgpu.load(sizes.at[head, other], mask=inside, other=0)[None, :]
        ahead = (against > score) | ((against == score) & (other[None, :] < number[:, None]))
        return place + jnp.sum(jnp.where(ahead, size, 0), axis=1), total + jnp.sum(size)

    start = (jnp.zeros((CLUSTERS,), jnp.int32), jnp.int32(0))
    place, total = jax.lax.fori_loop(0, pl.cdiv(clusters, OTHERS), body, start)
    limit = room[selection // selections]
    size = plgpu.load(sizes.at[head, number], mask=real, other=0)
    first = plgpu.load(starts.at[head, number], mask=real, other=0)
    wanted = jnp.clip(limit - place, 0, size)

    def write(i, _):
        row = i * ROWS + arange(ROWS)[None, :]
        mask = row < wanted[:, None]
        value = first[:, None] + row
        if ordered:
            value = plgpu.load(order.at[head, value], mask=mask, other=-1)
        plgpu.store(out.at[selection, jnp.where(mask, place[:, None] + row, count)], value, mask=mask)
        return _

    jax.lax.fori_loop(0, pl.cdiv(jnp.max(wanted), ROWS), write, 0)

    @pl.when(pl.program_id(0) == 0)
    def _():
        end = jnp.minimum(total, limit)

        def clear(i, _):
            row = i * ROWS + arange(ROWS)
            plgpu.store(out.at[selection, row], jnp.full((ROWS,), -1, jnp.int32), mask=(row >= end) & (row < count))
            return _

        jax.lax.fori_loop(end // ROWS, pl.cdiv(count, ROWS), clear, 0)
