"""Row merge on GPU in three kernels: the score that an edge must reach, who joins whom, and the merges, in place.

1. `_threshold`, a program per head: the score that as many edges reach as are to be merged, and of equal ones the last
   that is (`kernels/best_scores.py`).
2. `_plan`, a program per chunk: its merged a rows sorted by their b row (a place is a count of smaller ones, no sort),
   and the list without them.
3. `_move`, so many programs that take few b rows in turns: reads their a rows a few at a time, adds n_a (k_a - k_b) of
   one after the other in float32, for keys and values at once, and writes the b rows that have any. Every row has one
   writer and a fixed order: no atomics, same result in every run, and equal rows merge without error. Quantised rows
   are merged in the basis of their codes, which a mean may be taken in as in any other, and quantised again.

Bytes: 3 scans of 4-byte lists, then every merged a row once and every b row that grows twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from clusterkv_jax.kernels.best_scores import is_best, limit_of, tile_of, warps_of
from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, load_numbers, power_of_two, store_numbers
from clusterkv_jax.kernels.quantised import as_array, squares_of

MOST_CHUNK = 512
# b rows of a turn of `_move`, and its programs: later rounds have few rows in long lists, so most would only start.
SIZES = {"plan_warps": 4, "moved_rows": 1, "move_warps": 1, "move_programs": 2**15}
# Rows that join the same b row: looked up a turn ahead, then read at once. Most b rows have one or two, some draw in
# whatever is near.
EARLY, JOINS = 2, 4


def row_merge(
    keys, values, degree, rows, length, match, score, merges, squares=(None, None),
    *, chunk, sizes=None, interpret=False,
):  # fmt: skip
    """See `clusterkv_jax.kernels.row_merge.row_merge`. `sizes` go before `SIZES`."""
    check_dtypes("row_merge", keys, values)
    batch, heads = degree.shape[:2]
    entries, edges = rows.shape[2], score.shape[2]
    chunk = min(chunk, entries + entries % 2)
    if chunk > MOST_CHUNK:
        raise NotImplementedError(f"The GPU kernel of row_merge takes chunks of up to {MOST_CHUNK} rows, got {chunk}.")
    if edges == 0:
        return keys, values, degree, rows, squares

    def flat(x: Array) -> Array:
        return x.reshape(batch * heads, *x.shape[2:])

    sizes = SIZES | dict(sizes or {})
    # A head that has overflowed counts rows that are on no list.
    score, match, length = flat(score), flat(match), jnp.minimum(length, entries).reshape(-1)
    planned = flat(degree), flat(rows), length, match, score, merges
    new_degree, new_rows, *moves = _planned(*planned, chunk, sizes["plan_warps"], interpret)
    in_place = jax.tree.map(flat, (keys, values, squares))
    programs = min(pl.cdiv(moves[0].shape[1], sizes["moved_rows"]), pl.cdiv(sizes["move_programs"], batch * heads))
    outputs = call(
        partial(_move, tile=sizes["moved_rows"], programs=programs),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), in_place),
        *in_place,
        flat(rows),
        length,
        *moves,
        grid=(programs, batch * heads),
        warps=sizes["move_warps"],
        aliases={i: i for i in range(len(jax.tree.leaves(in_place)))},
        interpret=interpret,
    )
    merged = *outputs[:2], new_degree, new_rows, outputs[2]
    return jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[1:]), merged)


def _planned(degree, rows, length, match, score, merges, chunk, warps, interpret):
    """Degrees and rows after the merges, and for each row that moves: total, target, weight, and its edges' start and
    count.
    """
    half, chunks = chunk // 2, pl.cdiv(score.shape[1], chunk // 2)
    listed = jax.ShapeDtypeStruct((len(score), chunks * half), jnp.int32)
    weights = jax.ShapeDtypeStruct(listed.shape, jnp.float32)
    threshold, last, before = _thresholds(score, merges, length, chunk, chunks, interpret)
    return call(
        partial(_plan, half=half, barrier=not interpret),
        (
            jax.ShapeDtypeStruct(degree.shape, jnp.float32),
            jax.ShapeDtypeStruct(rows.shape, jnp.int32),
            weights,
            listed,
            weights,
            listed,
            listed,
        ),
        degree,
        rows,
        length,
        match,
        score,
        threshold,
        last,
        before,
        grid=(chunks, len(score)),
        warps=warps if half <= 128 else 16,
        aliases={0: 0},
        interpret=interpret,
    )


def _thresholds(
    score: Array, merges: Int[Array, " B"], length: Array, chunk: int, chunks: int, interpret: bool
) -> tuple[Array, Array, Array]:
    """Per head: the key that a merged edge has at least, the last edge of exactly that key that is merged, and the
    number of edges merged before each chunk.
    """
    heads, edges = score.shape
    one = jax.ShapeDtypeStruct((heads,), jnp.int32)
    return call(
        partial(_threshold, chunk=chunk, chunks=chunks, edges=edges, per_sequence=heads // len(merges)),
        (one, one, jax.ShapeDtypeStruct((heads, chunks), jnp.int32)),
        score,
        merges,
        length,
        grid=(heads,),
        warps=warps_of(edges),
        interpret=interpret,
    )


def _threshold(score, merges, length, threshold, last, before, *, chunk, chunks, edges, per_sequence):
    """Threshold of one head; see `_thresholds`."""
    head = pl.program_id(0)
    n = jnp.minimum((length[head] + 1) // 2, edges)
    size = tile_of(edges)

    def load(tile):
        edge = tile * size + arange(size)
        return edge, plgpu.load(score.at[head, edge], mask=edge < n, other=-jnp.inf)

    low, last_edge = limit_of(load, size, 1 if edges <= size else pl.cdiv(n, size), n, merges[head // per_sequence])
    threshold[head] = low
    last[head] = last_edge

    half = chunk // 2
    across = power_of_two(half)
    down = max(1, min(size, 8192) // across)

    def offsets(i, total):
        number = i * down + arange(down)
        j = arange(across)
        edge = number[:, None] * half + j[None, :]
        value = plgpu.load(score.at[head, edge], mask=(edge < n) & (j < half)[None, :], other=-jnp.inf)
        merges_before = jnp.sum(is_best(value, edge, low, last_edge).astype(jnp.int32), axis=1)
        plgpu.store(before.at[head, number], total + jnp.cumsum(merges_before) - merges_before, mask=number < chunks)
        return total + jnp.sum(merges_before)

    jax.lax.fori_loop(0, pl.cdiv(chunks, down), offsets, jnp.int32(0))


def _plan(
    degree, rows, length, match, score, threshold, last, before,
    new_degree, new_rows, total, targets, weight, start, count, *, half, barrier,
):  # fmt: skip
    """One chunk: the new list entries of its rows, and its merged a rows in the order of their b rows."""
    del degree  # in place: read and written as the output that aliases it
    head, number = pl.program_id(1), pl.program_id(0)
    n = length[head]
    i = arange(power_of_two(half))
    edge = number * half + i
    a_inside, b_inside = ((i < half) & (2 * edge + parity < n) for parity in (0, 1))

    @pl.when(2 * number * half < n)
    def _():
        value = plgpu.load(score.at[head, edge], mask=a_inside, other=-jnp.inf)
        a_slot = plgpu.load(rows.at[head, 2 * edge], mask=a_inside, other=0)
        b_slot = plgpu.load(rows.at[head, 2 * edge + 1], mask=b_inside, other=0)
        partner = plgpu.load(match.at[head, edge], mask=a_inside, other=0)
        a_degree = plgpu.load(new_degree.at[head, a_slot], mask=a_inside, other=0.0)
        b_degree = plgpu.load(new_degree.at[head, b_slot], mask=b_inside, other=0.0)
        is_merged = is_best(value, edge, threshold[head], last[head])
        gone = before[head, number] + jnp.cumsum(is_merged.astype(jnp.int32))
        _put(new_rows, head, 2 * edge - gone, a_slot, a_inside & ~is_merged)
        _put(new_rows, head, 2 * edge + 1 - gone, b_slot, b_inside)

        # b of every merged a, as a number within the chunk; of the others one beyond all.
        b = jnp.where(is_merged, partner // 2 - number * half, half)
        # Sums run down the columns: along the rows they would be shuffles between threads.
        joins = jnp.where(i < half, jnp.sum((b[:, None] == i[None, :]).astype(jnp.int32), axis=0), 0)
        order = b * half + i
        place = jnp.sum((order[:, None] < order[None, :]).astype(jnp.int32), axis=0)
        first = number * half + jnp.cumsum(joins) - joins
        _put(targets, head, number * half + place, a_slot, is_merged)
        _put(weight, head, number * half + place, a_degree, is_merged)
        _put(start, head, edge, first, i < half)
        _put(count, head, edge, joins, i < half)
        if barrier:  # other threads wrote the degrees; a third sum over all pairs took longer than these reads
            plgpu.debug_barrier()

        def add(j, total):
            return total + plgpu.load(weight.at[head, first + j], mask=j < joins, other=0.0)

        grown = jax.lax.fori_loop(0, jnp.max(joins), add, b_degree)
        _put(total, head, edge, grown, i < half)
        _put(new_degree, head, b_slot, grown, b_inside & (joins > 0))


def _move(
    keys, values, squares, rows, length, total, targets, weight, start, count,
    new_keys, new_values, new_squares, *, tile, programs,
):  # fmt: skip
    """A few b rows a turn: the means of themselves and of the a rows that join them."""
    del keys, values, squares  # in place: read and written as the outputs that alias them
    program, head = pl.program_id(0), pl.program_id(1)
    edges = jnp.minimum(length[head] // 2, start.shape[1])
    turns = jnp.maximum(pl.cdiv(pl.cdiv(edges, tile) - program, programs), 0)

    def grown(turn):
        """The b rows of a turn: how many join each, its slot, the first of these, and the degree that it grows to."""
        edge = (turn * programs + program) * tile + arange(tile)
        inside = edge < edges

        def load(ref, at, other):
            return plgpu.load(ref.at[head, at], mask=inside, other=other)

        return load(count, edge, 0), load(rows, 2 * edge + 1, 0), load(start, edge, 0), load(total, edge, 1.0)

    def joining(begin, joins, j):
        """The slots and the degrees of what joins as number j."""

        def load(ref, other):
            return plgpu.load(ref.at[head, begin + j], mask=j < joins, other=other)

        return load(targets, 0), load(weight, 0.0)

    def earliest_of(rows):
        joins, _, first, _ = rows
        return [joining(first, joins, j) for j in range(EARLY)]

    def turn(i, ahead):
        (joins, slot, first, whole), earliest, following = ahead
        # What the next turns look up is on its way while this one waits for its rows.
        later = grown(i + 2), earliest_of(following)

        @pl.when(jnp.max(joins) > 0)
        def _():
            both = tuple(zip((new_keys, new_values), new_squares, strict=True))
            _move_rows(both, head, slot, whole, joins, earliest, partial(joining, first, joins))

        return following, later[1], later[0]

    now = grown(0)
    jax.lax.fori_loop(0, turns, turn, (now, earliest_of(now), grown(1)))


def _move_rows(both, head, slot, total, joins, earliest, joining):
    """b rows of keys and values as the means of themselves and of what joins them: `earliest`, then the others of
    `joining`.
    """
    _, slots, width = as_array(both[0][0]).shape
    columns, grows = arange(power_of_two(width, 16)), joins > 0

    def load(at, mask):
        return [load_numbers(x, head, at, columns, mask) for x, _ in both]

    own = load(slot, grows)

    def add(numbers, looked_up, change):
        # Loads first, so that none waits for another; sums in the order of the rows.
        rows = [load(at, j < joins) for j, (at, _) in zip(numbers, looked_up, strict=True)]
        for (_, n), row in zip(looked_up, rows, strict=True):
            change = jax.tree.map(lambda more, a, b, n=n: more + n[:, None] * (a - b), change, row, own)
        return change

    def several(turn, change):
        numbers = [EARLY + turn * JOINS + j for j in range(JOINS)]
        return add(numbers, [joining(j) for j in numbers], change)

    change = add(range(EARLY), earliest, jax.tree.map(jnp.zeros_like, own))
    turns = pl.cdiv(jnp.maximum(jnp.max(joins) - EARLY, 0), JOINS)
    change = jax.lax.fori_loop(0, turns, several, change)
    n = jnp.where(grows, total, 1.0)[:, None]
    # Masked rows point nowhere: nothing is written twice.
    at = jnp.where(grows, slot, slots)
    for (x, squares), parts, more in zip(both, own, change, strict=True):
        mean = [part + added / n for part, added in zip(parts, more, strict=True)]
        stored = store_numbers(x, head, at, columns, mean, grows)
        if squares is not None:
            plgpu.store(squares.at[head, at], squares_of(stored), mask=grows)


def _put(ref, head, index, value, mask):
    """ref[head, index] = value where `mask`; the other entries point nowhere."""
    plgpu.store(ref.at[head, jnp.where(mask, index, ref.shape[1])], value, mask=mask)
