"""Row merge on GPU in two kernels: the score that an edge must reach, then the merges of every chunk, in place.

1. `_threshold`, a program per head: bisection on the scores, read as integers of the same order, until as many edges
   reach the threshold as are to be merged. A count per step, from scores that stay in the L1 cache. Where equal
   scores straddle the limit, a second bisection finds up to which edge they are merged.
2. `_merge`, a program per chunk: reads the a rows that are merged and the b rows that they join, adds up
   n_a (k_a - k_b) by b row as a product with a matrix of zeros and ones, and writes those b rows. The differences are
   cut into bf16 parts, whose products with 0 and 1 are exact, so the sums are those of float32 (to 2^-16 where the
   cache is 16-bit) and equal rows merge without error. No atomics: every b row has one writer.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.gpu import arange, bfloat16_parts, call, check_dtypes, dot, load_rows, power_of_two

MOST_CHUNK = 512
MOST_ROWS = 128  # A or B rows of a tile
MOST_COLUMNS = 64
WARPS = 8
SCAN_WARPS = 32
SCORES = 8192  # scores of a tile
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def row_merge(
    keys: Float[Array, "B K C D"],
    values: Float[Array, "B K C D"],
    degree: Float[Array, "B K C"],
    rows: Int[Array, "B K R"],
    length: Int[Array, "B K"],
    match: Int[Array, "B K A"],
    score: Float[Array, "B K A"],
    merges: Int[Array, " B"],
    *,
    chunk: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B K C D"], Float[Array, "B K C D"], Float[Array, "B K C"], Int[Array, "B K R"]]:
    """See `clusterkv_jax.kernels.row_merge.row_merge`."""
    check_dtypes("row_merge", keys, values)
    batch, heads, _, width = keys.shape
    listed, edges = rows.shape[2], score.shape[2]
    chunk = min(chunk, listed + listed % 2)
    if chunk > MOST_CHUNK:
        raise NotImplementedError(f"the GPU kernel of row_merge takes chunks of up to {MOST_CHUNK} rows, got {chunk}.")
    if edges == 0:
        return keys, values, degree, rows

    def flat(x: Array) -> Array:
        return x.reshape(batch * heads, *x.shape[2:])

    score, match, length = flat(score), flat(match), length.reshape(-1)
    wanted = jnp.broadcast_to(merges[:, None], (batch, heads)).reshape(-1)
    chunks = pl.cdiv(edges, chunk // 2)
    threshold, last, before = _thresholds(score, wanted, length, chunk, chunks, interpret)

    tile = min(power_of_two(chunk // 2, 16), MOST_ROWS)
    blocks = pl.cdiv(chunk // 2, tile)
    kernel = partial(_merge, chunk=chunk, tile=tile, width=width)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    in_place = [flat(keys), flat(values), flat(degree)]
    made = call(
        kernel,
        (*map(shape, in_place), shape(flat(rows))),
        *in_place,
        flat(rows),
        length,
        match,
        score,
        threshold,
        last,
        before,
        grid=(chunks * blocks, batch * heads),
        warps=WARPS if tile == MOST_ROWS else 4,
        aliases={0: 0, 1: 1, 2: 2},
        interpret=interpret,
    )
    keys, values, degree, rows = (x.reshape(batch, heads, *x.shape[1:]) for x in made)
    return keys, values, degree, rows


def _thresholds(
    score: Array, wanted: Array, length: Array, chunk: int, chunks: int, interpret: bool
) -> tuple[Array, Array, Array]:
    """Per head: the key that a merged edge has at least, the last edge of exactly that key that is merged, and the
    number of edges merged before each chunk.
    """
    heads, edges = score.shape
    one = jax.ShapeDtypeStruct((heads,), jnp.int32)
    return call(
        partial(_threshold, chunk=chunk, chunks=chunks, edges=edges),
        (one, one, jax.ShapeDtypeStruct((heads, chunks), jnp.int32)),
        score,
        wanted,
        length,
        grid=(heads,),
        warps=min(SCAN_WARPS, max(4, power_of_two(edges) // 256)),
        interpret=interpret,
    )


def _key(score: Array) -> Array:
    """float32 as i32 of the same order; 0 = -0."""
    bits = jax.lax.bitcast_convert_type(score + 0.0, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(HIGHEST))


def _merged(score: Array, edge: Array, threshold: Array, last: Array) -> Array:
    """Whether these edges are among the best."""
    key = _key(score)
    return (score > -jnp.inf) & ((key > threshold) | ((key == threshold) & (edge <= last)))


def _threshold(score, wanted, length, threshold, last, before, *, chunk, chunks, edges):
    """Threshold of one head; see `_thresholds`."""
    head = pl.program_id(0)
    k = wanted[head]
    n = jnp.minimum((length[head] + 1) // 2, edges)
    size = min(SCORES, power_of_two(edges, 32))

    def tile(i):
        edge = i * size + arange(size)
        value = plgpu.load(score.at[head, edge], mask=edge < n, other=-jnp.inf)
        return edge, value > -jnp.inf, _key(value)

    def count(chosen):
        """How many edges `chosen` is true for."""
        body = lambda i, total: total + chosen(*tile(i)).astype(jnp.int32)  # noqa: E731
        return jnp.sum(jax.lax.fori_loop(0, pl.cdiv(n, size), body, jnp.zeros((size,), jnp.int32)))

    def bounds(i, state):
        _, real, key = tile(i)
        low, high = state
        return jnp.minimum(low, jnp.where(real, key, HIGHEST)), jnp.maximum(high, jnp.where(real, key, LOWEST))

    start = (jnp.full((size,), HIGHEST, jnp.int32), jnp.full((size,), LOWEST, jnp.int32))
    lows, highs = jax.lax.fori_loop(0, pl.cdiv(n, size), bounds, start)
    low, high = jnp.min(lows), jnp.max(highs) + 1

    # At least k edges reach low (or there are fewer than k), fewer than k reach high.
    def halve(state):
        low, high, reached = state
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        found = count(lambda edge, real, key: real & (key >= middle))
        enough = found >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle), jnp.where(enough, found, reached)

    def undecided(state):
        low, high, reached = state
        return (reached > k) & (low < high - 1)

    low, _, reached = jax.lax.while_loop(undecided, halve, (low, high, count(lambda edge, real, key: real)))

    # Of the edges of exactly that key the first few; all of them where no more reach it than are wanted.
    room = k - count(lambda edge, real, key: real & (key > low))

    def halve_last(state):
        low_edge, high_edge = state
        middle = (low_edge + high_edge) // 2
        found = count(lambda edge, real, key: real & (key == low) & (edge <= middle))
        return jnp.where(found < room, middle, low_edge), jnp.where(found < room, high_edge, middle)

    _, last_edge = jax.lax.while_loop(
        lambda state: (reached > k) & (state[0] < state[1] - 1), halve_last, (jnp.int32(-1), n)
    )
    none = k <= 0
    low, last_edge = jnp.where(none, HIGHEST, low), jnp.where(none, -1, last_edge)
    threshold[head] = low
    last[head] = last_edge

    half = chunk // 2
    across, down = power_of_two(half), max(1, size // power_of_two(half))

    def offsets(i, total):
        number = i * down + arange(down)
        j = arange(across)
        edge = number[:, None] * half + j[None, :]
        value = plgpu.load(score.at[head, edge], mask=(edge < n) & (j < half)[None, :], other=-jnp.inf)
        merged = jnp.sum(_merged(value, edge, low, last_edge).astype(jnp.int32), axis=1)
        plgpu.store(before.at[head, number], total + jnp.cumsum(merged) - merged, mask=number < chunks)
        return total + jnp.sum(merged)

    jax.lax.fori_loop(0, pl.cdiv(chunks, down), offsets, jnp.int32(0))


def _merge(
    keys, values, degree, rows, length, match, score, threshold, last, before,
    new_keys, new_values, new_degree, new_rows, *, chunk, tile, width,
):  # fmt: skip
    """One tile of B rows of one chunk: their merges, and the list entries of the A and B rows at their offsets."""
    del keys, values  # in place: read and written as the outputs that alias them
    half, blocks = chunk // 2, pl.cdiv(chunk // 2, tile)
    head, number, block = pl.program_id(1), pl.program_id(0) // blocks, pl.program_id(0) % blocks
    n = length[head]
    first = number * chunk
    limits = threshold[head], last[head]

    def a_side(i):
        """One tile of A rows: which are merged, which of them here, their slots, those of their b rows, degrees, and
        the matrix [B row, A row] of who joins whom.
        """
        a = i * tile + arange(tile)
        place, edge = first + 2 * a, number * half + a
        inside = (a < half) & (place < n)
        value = plgpu.load(score.at[head, edge], mask=inside, other=-jnp.inf)
        merged = _merged(value, edge, *limits)
        partner = plgpu.load(match.at[head, edge], mask=merged, other=0)
        joins = (partner - first) // 2 - block * tile
        here = merged & (joins >= 0) & (joins < tile)
        slot = plgpu.load(rows.at[head, place], mask=inside, other=0)
        b_slot = plgpu.load(rows.at[head, partner], mask=here, other=0)
        weight = plgpu.load(new_degree.at[head, slot], mask=here, other=0.0)
        who = here[None, :] & (joins[None, :] == arange(tile)[:, None])
        return place, inside, merged, here, slot, b_slot, weight, who

    @pl.when(first < n)
    def _():
        sides = [a_side(i) for i in range(blocks)]
        b = block * tile + arange(tile)
        b_place = first + 2 * b + 1
        b_inside = (b < half) & (b_place < n)
        b_slot = plgpu.load(rows.at[head, b_place], mask=b_inside, other=0)
        total = plgpu.load(new_degree.at[head, b_slot], mask=b_inside, other=1.0)
        grown = jnp.zeros((tile,), jnp.int32)
        for *_, weight, who in sides:
            total += jnp.sum(jnp.where(who, weight[None, :], 0.0), axis=1)
            grown += jnp.sum(who.astype(jnp.int32), axis=1)
        grown = grown > 0

        place, inside, merged = (sides[0] if blocks == 1 else a_side(block))[:3]
        gone = jnp.cumsum(merged.astype(jnp.int32)) + before[head, number]
        for i in range(blocks - 1):
            gone += jnp.where(i < block, jnp.sum(sides[i][2].astype(jnp.int32)), 0)
        _put(new_rows, head, place - gone, sides[0][4] if blocks == 1 else a_side(block)[4], inside & ~merged)
        _put(new_rows, head, b_place - gone, b_slot, b_inside)
        _put(new_degree, head, b_slot, total, grown)

        for x in (new_keys, new_values):
            for start in range(0, width, MOST_COLUMNS):
                columns = arange(min(MOST_COLUMNS, power_of_two(width, 16)), start)
                _move(x, head, columns, sides, b_slot, total, grown, width)


def _move(x, head, columns, sides, b_slot, total, grown, width):
    """Write the means of the b rows that grew, in these columns."""
    parts = 3 if x.dtype == jnp.float32 else 2
    change = jnp.zeros((b_slot.shape[0], columns.shape[0]), jnp.float32)
    for *_, here, a_slot, partner, weight, who in sides:
        a = load_rows(x, head, a_slot, columns, here, width).astype(jnp.float32)
        b = load_rows(x, head, partner, columns, here, width).astype(jnp.float32)
        for part in bfloat16_parts(weight[:, None] * (a - b), parts):
            change += dot(who.astype(jnp.bfloat16), part)
    old = load_rows(x, head, b_slot, columns, grown, width).astype(jnp.float32)
    mean = (old + change / total[:, None]).astype(x.dtype)
    inside = grown[:, None] if width % columns.shape[0] == 0 else grown[:, None] & (columns < width)[None, :]
    target = jnp.where(grown, b_slot, x.shape[1])  # masked rows point nowhere: nothing is written twice
    plgpu.store(x.at[head, target[:, None], columns[None, :]], mean, mask=inside)


def _put(ref, head, index, value, mask):
    """ref[head, index] = value where `mask`."""
    plgpu.store(ref.at[head, jnp.where(mask, index, ref.shape[1])], value, mask=mask)
