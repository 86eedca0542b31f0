"""Selection on GPU without a sort: what cannot be chosen is left out first, the rest is short enough to be compared.

    grid (blocks of places, B K J)

    bound       a score that clusters with enough rows stand at or above: those below it are not chosen
    list        the clusters at or above it, in the order of their numbers, in memory of the program's own
    rows        those before a cluster are the sizes of the listed ones that come before it; a cluster's rows that
                belong to places of the block are written there

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
# Groups of clusters, the best of which are the sample, at least and at most; wanted: several for each cluster chosen.
GROUPS, EACH = (64, 128), 4
# Clusters in a list that is not worth shortening; clusters of the list that are written at a time.
SIZES = {"few": 128, "listed": 16}
LANES = {True: 128, False: 16}  # rows of a cluster that are written at a time, ordered or in pages
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
    warps = (tuning or {}).get("warps", warps)
    places = min(1024, max(32 * warps, power_of_two(count * selections // PROGRAMS)))
    places = (tuning or {}).get("places", places)
    blocks = pl.cdiv(count, places)
    wanted = count if order is None else count * clusters // order.shape[-1]
    groups = min(power_of_two(EACH * wanted, GROUPS[0]), GROUPS[1])
    chosen = SIZES | {"groups": groups, "lanes": LANES[order is not None]} | (tuning or {})
    flat = lambda x: x.reshape(batch * heads, x.shape[-1])  # noqa: E731
    # What is kept is in the place of what is chosen, so that inactive batch rows write nothing.
    given = ()
    # The interpreter writes what is masked back as it was, so that it needs a place of its own.
    spare = 1 if interpret else 0
    if active is not None and kept is not None:
        given = active.astype(jnp.int32), jnp.pad(kept.reshape(selections, count), ((0, 0), (0, spare)))
    rows, _ = call(
        partial(
            _kernel,
            sinks=min(sinks, count),
            each=each,
            ordered=order is not None,
            places=places,
            groups=min(chosen["groups"], power_of_two(clusters, 32) // 8),
            few=chosen["few"],
            tile=chosen["listed"],
            lanes=chosen["lanes"],
            spare=spare,
        ),
        (
            jax.ShapeDtypeStruct((selections, count + spare), jnp.int32),
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
    return rows[:, :count].reshape(batch, heads, each, count)


def _kernel(
    scores, sizes, starts, order, room, *refs, sinks, each, ordered, places, groups, few, tile, lanes, spare
):  # fmt: skip
    *given, out, scratch = refs
    block, selection = pl.program_id(0), pl.program_id(1)
    clusters, count = scores.shape[1], out.shape[1] - spare
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
    at = jnp.where(listed, before, clusters)
    for i, value in enumerate((jax.lax.bitcast_convert_type(score, jnp.int32), size, start)):
        plgpu.store(scratch.at[selection, block, i, at], value, mask=listed)
    if not spare:  # other threads of this program read the list
        plgpu.debug_barrier()

    active = given[0][row] > 0 if given else True
    first = block * places - sinks
    high = jnp.where(active, jnp.minimum(first + places, end), first)

    def write(mine, before):
        """The rows of the listed clusters `mine`, before which there are so many, at the places of this block."""
        size, start = (plgpu.load(scratch.at[selection, block, i, mine], mask=mine < length, other=0) for i in (1, 2))
        begin, last = jnp.maximum(first - before, 0), jnp.minimum(size, high - before)

        def some(i, carry):
            row = begin[:, None] + i * lanes + arange(lanes)[None, :]
            inside = row < last[:, None]
            found, place = start[:, None] + row, sinks + before[:, None] + row
            if ordered:
                found = plgpu.load(order.at[head, found], mask=inside, other=0)
            plgpu.store(out.at[selection, jnp.where(inside, place, count)], found, mask=inside)
            return carry

        jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(jnp.max(last - begin), 0), lanes), some, 0)

    _with_rows_before(scratch, (selection, block), length, tile, write)
    place = block * places + arange(places)
    rest = (place < sinks) | (place >= sinks + end)
    inside = (place < count) & rest & active
    plgpu.store(out.at[selection, place], jnp.where(place < sinks, place, -1), mask=inside)


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


def _with_rows_before(scratch, own, length, tile, do):
    """For every tile of the list: its clusters, and the rows of the clusters that come before each."""
    tiles = pl.cdiv(length, tile)

    def load(i, number):
        value = plgpu.load(scratch.at[*own, i, number], mask=number < length, other=0)
        return jax.lax.bitcast_convert_type(value, jnp.float32) if i == 0 else value

    def rank(j, carry):
        mine = j * tile + arange(tile)
        score = load(0, mine)

        def compare(i, before):
            other = i * tile + arange(tile)
            theirs = load(0, other)[:, None]
            first = (theirs > score[None, :]) | ((theirs == score[None, :]) & (other[:, None] < mine[None, :]))
            return before + jnp.sum(jnp.where(first, load(1, other)[:, None], 0), axis=0)

        do(mine, jax.lax.fori_loop(0, tiles, compare, jnp.zeros((tile,), jnp.int32)))
        return carry

    jax.lax.fori_loop(0, tiles, rank, 0)
