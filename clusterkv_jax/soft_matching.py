"""Chunked soft matching: one round, rounds to a budget, and the degree-weighted merge (CentroidKV section 5, Chelsea
5).

One round over the middle rows of a head (sinks and recent rows stay out), chunk 8, merging the 3 best edges:

    offset     0 1 2 3 4 5 6 7 | 0 1 2 3 4 5 6 7        A even, B odd; each a has one edge, to its best b of the chunk
    edges      0>3 2>3 4>5 6>1 | 0>1 2>7 ...            the best 3 of all chunks are merged, per KV head
    merged     . 1 . 3 4 5 6 7 | . 1 2 3 4 5 6 7        an a joins its b, which becomes the mean of all that joined
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from clusterkv_jax.budget import look_up
from clusterkv_jax.cache import LayerCache
from clusterkv_jax.kernels.chunked_matching import chunked_matching

# From the middle rows and how many of each head are real: features and row biases for `chunked_matching`.
EdgeFeatures = Callable[[LayerCache, Int[Array, "B K"]], tuple[Float[Array, "B K N E"], Float[Array, "B K N"]]]


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
    layer = merge_best(layer, jnp.full(batch, merges, jnp.int32), chunk=chunk)
    kept = rows - merges
    assert layer.positions is not None
    return layer.keys[:, :, :kept], layer.values[:, :, :kept], layer.degree[:, :, :kept], layer.positions[:, :, :kept]


def cluster(
    layer: LayerCache,
    budget: Int[Array, " B"],
    rounds: Int[Array, " B"],
    schedule: np.ndarray,
    *,
    sinks: int,
    recent: int,
    chunk: int,
    features: EdgeFeatures | None = None,
) -> tuple[LayerCache, Int[Array, " B"]]:
    """Rounds of matching until every head of a batch row holds exactly its `budget` rows.

    All heads of a layer hold equally many rows, so one count per batch row steers them. Rows with no more than their
    budget stay as they are, bit for bit.

    Args:
        layer: the rows; C may exceed what is used.
        budget: rows to keep, B.
        rounds: rounds done so far in the life of each request (Chelsea's ratio decays with it).
        schedule: i32 [rounds, C + 1], the edges to merge by round (the last entry serves all later ones) and by the
            number of middle rows; see `merge_schedule`.
        sinks: first rows that are never merged.
        recent: last rows that are never merged.
        chunk: rows per chunk.
        features: what edges are scored by instead of the cosine of their keys; hashable.

    Returns:
        the layer with its budget met, and the rounds done.
    """
    edge_table = edge_counts(layer.capacity, chunk)

    def merges_due(layer: LayerCache, rounds: Int[Array, " B"]) -> Int[Array, " B"]:
        held = layer.length[:, 0]
        middle = jnp.clip(held - sinks - recent, 0, layer.capacity)
        planned = jnp.asarray(schedule)[jnp.minimum(rounds, len(schedule) - 1), middle]
        merges = jnp.maximum(1, jnp.minimum(planned, held - budget))
        return jnp.where(held > budget, jnp.minimum(merges, look_up(edge_table, middle)), 0)

    def body(state):
        layer, rounds, merges = state
        layer = merge_best(layer, merges, sinks=sinks, recent=recent, chunk=chunk, features=features)
        rounds = rounds + (merges > 0).astype(jnp.int32)
        return layer, rounds, merges_due(layer, rounds)

    state = (layer, rounds, merges_due(layer, rounds))
    layer, rounds, _ = jax.lax.while_loop(lambda state: jnp.any(state[2] > 0), body, state)
    return layer, rounds


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


@partial(jax.jit, static_argnames=("sinks", "recent", "chunk", "features"))
def merge_best(
    layer: LayerCache,
    merges: Int[Array, " B"],
    *,
    sinks: int = 0,
    recent: int = 0,
    chunk: int,
    features: EdgeFeatures | None = None,
) -> LayerCache:
    """Match the middle rows, merge the `merges` best edges of every head and close the gaps."""
    if layer.capacity <= sinks:
        return layer
    middle = layer.length - sinks - recent
    if features is None:
        match, score = chunked_matching(layer.keys[:, :, sinks:], chunk=chunk, length=middle)
    else:
        match, score = _match_features(layer, middle, sinks, chunk, features)
    merged = best_edges(score, merges)
    return compact(merge_edges(layer, match + sinks, merged, sinks), merged, sinks)


def _match_features(
    layer: LayerCache, middle: Int[Array, "B K"], sinks: int, chunk: int, features: EdgeFeatures
) -> tuple[Int[Array, "B K A"], Float[Array, "B K A"]]:
    """Matching by other features than keys, one head after the other: float32 features are twice to four times as large
    as the keys and values they are made of, and must not exist for all heads at once.
    """
    rows = LayerCache(layer.keys[:, :, sinks:], layer.values[:, :, sinks:], layer.degree[:, :, sinks:], middle)

    def one_head(head: LayerCache) -> tuple[Array, Array]:
        head = jax.tree.map(lambda x: x[None, None], head)
        made, bias = features(head, head.length)
        match, score = chunked_matching(made, chunk=chunk, bias=bias, normalize=False, length=head.length)
        return match[0, 0], score[0, 0]

    heads = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    return jax.tree.map(lambda x: x.reshape(*middle.shape, -1), jax.lax.map(one_head, heads))


def best_edges(score: Float[Array, "B K A"], count: Int[Array, " B"]) -> Bool[Array, "B K A"]:
    """Mask of the `count` highest scores of every head; of equal ones the first. -inf is never among them."""
    wanted = count[:, None, None]
    rank = _ordered_bits(score)
    least = _kth_highest(rank, wanted)
    edge = score > -jnp.inf
    above = edge & (rank > least)
    level = edge & (rank == least)
    room = wanted - jnp.sum(above, axis=-1, keepdims=True)
    return (above | (level & (jnp.cumsum(level, axis=-1) <= room))) & (wanted > 0)


def _ordered_bits(x: Float[Array, "B K A"]) -> UInt32[Array, "B K A"]:
    """float32 as integers of the same order: negative numbers flipped whole, the others in their sign bit; 0 = -0."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _kth_highest(x: UInt32[Array, "B K A"], k: Int[Array, "B 1 1"]) -> UInt32[Array, "B K 1"]:
    """The k-th highest of every row, found bit by bit from the top: the largest t with at least k entries >= t.

    A count per bit instead of a sort: no accelerator sorts fast, and a sort takes seconds to compile on a TPU.
    """

    def body(i, t):
        trial = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(x >= trial, axis=-1, keepdims=True) >= k, trial, t)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros((*x.shape[:2], 1), jnp.uint32))


def merge_edges(layer: LayerCache, match: Int[Array, "B K A"], merged: Bool[Array, "B K A"], sinks: int) -> LayerCache:
    """Fold the merged A rows (rows sinks, sinks + 2, ...) into their b rows: degree-weighted means, degrees summed.

    The mean is taken as k_b + sum n_a (k_a - k_b) / n, so that equal rows merge without any error. The A rows
    themselves are left for `compact` to remove.
    """
    b_row = jnp.where(merged, match, layer.capacity)  # beyond the end: dropped
    weight = jnp.where(merged, layer.degree[:, :, sinks::2], 0.0)
    add = jax.vmap(jax.vmap(lambda total, rows, x: total.at[rows].add(x, mode="drop")))
    degree = add(layer.degree, b_row, weight)

    def mean(x: Float[Array, "B K C D"]) -> Float[Array, "B K C D"]:
        partner = jnp.take_along_axis(x, jnp.where(merged, match, 0)[..., None], axis=2)
        change = weight[..., None] * (x[:, :, sinks::2].astype(jnp.float32) - partner.astype(jnp.float32))
        total = add(jnp.zeros(x.shape, jnp.float32), b_row, change)
        return (x.astype(jnp.float32) + total / jnp.maximum(degree, 1.0)[..., None]).astype(x.dtype)

    return replace(layer, keys=mean(layer.keys), values=mean(layer.values), degree=degree)


def compact(layer: LayerCache, merged: Bool[Array, "B K A"], sinks: int) -> LayerCache:
    """Remove the merged A rows; the rest moves up in positional order and the freed slots are emptied."""
    slot = jnp.arange(layer.capacity)
    gone = jnp.zeros(layer.degree.shape, bool).at[:, :, sinks::2].set(merged)
    keep = (slot < layer.length[..., None]) & ~gone
    target = jnp.where(keep, jnp.cumsum(keep, axis=-1) - 1, layer.capacity)
    put = jax.vmap(jax.vmap(lambda to: jnp.zeros(layer.capacity, jnp.int32).at[to].set(slot, mode="drop")))
    source = put(target)
    length = jnp.sum(keep, axis=-1, dtype=jnp.int32)
    filled = slot < length[..., None]

    def take(x: Array) -> Array:
        index, mask = (source[..., None], filled[..., None]) if x.ndim == 4 else (source, filled)
        return jnp.where(mask, jnp.take_along_axis(x, index, axis=2), jnp.zeros((), x.dtype))

    return LayerCache(
        keys=take(layer.keys),
        values=take(layer.values),
        degree=take(layer.degree),
        length=length,
        positions=None if layer.positions is None else take(layer.positions),
    )
