"""The means of keys by their label, on GPU, without sorting all of them.

1. `_sort`, a program per few tiles of keys: their numbers by label within a tile, and where each part begins there. A
   part are EACH centroids, however many there are: that sums do not depend on centroids that a head does not use.
2. `_add`, a program per part: lists where its keys stand in all tiles, reads the keys in that order and adds them up,
   as products with ones and zeros.

The order is fixed, so means are the same in every run. Bytes: every key once, and some 24 a key for numbers; memory: 8
a key, and 4 for each part of each tile. Arithmetic: TILE and `parts` comparisons a key, 2 EACH D on the matrix unit.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.gpu import arange, bfloat16_parts, call, dot, load_rows, power_of_two, shared_memory

TILE = 32  # keys that are compared with each other
EACH = 16  # centroids of a part, the least height of a product
# Keys that are read at a time, and how many such reads are under way; tiles whose keys are listed at a time; tiles of a
# program of `_sort`.
SIZES = {"mean_keys": 128, "mean_stages": 5, "mean_warps": 4, "mean_tiles": 1024, "sort_tiles": 4}
MOST_PARTS = 128  # that a tile is compared with at a time
READ = 2**15  # bytes of a read at most, and of shared memory that is left for all else


def means(
    keys: Float[Array, "H N D"],
    labels: Int[Array, "H N"],
    end: Int[Array | np.ndarray, " H"],
    old: Float[Array, "H C D"],
    sizes: dict[str, int],
    interpret: bool = False,
) -> tuple[Float[Array, "H C D"], Int[Array, "H C"]]:
    """The mean of every label's keys below `end`, that of `old` where there are none, and how many there are."""
    (heads, rows, _), count = keys.shape, old.shape[1]
    parts, tiles = pl.cdiv(count, EACH), pl.cdiv(rows, TILE)
    of_keys = jax.ShapeDtypeStruct((heads, tiles * TILE), jnp.int32)
    order, starts = call(
        partial(_sort, together=sizes["sort_tiles"]),
        (of_keys, jax.ShapeDtypeStruct((heads, parts + 1, tiles), jnp.int32)),
        labels,
        end,
        grid=(pl.cdiv(tiles, sizes["sort_tiles"]), heads),
        warps=4,
        interpret=interpret,
    )
    row_bytes = power_of_two(keys.shape[2], 16) * keys.dtype.itemsize
    tile = max(16, min(sizes["mean_keys"], READ // row_bytes))
    sums, numbers, _ = call(
        partial(_add, tile=tile, tiles=min(sizes["mean_tiles"], power_of_two(tiles)), barrier=not interpret),
        (jax.ShapeDtypeStruct(old.shape, jnp.float32), jax.ShapeDtypeStruct((heads, count), jnp.int32), of_keys),
        keys,
        order,
        starts,
        end,
        old,
        grid=(parts, heads),
        warps=sizes["mean_warps"],
        stages=max(1, min(sizes["mean_stages"], (shared_memory() - READ) // (tile * row_bytes))),
        aliases={4: 0},
        interpret=interpret,
    )
    return sums, numbers


def _sort(labels, ends, order, starts, *, together):
    """A few tiles below `ends`: numbers of keys times EACH, plus the label within its part, by label; none last."""
    number, head, (count, tiles) = pl.program_id(0), pl.program_id(1), starts.shape[1:]
    tile, i = number * together + arange(together), arange(TILE)
    there, end = (tile < tiles)[:, None], jnp.minimum(ends[head], labels.shape[1])

    @pl.when(number * together * TILE < end)
    def _():
        row = tile[:, None] * TILE + i[None, :]
        label = plgpu.load(labels.at[head, row], mask=row < end, other=-1)
        label = jnp.where(label < 0, (count - 1) * EACH, label)
        # In float32, whose units are idle otherwise.
        rank = (label * TILE + i[None, :]).astype(jnp.float32)
        place = jnp.sum((rank[:, :, None] < rank[:, None, :]).astype(jnp.float32), axis=1).astype(jnp.int32)
        at = order.at[head, tile[:, None] * TILE + place]
        plgpu.store(at, row * EACH + label % EACH, mask=there & (i >= 0)[None, :])
        for first in range(0, count, MOST_PARTS):
            part = arange(min(MOST_PARTS, power_of_two(count)), first)
            before = jnp.sum((label[:, :, None] < part[None, None, :] * EACH).astype(jnp.int32), axis=1)
            plgpu.store(starts.at[head, part[None, :], tile[:, None]], before, mask=there & (part < count)[None, :])


def _add(keys, order, starts, ends, _, means, numbers, listed, *, tile, tiles, barrier):
    """The means of a part's centroids, and how many keys each has; without any it stays."""
    part, head, width = pl.program_id(0), pl.program_id(1), keys.shape[2]
    columns, own = arange(power_of_two(width, 16)), arange(EACH)
    filled = pl.cdiv(jnp.clip(ends[head], 0, keys.shape[1]), TILE)

    def read(i, state, first, end):
        total, count = state
        at = first + i * tile + arange(tile)
        place = plgpu.load(listed.at[head, at], mask=at < end, other=-1)
        entry = plgpu.load(order.at[head, place], mask=place >= 0, other=-1)
        key = load_rows(keys, head, entry // EACH, columns, entry >= 0, width)
        one = (entry[None, :] >= 0) & (entry[None, :] % EACH == own[:, None])
        parts = bfloat16_parts(key, 3) if key.dtype == jnp.float32 else [key]
        for x in parts:  # exact but for the additions
            total += dot(one.astype(x.dtype), x)
        return total, count + one.astype(jnp.int32)

    def add(block, state):
        """The keys of `tiles` tiles, listed behind those of the parts before this one."""
        number = block * tiles + arange(tiles)
        first, last = (plgpu.load(starts.at[head, part + i, number], mask=number < filled, other=0) for i in (0, 1))
        size = last - first
        begin = block * tiles * TILE + jnp.sum(first)
        place = begin + jnp.cumsum(size) - size

        def put(k, carry):
            at = jnp.where(k < size, place + k, listed.shape[1])
            plgpu.store(listed.at[head, at], number * TILE + first + k, mask=k < size)
            return carry

        jax.lax.fori_loop(0, jnp.max(size), put, 0)
        if barrier:  # other threads of this program read the list
            plgpu.debug_barrier()
        count = jnp.sum(size)
        return jax.lax.fori_loop(0, pl.cdiv(count, tile), partial(read, first=begin, end=begin + count), state)

    start = jnp.zeros((own.shape[0], columns.shape[0]), jnp.float32), jnp.zeros((own.shape[0], tile), jnp.int32)
    total, count = jax.lax.fori_loop(0, pl.cdiv(filled, tiles), add, start)
    count, number = jnp.sum(count, axis=1), part * EACH + own
    there = number < means.shape[1]
    mask, at = there[:, None] & (columns < width)[None, :], means.at[head, number[:, None], columns[None, :]]
    mean = total / jnp.maximum(count, 1).astype(jnp.float32)[:, None]
    plgpu.store(at, jnp.where((count > 0)[:, None], mean, plgpu.load(at, mask=mask, other=0.0)), mask=mask)
    plgpu.store(numbers.at[head, number], count, mask=there)
