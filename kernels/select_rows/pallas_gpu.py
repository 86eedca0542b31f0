"""Selection on GPU without a sort: what cannot be chosen is left out first, the rest is short enough to be compared.

    grid (blocks of places, B K J)

    bound       a score that clusters with enough rows stand at or above: those below it are not chosen
    list        the clusters at or above it, in the order of their numbers, in memory of the program's own
    rows        those before a cluster are the sizes of the listed ones that come before it; every place of the block
                finds the cluster whose rows it lies among

The bound is that of a sample: the best cluster of each group, compared with those of all others. All blocks of a
selection make the same list. Comparing costs the square of its length: few clusters, where as many rows are wanted as
clusters are large, all of them where all scores are equal.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.gpu import arange, call, power_of_two

MOST_CLUSTERS = 16384  # what fits in registers
PROGRAMS = 264  # wanted at least: two for each multiprocessor of an H200
# Groups of clusters, the best of which are the sample, at least and at most; wanted: several for each cluster chosen,
# whose size is not known where there is no order.
GROUPS, EACH = (64, 128), 4
# Clusters in a list that is not worth shortening; clusters of the list that are compared at a time.
SIZES = {"few": 128, "listed": 32}
TRIED = 8  # scores in a round that shortens the list
ROUNDS = 8  # at most: TRIED^8 parts of the range are as fine as float32
SPARE = 2  # a longer list may have rows for 1 + 1 / SPARE times what is wanted


def select_rows(
    scores: Float[Array, "B K J C"],
    sizes: Int[Array, "B K C"],
    starts: Int[Array, "B K C"],
    order: Int[Array, "B K N"] | None,
    room: Int[Array, " B"],
    kept: Int[Array, "B K J count"] | None = None,
    active: Bool[Array, " B"] | None = None,
    *,
    count: int,
    sinks: int = 0,
    tuning: dict[str, int] | None = None,
    interpret: bool = False,
) -> Int[Array, "B K J count"]:
    """See `clusterkv_jax.kernels.select_rows.select_rows`."""
    batch, heads, each, clusters = scores.shape
    if clusters == 0 or count == 0 or clusters > MOST_CLUSTERS:
        raise NotImplementedError(f"the GPU kernel of select_rows takes 1 to {MOST_CLUSTERS} clusters and some room.")
    selections = batch * heads * each
    warps = 4 if clusters <= 1024 else 8 if clusters <= 4096 else 16
    places = min(1024, max(32 * warps, power_of_two(count * selections // PROGRAMS)))
    blocks = pl.cdiv(count, places)
    wanted = count if order is None else count * clusters // order.shape[-1]
    groups = min(power_of_two(EACH * wanted, GROUPS[0]), GROUPS[1])
    chosen = SIZES | {"groups": groups} | (tuning or {})
    flat = lambda x: x.reshape(batch * heads, x.shape[-1])  # noqa: E731
    # What is kept is in the place of what is chosen, so that inactive batch rows write nothing.
    given = () if active is None or kept is None else (active.astype(jnp.int32), kept.reshape(selections, count))
    rows, _ = call(
        partial(
            _kernel,
            sinks=min(sinks, count),
            each=each,
            ordered=order is not None,
            places=places,
            groups=min(chosen["groups"], power_of_two(clusters, 32) // 8),
            few=chosen["few"],
            tile=chosen["listed"] if places < 512 else chosen["listed"] // 2,
            barrier=(lambda: None) if interpret else plgpu.debug_barrier,
        ),
        (
            jax.ShapeDtypeStruct((selections, count), jnp.int32),
            jax.ShapeDtypeStruct((selections, blocks, 3, clusters + 1), jnp.int32),
        ),
        scores.reshape(-1, clusters),
        flat(sizes),
        flat(starts),
        flat(starts if order is None else order),
        room,
        *given,
        grid=(blocks, selections),
        warps=warps,
        aliases={6: 0} if given else None,
        interpret=interpret,
    )
    return rows.reshape(batch, heads, each, count)


def _kernel(
    scores, sizes, starts, order, room, *refs, sinks, each, ordered, places, groups, few, tile, barrier
):  # fmt: skip
    *given, out, scratch = refs
    block, selection = pl.program_id(0), pl.program_id(1)
    clusters, count = scores.shape[1], out.shape[1]
    head, number = selection // each, arange(power_of_two(clusters, 32))
    real = number < clusters
    size = plgpu.load(sizes.at[head, number], mask=real, other=0)
    score = plgpu.load(scores.at[selection, number], mask=real, other=0.0)
    start = plgpu.load(starts.at[head, number], mask=real, other=0)
    score = jnp.where(size > 0, score, -jnp.inf)
    row = selection // (scores.shape[0] // room.shape[0])
    limit = jnp.maximum(jnp.minimum(room[row], count) - sinks, 0)

    def at_least(bound):
        """How many clusters these are, and how many rows they have."""
        inside = (score >= bound) & (size > 0)
        return bound, jnp.sum(inside.astype(jnp.int32)), jnp.sum(jnp.where(inside, size, 0))

    known = at_least(_bound(score, size, limit, groups))
    raised = lambda: at_least(_raised(known[0], score, size, limit))  # noqa: E731
    bound, length, held = jax.lax.cond(known[1] > few, raised, lambda: known)
    listed = (score >= bound) & (size > 0)
    before = jax.lax.cumsum(listed.astype(jnp.int32)) - 1
    end = jnp.minimum(limit, held)
    # The interpreter writes what is masked back as it was, so that it needs a place of its own.
    at = jnp.where(listed, before, clusters)
    for i, value in enumerate((jax.lax.bitcast_convert_type(score, jnp.int32), size, start)):
        plgpu.store(scratch.at[selection, block, i, at], value, mask=listed)
    barrier()

    place = block * places + arange(places)
    wanted = place - sinks
    found = wanted + _ahead(scratch, (selection, block), wanted, length, tile)
    filled = (wanted >= 0) & (wanted < end)
    if ordered:
        found = plgpu.load(order.at[head, found], mask=filled, other=0)
    found = jnp.where(place < sinks, place, jnp.where(filled, found, -1))
    inside = (place < count) & (given[0][row] > 0) if given else place < count
    plgpu.store(out.at[selection, place], found, mask=inside)


def _bound(score, size, limit, groups):
    """A score at or above which the best clusters of their groups have `limit` rows, -inf if all of them have less."""
    score, size = score.reshape(-1, groups), size.reshape(-1, groups)
    best = jnp.max(score, axis=0)
    size = jnp.max(jnp.where(score == best[None, :], size, 0), axis=0)
    rows = jnp.sum(jnp.where(best[:, None] >= best[None, :], size[:, None], 0), axis=0)
    return jnp.max(jnp.where(rows >= limit, best, -jnp.inf))


def _raised(low, score, size, limit):
    """A bound like `low`, where clusters hardly have more rows than they must.

    Every round tries scores at equal distances between the highest known to be low enough and the lowest that is not.
    """
    some = size > 0

    def unsure(state):
        _, _, held, turn = state
        return (held > limit + limit // SPARE) & (turn < ROUNDS)

    def narrow(state):
        low, high, held, turn = state
        part = arange(TRIED).astype(jnp.float32) / TRIED
        bound = jnp.where(part > 0, low + (high - low) * part, low)
        rows = jnp.sum(jnp.where(score[None, :] >= bound[:, None], size[None, :], 0), axis=1)
        enough = rows >= limit
        low = jnp.max(jnp.where(enough, bound, low))
        high = jnp.min(jnp.where(enough, high, bound))
        return low, high, jnp.min(jnp.where(enough, rows, held)), turn + 1

    low = jnp.maximum(low, jnp.min(jnp.where(some, score, jnp.inf)))
    held = jnp.sum(jnp.where(score >= low, size, 0))
    return jax.lax.while_loop(unsure, narrow, (low, jnp.max(score), held, jnp.int32(0)))[0]


def _ahead(scratch, own, wanted, length, tile):
    """For every wanted place of a selection how far ahead of it its row stands by the clusters' `starts`."""
    tiles = pl.cdiv(length, tile)
    unsigned = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)  # noqa: E731

    def load(i, number):
        value = plgpu.load(scratch.at[*own, i, number], mask=number < length, other=0)
        return jax.lax.bitcast_convert_type(value, jnp.float32) if i == 0 else value

    def search(j, found):
        mine = j * tile + arange(tile)
        score, size, start = (load(i, mine) for i in range(3))

        def compare(i, before):
            other = i * tile + arange(tile)
            theirs = load(0, other)[:, None]
            first = (theirs > score[None, :]) | ((theirs == score[None, :]) & (other[:, None] < mine[None, :]))
            return before + jnp.sum(jnp.where(first, load(1, other)[:, None], 0), axis=0)

        before = jax.lax.fori_loop(0, tiles, compare, jnp.zeros((tile,), jnp.int32))
        # As unsigned numbers, those below 0 are beyond every size.
        inside = unsigned(wanted[None, :] - before[:, None]) < unsigned(size)[:, None]
        return found + jnp.sum(jnp.where(inside, (start - before)[:, None], 0), axis=0)

    return jax.lax.fori_loop(0, tiles, search, jnp.zeros_like(wanted))
