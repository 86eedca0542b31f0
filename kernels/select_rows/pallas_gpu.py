"""Selection on GPU without a sort: what cannot be chosen is left out first, the rest is short enough to be compared.

    grid (blocks of places, B K J)

    bound       a score that clusters with enough rows stand at or above: those below it are not chosen
    list        the clusters at or above it, in the order of their numbers, in memory of the program's own
    rows        those before a cluster are the sizes of the listed ones that come before it; every place of the block
                finds the cluster whose rows it lies among: few places compare themselves with all clusters of the
                list, many count the marks that the clusters leave in memory where their rows begin

The bound is that of a sample: the best cluster of each group, compared with those of all others. All blocks of a
selection make the same list. Comparing costs the square of its length: few clusters, where as many rows are wanted as
clusters are large, all of them where all scores are equal.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import arange, call, power_of_two

MOST_CLUSTERS = 16384  # what fits in registers
PROGRAMS = 264  # wanted at least: two for each multiprocessor of an H200
# Groups of clusters, the best of which are the sample, at least and at most; wanted: several for each cluster chosen,
# whose size is not known where there is no order.
GROUPS, EACH = (64, 128), 4
# Clusters in a list that is not worth shortening; clusters of the list that are compared at a time; places of a warp
# from which on marks are quicker.
SIZES = {"few": 128, "listed": 32, "marked": 128}
TRIED = 8  # scores in a round that shortens the list
ROUNDS = 8  # at most: TRIED^8 parts of the range are as fine as float32
SPARE = 2  # a longer list may have rows for 1 + 1 / SPARE times what is wanted


def select_rows(
    scores, sizes, starts, order, room, kept=None, active=None, *, count, sinks=0, tuning=None, interpret=False
):  # fmt: skip
    """See `clusterkv_jax.kernels.select_rows.select_rows`."""
    batch, heads, each, clusters = scores.shape
    if clusters == 0 or count == 0 or clusters > MOST_CLUSTERS:
        raise NotImplementedError(f"The GPU kernel of select_rows takes 1 to {MOST_CLUSTERS} clusters and some room.")
    selections = batch * heads * each
    warps = 4 if clusters <= 1024 else 8 if clusters <= 4096 else 16
    places = min(1024, max(32 * warps, power_of_two(count * selections // PROGRAMS)))
    blocks = pl.cdiv(count, places)
    typical = count if order is None else count * clusters // order.shape[-1]  # clusters that fill the room
    groups = min(power_of_two(EACH * typical, GROUPS[0]), GROUPS[1])
    options = SIZES | {"groups": groups} | (tuning or {})
    marked = places >= options["marked"] * warps
    own = (selections, blocks)
    scratch = [jax.ShapeDtypeStruct((*own, 4 if marked else 3, clusters + 1), jnp.int32)]
    # One to spare for what is masked, and seven that keep every program's marks at a multiple of 8 bytes.
    scratch += [jax.ShapeDtypeStruct((*own, places + 8), jnp.int8)] if marked else []

    def flat(x):
        return x.reshape(batch * heads, x.shape[-1])

    # The output starts as `kept`: the kernel writes only the rows of active sequences.
    inputs = () if active is None or kept is None else (active.astype(jnp.int32), kept.reshape(selections, count))
    rows, *_ = call(
        partial(
            _kernel,
            optional=len(inputs),
            sinks=min(sinks, count),
            each=each,
            ordered=order is not None,
            places=places,
            groups=min(options["groups"], power_of_two(clusters, 32) // 8),
            few=options["few"],
            tile=options["listed"] if marked or places < 512 else options["listed"] // 2,
            barrier=(lambda: None) if interpret else plgpu.debug_barrier,
        ),
        (jax.ShapeDtypeStruct((selections, count), jnp.int32), *scratch),
        scores.reshape(-1, clusters),
        flat(sizes),
        flat(starts),
        flat(starts if order is None else order),
        room,
        *inputs,
        grid=(blocks, selections),
        warps=warps,
        aliases={6: 0} if inputs else None,
        interpret=interpret,
    )
    return rows.reshape(batch, heads, each, count)


def _kernel(
    scores, sizes, starts, order, room, *refs, optional, sinks, each, ordered, places, groups, few, tile, barrier
):  # fmt: skip
    inputs, (out, listing, *marks) = refs[:optional], refs[optional:]
    block, selection = pl.program_id(0), pl.program_id(1)
    clusters, count = scores.shape[1], out.shape[1]
    head, number, place = selection // each, arange(power_of_two(clusters, 32)), block * places + arange(places)
    real = number < clusters
    size = plgpu.load(sizes.at[head, number], mask=real, other=0)
    score = plgpu.load(scores.at[selection, number], mask=real, other=0.0)
    start = plgpu.load(starts.at[head, number], mask=real, other=0)
    own = (selection, block)
    for mark in marks:
        plgpu.store(mark.at[*own, arange(places)], jnp.zeros((places,), mark.dtype))
    score = jnp.where(size > 0, score, -jnp.inf)
    row = selection // (scores.shape[0] // room.shape[0])
    limit = jnp.maximum(jnp.minimum(room[row], count) - sinks, 0)

    def at_least(bound):
        """How many clusters these are, and how many rows they have."""
        inside = (score >= bound) & (size > 0)
        return bound, jnp.sum(inside.astype(jnp.int32)), jnp.sum(jnp.where(inside, size, 0))

    state = at_least(_bound(score, size, limit, groups))

    def raised():
        return at_least(_raised(state[0], score, size, limit))

    bound, length, total = jax.lax.cond(state[1] > few, raised, lambda: state)
    listed = (score >= bound) & (size > 0)
    before = jax.lax.cumsum(listed.astype(jnp.int32)) - 1
    # The interpreter writes what is masked back as it was, so that it needs a place of its own.
    at = jnp.where(listed, before, clusters)
    for i, value in enumerate((jax.lax.bitcast_convert_type(score, jnp.int32), size, start)):
        plgpu.store(listing.at[*own, i, at], value, mask=listed)
    barrier()

    rank = place - sinks
    real = (rank >= 0) & (rank < jnp.minimum(limit, total))
    ranked = partial(_ranked, listing, own, length, tile)
    tiles = pl.cdiv(length, tile)
    if marks:
        first = block * places - sinks
        rows = rank + _ahead_by_marks(marks[0], listing, own, first, real, length, tiles, ranked, barrier)
    else:
        rows = rank + _ahead(rank, tiles, ranked)
    if ordered:
        rows = plgpu.load(order.at[head, rows], mask=real, other=0)
    rows = jnp.where(place < sinks, place, jnp.where(real, rows, -1))
    inside = (place < count) & (inputs[0][row] > 0) if inputs else place < count
    plgpu.store(out.at[selection, place], rows, mask=inside)


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
        _, _, total, turn = state
        return (total > limit + limit // SPARE) & (turn < ROUNDS)

    def narrow(state):
        low, high, total, turn = state
        part = arange(TRIED).astype(jnp.float32) / TRIED
        bound = jnp.where(part > 0, low + (high - low) * part, low)
        rows = jnp.sum(jnp.where(score[None, :] >= bound[:, None], size[None, :], 0), axis=1)
        enough = rows >= limit
        low = jnp.max(jnp.where(enough, bound, low))
        high = jnp.min(jnp.where(enough, high, bound))
        return low, high, jnp.min(jnp.where(enough, rows, total)), turn + 1

    low = jnp.maximum(low, jnp.min(jnp.where(some, score, jnp.inf)))
    total = jnp.sum(jnp.where(score >= low, size, 0))
    return jax.lax.while_loop(unsure, narrow, (low, jnp.max(score), total, jnp.int32(0)))[0]


def _ahead(rank, tiles, ranked):
    """For every wanted place of a selection how far ahead of it its row stands by the clusters' `starts`."""

    def search(j, ahead):
        _, size, start, before, _ = ranked(j)
        # As unsigned numbers, those below 0 are beyond every size.
        inside = _unsigned(rank[None, :] - before[:, None]) < _unsigned(size)[:, None]
        return ahead + jnp.sum(jnp.where(inside, (start - before)[:, None], 0), axis=0)

    return jax.lax.fori_loop(0, tiles, search, jnp.zeros_like(rank))


def _ahead_by_marks(marks, listing, own, first_wanted, real, length, tiles, ranked, barrier):
    """The same: clusters list by rank how far ahead they are, and a place's rank is that of the marks up to it."""
    places = real.shape[0]

    def mark(j, skipped):
        mine, size, start, before, rank = ranked(j)
        real, first = mine < length, before - first_wanted
        last = first + size
        plgpu.store(listing.at[*own, 3, jnp.where(real, rank, listing.shape[3] - 1)], start - before, mask=real)
        inside = real & (first < places) & (last > 0)
        at = jnp.where(inside, jnp.maximum(first, 0), places)
        plgpu.store(marks.at[*own, at], jnp.ones(at.shape, marks.dtype), mask=inside)
        return skipped + jnp.sum((real & (last <= 0)).astype(jnp.int32))

    skipped = jax.lax.fori_loop(0, tiles, mark, jnp.int32(0))
    barrier()
    passed = jax.lax.cumsum(plgpu.load(marks.at[*own, arange(places)]).astype(jnp.int32))
    return plgpu.load(listing.at[*own, 3, skipped + passed - 1], mask=real, other=0)


def _ranked(listing, own, length, tile, j):
    """The numbers of tile j of the list, its sizes and starts, and how many rows and clusters are before each."""

    def load(i, number):
        value = plgpu.load(listing.at[*own, i, number], mask=number < length, other=0)
        return jax.lax.bitcast_convert_type(value, jnp.float32) if i == 0 else value

    mine = j * tile + arange(tile)
    score, size, start = (load(i, mine) for i in range(3))

    def compare(i, state):
        before, rank = state
        other = i * tile + arange(tile)
        theirs = load(0, other)[:, None]
        first = (theirs > score[None, :]) | ((theirs == score[None, :]) & (other[:, None] < mine[None, :]))
        before += jnp.sum(jnp.where(first, load(1, other)[:, None], 0), axis=0)
        return before, rank + jnp.sum((first & (other < length)[:, None]).astype(jnp.int32), axis=0)

    none = jnp.zeros((tile,), jnp.int32)
    before, rank = jax.lax.fori_loop(0, pl.cdiv(length, tile), compare, (none, none))
    return mine, size, start, before, rank


def _unsigned(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
