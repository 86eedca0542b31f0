"""Selection on GPU without a sort: one program per selection, all clusters in its registers.

    grid (B K J)

    threshold   the lowest score that is chosen, `BITS` bits of it a round: how many rows stand at or above each of
                2^BITS candidates
    places      prefix sums of what is taken of every cluster, in the order of their numbers
    rows        every place finds its cluster as the number of those that begin at or before it

One program's chain of latencies is the time of it all, so that each part is a few wide operations.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.gpu import arange, call, power_of_two

BITS = 4  # of the threshold in a round; divides 32
MOST_CLUSTERS = 16384  # what fits in registers
PLACES = 1024  # rows written at a time


def select_rows(
    scores: Float[Array, "B K J C"],
    sizes: Int[Array, "B K C"],
    starts: Int[Array, "B K C"],
    order: Int[Array, "B K N"] | None,
    room: Int[Array, " B"],
    *,
    count: int,
    sinks: int = 0,
    interpret: bool = False,
) -> Int[Array, "B K J count"]:
    """See `clusterkv_jax.kernels.select_rows.select_rows`."""
    batch, heads, each, clusters = scores.shape
    if clusters == 0 or count == 0 or clusters > MOST_CLUSTERS:
        raise NotImplementedError(f"the GPU kernel of select_rows takes 1 to {MOST_CLUSTERS} clusters and some room.")
    flat = lambda x: x.reshape(batch * heads, x.shape[-1])  # noqa: E731
    tile = power_of_two(clusters, 32)
    rows, _ = call(
        partial(
            _kernel,
            sinks=min(sinks, count),
            selections=heads * each,
            each=each,
            ordered=order is not None,
            bits=BITS if tile <= 2048 else 2,
            barrier=(lambda: None) if interpret else plgpu.debug_barrier,
        ),
        (
            jax.ShapeDtypeStruct((batch * heads * each, count), jnp.int32),
            jax.ShapeDtypeStruct((batch * heads * each, 2, count + 1), jnp.int32),
        ),
        scores.reshape(-1, clusters),
        flat(sizes),
        flat(starts),
        flat(starts if order is None else order),
        room,
        grid=(batch * heads * each,),
        warps=min(16, max(4, tile // 256)),
        interpret=interpret,
    )
    return rows.reshape(batch, heads, each, count)


def _kernel(scores, sizes, starts, order, room, out, scratch, *, sinks, selections, each, ordered, bits, barrier):
    selection, clusters, count = pl.program_id(0), scores.shape[1], out.shape[1]
    head, number = selection // each, arange(power_of_two(clusters, 32))
    real = number < clusters
    size = plgpu.load(sizes.at[head, number], mask=real, other=0)
    key = _key(plgpu.load(scores.at[selection, number], mask=real, other=-jnp.inf))
    limit = jnp.maximum(jnp.minimum(room[selection // selections], count) - sinks, 0)

    low, high = _threshold(key, size, limit, bits)
    above, equal = jnp.where(key > high, size, 0), jnp.where((key >= low) & (key <= high), size, 0)
    left = limit - jnp.sum(above) - (jax.lax.cumsum(equal) - equal)
    taken = above + jnp.clip(left, 0, equal)
    chosen = taken > 0
    place = sinks + jax.lax.cumsum(taken) - taken
    rank = jax.lax.cumsum(chosen.astype(jnp.int32)) - 1
    end = sinks + jnp.sum(taken)

    # Row 0: a one where a cluster begins; row 1, by rank: what leads from a place to the row's place in `order`.
    tiles, tile = pl.cdiv(count, PLACES), min(PLACES, power_of_two(count, 32))

    def clear(i, _):
        at = i * tile + arange(tile)
        plgpu.store(scratch.at[selection, 0, at], jnp.zeros((tile,), jnp.int32), mask=at < count)
        return _

    jax.lax.fori_loop(0, tiles, clear, 0)
    barrier()
    # The interpreter writes what is masked back as it was, so that it needs a place of its own.
    start = plgpu.load(starts.at[head, number], mask=chosen, other=0)
    at = jnp.where(chosen, place, count)
    plgpu.store(scratch.at[selection, 0, at], jnp.ones_like(at), mask=chosen)
    plgpu.store(scratch.at[selection, 1, jnp.where(chosen, rank, count)], start - place, mask=chosen)
    barrier()

    def write(i, before):
        at = i * tile + arange(tile)
        begins = plgpu.load(scratch.at[selection, 0, at], mask=at < count, other=0)
        which = before + jax.lax.cumsum(begins) - 1
        filled = (at >= sinks) & (at < end)
        row = at + plgpu.load(scratch.at[selection, 1, which], mask=filled, other=0)
        if ordered:
            row = plgpu.load(order.at[head, row], mask=filled, other=0)
        row = jnp.where(at < sinks, at, jnp.where(filled, row, -1))
        plgpu.store(out.at[selection, at], row, mask=at < count)
        return before + jnp.sum(begins)

    jax.lax.fori_loop(0, tiles, write, jnp.int32(0))


def _key(score: Float[Array, " C"]) -> Int[Array, " C"]:
    """Integers in the order of the scores."""
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _threshold(key, size, limit, bits):
    """Bounds (both inclusive) between which the last chosen key is, and no other or only equal ones.

    Clusters above them have less than `limit` rows, with those between them at least as many, if there are so many.
    """
    step = arange(1 << bits)

    def unsure(state):
        _, _, shift, inside = state
        return (shift > 0) & (inside > 1)

    def narrow(state):
        low, _, shift, _ = state
        shift = shift - bits
        tried = low + (step << shift)
        held = jnp.sum(jnp.where(key[None, :] >= tried[:, None], size[None, :], 0), axis=1)
        enough = jnp.sum((held >= limit).astype(jnp.int32))
        low = low + ((jnp.maximum(enough, 1) - 1) << shift)
        high = low + ((1 << shift) - 1)
        inside = jnp.sum(((key >= low) & (key <= high) & (size > 0)).astype(jnp.int32))
        return low, high, shift, inside

    start = (jnp.int32(-(2**31)), jnp.int32(0), jnp.int32(32), jnp.int32(2))
    return jax.lax.while_loop(unsure, narrow, start)[:2]
