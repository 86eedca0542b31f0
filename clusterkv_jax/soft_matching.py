"""Chunked soft matching: one round, rounds to a budget, and the degree-weighted merge (CentroidKV section 5, Chelsea
5).

One round over the middle rows of a head (sinks and recent rows stay out), chunk 8, merging the 3 best edges:

    offset     0 1 2 3 4 5 6 7 | 0 1 2 3 4 5 6 7        A even, B odd; each a has one edge, to its best b of the chunk
    edges      0>3 2>3 4>5 6>1 | 0>1 2>7 ...            the best 3 of all chunks are merged, per KV head
    merged     . 1 . 3 4 5 6 7 | . 1 2 3 4 5 6 7        an a joins its b, which becomes the mean of all that joined
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.budget import look_up
from clusterkv_jax.cache.layers import LayerCache, compact, key_numbers, take_slots
from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import dequantised, row_squares
from clusterkv_jax.kernels.row_merge import Squares, row_merge
from clusterkv_jax.runtime.dispatch import traits

# Rows whose keys are in float32 at once, where codes cannot be matched as they are.
WHOLE_ROWS = 1024


@dataclass(frozen=True)
class Edges:
    """What GravityKV's edges count beside the distance of their keys: the likeness of values, and the degrees."""

    value_weight: float
    gravity: float


def merge_round(
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    degree: Float[Array, "B K N"],
    *,
    merges: int,
    chunk: int,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R D"], Float[Array, "B K R"], Int[Array, "B K R"]]:
    """One round over all N rows, with neither sinks nor recent rows: the `merges` best edges of each head are merged.

    Returns:
        keys, values, degree of the R = N - merges rows that remain, in positional order, and their row numbers before
        the round; a centroid stands at its b row.

    Raises:
        ValueError: if `merges` is negative or more than the edges there are, or `chunk` is odd.
    """
    batch, heads, rows, _ = keys.shape
    edges = int(edge_counts(rows, chunk)[rows])
    if not 0 <= merges <= edges:
        raise ValueError(f"merges must be between 0 and the {edges} edges of {rows} rows, got {merges}.")
    layer = LayerCache(
        keys=keys,
        values=values,
        degree=degree.astype(jnp.float32),
        length=jnp.full((batch, heads), rows, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, heads, rows)),
    )
    layer, slots, _ = merge_best(layer, jnp.asarray(layer.positions), jnp.full(batch, merges, jnp.int32), chunk=chunk)
    layer = pick(layer, slots, 0, rows - merges)
    assert layer.positions is not None
    return layer.keys, layer.values, layer.degree, layer.positions


def cluster(
    layer: LayerCache, budget: Int[Array, " B"], rounds: Int[Array, " B"], schedule: np.ndarray, **options: Any
) -> tuple[LayerCache, Int[Array, " B"]]:
    """`cluster_in_place`, with the rows moved to the front: the layer with its budget met, and the rounds done."""
    layer, left, rounds = cluster_in_place(layer, budget, rounds, schedule, **options)
    return compact(layer, left), rounds


def cluster_in_place(
    layer: LayerCache,
    budget: Int[Array, " B"],
    rounds: Int[Array, " B"],
    schedule: np.ndarray,
    *,
    sinks: int,
    recent: int,
    chunk: int,
    slots: int | None = None,
    edges: Edges | None = None,
    expected: tuple[int, ...] = (),
    enough: bool = False,
    squares: Squares | None = None,
) -> tuple[LayerCache, Int[Array, "B K slots"], Int[Array, " B"]]:
    """Rounds of matching until every head of a sequence holds exactly its `budget` rows.

    All heads of a layer hold equally many rows, so one count per sequence steers them. Rows with no more than their
    budget stay as they are, bit for bit. Rows are merged where they lie.

    Args:
        layer: the rows; C may exceed what is used.
        budget: rows to keep, B.
        rounds: rounds done so far in the life of each request (Chelsea's ratio decays with it).
        schedule: i32 [rounds, C + 1], the edges to merge by round (the last entry serves all later ones) and by the
            number of middle rows; see `merge_schedule`.
        sinks: first rows that are never merged.
        recent: last rows that are never merged.
        chunk: rows per chunk.
        slots: slots that the rows are to have, which the caller knows to suffice; by default as many as `layer` has.
        edges: GravityKV's score instead of the cosine of keys.
        expected: rows that a head holds at most before each of so many rounds, as `rows_by_round` tells. They are done
            without asking the device whether there is more to merge, for a GPU that would idle until the answer is
            back. Rounds with nothing to merge change nothing.
        enough: the caller knows that no more rounds are needed, and the program asks the device nothing.
        squares: of keys and values, where the caller knows them.

    Returns:
        the layer with its budget met, the slots of its rows, in their order and then -1, and the rounds done.
    """
    middle = jnp.arange(sinks, max(layer.capacity, sinks), dtype=jnp.int32)
    layer, listed, rounds = merge_listed(
        *(layer, jnp.broadcast_to(middle, (*layer.length.shape, middle.size)), budget, rounds, schedule),
        sinks=sinks,
        recent=recent,
        chunk=chunk,
        edges=edges,
        expected=expected,
        enough=enough,
        squares=squares,
    )
    return layer, slots_left(layer, listed, sinks, layer.capacity if slots is None else slots), rounds


def merge_listed(
    layer: LayerCache,
    listed: Int[Array, "B K R"],
    budget: Int[Array, " B"],
    rounds: Int[Array, " B"],
    schedule: np.ndarray,
    *,
    sinks: int = 0,
    recent: int = 0,
    chunk: int,
    edges: Edges | None = None,
    expected: tuple[int, ...] = (),
    enough: bool = False,
    squares: Squares | None = None,
) -> tuple[LayerCache, Int[Array, "B K left"], Int[Array, " B"]]:
    """`cluster` of the listed rows, where they lie: a centroid stays in the slot of its b row, others are not touched.

    Quantised rows are merged in float32 and quantised again; rows that none joins keep their codes. `listed` are the
    slots of the rows behind the sinks, in positional order; `length` counts them and the sinks. `squares` are those of
    keys and values, where the caller knows them.

    Returns:
        the layer, the slots still in use, of which `length` tells the number, and the rounds done.
    """
    edge_table = edge_counts(layer.capacity, chunk)

    def merges_due(layer: LayerCache, rounds: Int[Array, " B"]) -> Int[Array, " B"]:
        rows = layer.length[:, 0]
        middle = jnp.clip(rows - sinks - recent, 0, layer.capacity)
        share = jnp.asarray(schedule)[jnp.minimum(rounds, len(schedule) - 1), middle]
        merges = jnp.maximum(1, jnp.minimum(share, rows - budget))
        return jnp.where(rows > budget, jnp.minimum(merges, look_up(edge_table, middle)), 0)

    def one_round(state):
        layer, slots_in_use, squares, rounds, merges = state
        apart = {"sinks": sinks, "recent": recent, "chunk": chunk, "edges": edges}
        layer, slots_in_use, squares = merge_best(layer, slots_in_use, merges, squares, **apart)
        rounds = rounds + (merges > 0).astype(jnp.int32)
        return layer, slots_in_use, squares, rounds, merges_due(layer, rounds)

    if edges is None:
        squares = None, None
    elif squares is None:
        # Of values only where matching asks for them.
        squares = row_squares(layer.keys), row_squares(layer.values) if traits().merges_in_place else None
    state: Any = (layer, listed, squares, rounds, merges_due(layer, rounds))
    for size, count in _by_size([rows - sinks for rows in expected], listed.shape[2]):
        layer, listed, *rest = state
        state = (layer, listed[:, :, :size], *rest)
        for _ in range(count):
            state = one_round(state)
    if not enough:
        state = jax.lax.while_loop(lambda state: jnp.any(state[-1] > 0), one_round, state)
    layer, listed, _, rounds, _ = state
    return layer, listed, rounds


def rows_by_round(
    slowest: tuple[int, int], largest: tuple[int, int], schedule: np.ndarray, *, sinks: int, recent: int, chunk: int
) -> tuple[int, ...]:
    """The rows that any head holds at most before each round of `cluster`, of as many rounds as the slowest takes.

    Both are rows of a fresh prompt and their budget: `slowest` of the head that takes the most rounds, `largest` no
    less than those of any head. A head of no fewer rows and no smaller budget holds no fewer rows after any round.
    """
    edges = edge_counts(max(slowest[0], largest[0]), chunk)

    def after(rows: int, budget: int, done: int) -> int:
        middle = max(rows - sinks - recent, 0)
        merges = max(1, min(int(schedule[min(done, len(schedule) - 1), middle]), rows - budget))
        return rows - min(merges, int(edges[middle])) if rows > budget else rows

    rows, most = slowest[0], [largest[0]]
    while (left := after(rows, slowest[1], len(most) - 1)) < rows:
        rows = left
        most.append(after(most[-1], largest[1], len(most) - 1))
    return tuple(most[:-1])


def _by_size(rows: Sequence[int], slots: int) -> Iterator[tuple[int, int]]:
    """Slots that lists have, and in how many rounds in a row: half as many as soon as the rows of a round allow it."""
    while rows:
        slots = min(slots, rows[0])
        count = sum(2 * n > slots for n in rows)
        yield slots, count
        rows = rows[count:]


def merge_schedule(rows: int, chunk: int, ratios: tuple[float, ...], merge_of: str) -> np.ndarray:
    """Edges to merge by round and number of middle rows: floor(ratio * middle), or of |A| that have an edge.

    Computed on the host in double precision, as the papers' int() does. Returns i32 [len(ratios), rows + 1].
    """
    of = np.arange(rows + 1) if merge_of == "middle" else edge_counts(rows, chunk)
    return np.floor(np.asarray(ratios, np.float64)[:, None] * of).astype(np.int32)


def edge_counts(rows: int, chunk: int) -> np.ndarray:
    """A rows that have a B row in their chunk, by the number of middle rows 0 ... `rows`."""
    middle = np.arange(rows + 1)
    tail = middle % chunk
    return (middle // chunk * (chunk // 2) + np.where(tail >= 2, (tail + 1) // 2, 0)).astype(np.int32)


@partial(jax.jit, static_argnames=("sinks", "recent", "chunk", "edges"))
def merge_best(
    layer: LayerCache,
    slots: Int[Array, "B K R"],
    merges: Int[Array, " B"],
    squares: Squares = (None, None),
    *,
    sinks: int = 0,
    recent: int = 0,
    chunk: int,
    edges: Edges | None = None,
) -> tuple[LayerCache, Int[Array, "B K R"], Squares]:
    """Match the middle rows and merge the `merges` best edges of every head, where they lie.

    `slots` lists those behind the sinks that are still in use, in positional order; `length` counts them and the sinks.
    `squares` are the `row_squares` of the layer's keys where there are `edges`, and of its values or None.

    Returns the layer, the slots still in use, and the squares.
    """
    if slots.shape[2] == 0:
        return layer, slots, squares
    listed = layer.length - sinks
    # Sequences that are done are not even read.
    middle = jnp.where(merges[:, None] > 0, listed - recent, 0)
    where: dict[str, Any] = {"chunk": chunk, "length": middle, "index": slots}
    if edges is None and layer.key_mean is not None:
        match, score = _by_whole_keys(layer, slots, middle, chunk)
    elif edges is None:
        match, score = chunked_matching(layer.keys, **where)
    else:
        assert squares[0] is not None
        match, score = chunked_matching(
            layer.keys,
            values=layer.values,
            key_weight=1 / _mean_of_listed(_key_squares(layer, squares[0]), slots, middle),
            value_weight=edges.value_weight,
            bias=edges.gravity * jnp.log2(jnp.maximum(layer.degree, 1.0)),
            squares=squares,
            **where,
        )
    keys, values, degree, slots, squares = row_merge(
        layer.keys, layer.values, layer.degree, slots, listed, match, score, merges, squares, chunk=chunk
    )
    layer = replace(layer, keys=keys, values=values, degree=degree, length=layer.length - merges[:, None])
    return layer, slots, squares


def _by_whole_keys(
    layer: LayerCache, slots: Int[Array, "B K R"], middle: Int[Array, "B K"], chunk: int
) -> tuple[Int[Array, "B K A"], Float[Array, "B K A"]]:
    """`chunked_matching` by the cosines of keys with their mean, whose codes have other angles.

    Some chunks at a time: the keys of all of them in float32 would be twice the cache.
    """
    rows = chunk * max(1, WHOLE_ROWS // chunk)
    parts = -(-slots.shape[2] // rows)
    padded = jnp.pad(slots, ((0, 0), (0, 0), (0, parts * rows - slots.shape[2])))

    def part(first: Int[Array, ""]) -> tuple[Array, Array]:
        here = take_slots(layer, jax.lax.dynamic_slice_in_dim(padded, first, rows, axis=2))
        match, score = chunked_matching(key_numbers(here), chunk=chunk, length=jnp.clip(middle - first, 0, rows))
        return jnp.where(match >= 0, match + first, match), score

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(*slots.shape[:2], -1)[:, :, : (slots.shape[2] + 1) // 2]

    match, score = jax.lax.map(part, rows * jnp.arange(parts, dtype=jnp.int32))
    return joined(match), joined(score)


def _key_squares(layer: LayerCache, stored: Float[Array, "B K C"]) -> Float[Array, "B K C"]:
    """|key|² of every row, from those of the keys as they are stored; differences of keys have no mean in them."""
    if layer.key_mean is None:
        return stored
    mixed = jnp.sum(dequantised(layer.keys) * layer.key_mean, axis=-1)
    return stored + 2 * mixed + jnp.sum(jnp.square(layer.key_mean), axis=-1)


def _mean_of_listed(
    numbers: Float[Array, "B K C"], slots: Int[Array, "B K R"], count: Int[Array, "B K"]
) -> Float[Array, "B K"]:
    """Mean of the numbers of the first `count` slots listed; 1 where it would be 0."""
    inside = ordinals(slots.shape[2], 3) < count[..., None]
    total = jnp.sum(jnp.where(inside, jnp.take_along_axis(numbers, slots, axis=2), 0.0), axis=2)
    mean = total / jnp.maximum(jnp.minimum(count, slots.shape[2]), 1).astype(jnp.float32)
    return jnp.where(mean > 0, mean, 1.0)


def pick(layer: LayerCache, listed: Int[Array, "B K R"], sinks: int, slots: int) -> LayerCache:
    """The sinks and the rows listed, moved up into the first of `slots` slots; the others are empty."""
    return compact(layer, slots_left(layer, listed, sinks, slots))


def slots_left(layer: LayerCache, listed: Int[Array, "B K R"], sinks: int, slots: int) -> Int[Array, "B K slots"]:
    """The slots of the sinks and those listed, as many as `layer` counts, then -1."""
    first = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.int32), (*listed.shape[:2], sinks))
    listed = jnp.concatenate([first, listed], axis=2)[:, :, :slots]
    if listed.shape[2] < slots:
        listed = jnp.pad(listed, [(0, 0), (0, 0), (0, slots - listed.shape[2])])
    return jnp.where(ordinals(slots, 3) < layer.length[..., None], listed, -1)
