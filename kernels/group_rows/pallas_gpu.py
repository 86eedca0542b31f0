"""Rows by their label on GPU: a counting sort, O(rows) and stable.

1. `_count`, a program per tile of rows: how many rows of the tile have the label of a row, and how many of them stand
   before it, by comparing every row with every other.
2. `_before`, a program per few labels: how many rows of a label stand in earlier tiles, and in all.
3. `_starts`, a program per head: how many rows have a lower label.
4. `_place`, a program per tile: the three sums are where a row goes.

Bytes: 4 per row four times, 4 per label and tile four times, which is less than the rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from clusterkv_jax.kernels.gpu import arange, call, power_of_two

# Rows of a tile, and tiles and labels of a program of `_before`.
SIZES = {"rows": 128, "tiles": 128, "labels": 16, "warps": 4}
MOST_LABELS = 8192


def group_rows(
    labels: Int[Array, "B K N"], count: int, *, sizes: dict[str, int] | None = None, interpret: bool = False
) -> tuple[Int[Array, "B K N"], Int[Array, "B K ends"]]:
    """See `clusterkv_jax.kernels.group_rows.group_rows`."""
    batch, heads, rows = labels.shape
    if rows == 0 or count > MOST_LABELS:
        raise NotImplementedError(f"The GPU kernel of group_rows takes up to {MOST_LABELS} labels, got {count}.")
    sizes = SIZES | (sizes or {})
    tile, all_heads, classes = sizes["rows"], batch * heads, count + 1
    tiles = pl.cdiv(rows, tile)
    run = partial(call, warps=sizes["warps"], interpret=interpret)
    flat = labels.reshape(all_heads, rows)
    of_rows = jax.ShapeDtypeStruct((all_heads, rows), jnp.int32)
    of_classes = jax.ShapeDtypeStruct((all_heads, classes), jnp.int32)
    rank, totals = run(
        partial(_count, tile=tile, barrier=not interpret),
        (of_rows, jax.ShapeDtypeStruct((all_heads, tiles, classes), jnp.int32)),
        flat,
        grid=(tiles, all_heads),
    )
    before, total = run(
        partial(_before, tiles=min(sizes["tiles"], power_of_two(tiles)), block=sizes["labels"]),
        (jax.ShapeDtypeStruct(totals.shape, jnp.int32), of_classes),
        totals,
        grid=(pl.cdiv(classes, sizes["labels"]), all_heads),
        aliases={0: 0},
    )
    starts = run(_starts, of_classes, total, grid=(all_heads,))
    order = run(partial(_place, tile=tile), of_rows, flat, rank, before, starts, grid=(tiles, all_heads))
    return order.reshape(labels.shape), starts.reshape(batch, heads, classes)


def _class(labels, row, classes):
    """Labels of these rows, the last class for none."""
    label = plgpu.load(labels.at[pl.program_id(1), row], mask=row < labels.shape[1], other=-1)
    return jnp.where(label < 0, classes - 1, label)


def _count(labels, rank, totals, *, tile, barrier):
    """One tile: rows of the same label before each row, and how many of each label there are."""
    number, head = pl.program_id(0), pl.program_id(1)
    every = arange(power_of_two(totals.shape[2]))
    plgpu.store(totals.at[head, number, every], jnp.zeros_like(every), mask=every < totals.shape[2])
    if barrier:  # other threads of this program write their numbers over the zeros
        plgpu.debug_barrier()
    i, none = arange(tile), totals.shape[2] - 1
    row = number * tile + i
    inside = row < labels.shape[1]
    label = jnp.where(inside, _class(labels, row, totals.shape[2]), -1)
    some = jnp.sum((inside & (label < none)).astype(jnp.int32)) > 0

    @pl.when(some)
    def _():
        # In float32, whose units are idle otherwise; sums run down the columns, which is within threads.
        same = (label[:, None] == label[None, :]).astype(jnp.float32)
        earlier = (i[:, None] < i[None, :]).astype(jnp.float32)
        plgpu.store(rank.at[head, row], jnp.sum(same * earlier, axis=0).astype(jnp.int32), mask=inside)
        # All rows of a label write the same number.
        there = jnp.where(inside, label, totals.shape[2])
        plgpu.store(totals.at[head, number, there], jnp.sum(same, axis=0).astype(jnp.int32), mask=inside)

    @pl.when(~some)
    def _():
        plgpu.store(rank.at[head, row], i, mask=inside)
        totals[head, number, none] = jnp.sum(inside.astype(jnp.int32))


def _before(totals, before, total, *, tiles, block):
    """A few labels: rows in earlier tiles for every tile, and in all."""
    del totals  # read and written as the output that aliases it
    head, label = pl.program_id(1), pl.program_id(0) * block + arange(block)
    there = label < total.shape[1]

    def body(i, sums):
        tile = i * tiles + arange(tiles)
        at = before.at[head, tile[:, None], label[None, :]]
        mask = (tile < before.shape[1])[:, None] & there[None, :]
        count = plgpu.load(at, mask=mask, other=0)
        plgpu.store(at, sums[None, :] + jnp.cumsum(count, axis=0) - count, mask=mask)
        return sums + jnp.sum(count, axis=0)

    sums = jax.lax.fori_loop(0, pl.cdiv(before.shape[1], tiles), body, jnp.zeros((block,), jnp.int32))
    plgpu.store(total.at[head, label], sums, mask=there)


def _starts(total, starts):
    """One head: rows of lower labels."""
    head, label = pl.program_id(0), arange(power_of_two(total.shape[1], 128))
    there = label < total.shape[1]
    count = plgpu.load(total.at[head, label], mask=there, other=0)
    plgpu.store(starts.at[head, label], jnp.cumsum(count) - count, mask=there)


def _place(labels, rank, before, starts, order, *, tile):
    """One tile: every row's number goes to its place."""
    number, head = pl.program_id(0), pl.program_id(1)
    row = number * tile + arange(tile)
    inside = row < labels.shape[1]
    label = _class(labels, row, starts.shape[1])
    place = plgpu.load(rank.at[head, row], mask=inside, other=0)
    place += plgpu.load(before.at[head, number, label], mask=inside, other=0)
    place += plgpu.load(starts.at[head, label], mask=inside, other=0)
    plgpu.store(order.at[head, jnp.where(inside, place, order.shape[1])], row, mask=inside)
