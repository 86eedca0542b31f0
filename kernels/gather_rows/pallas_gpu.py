"""Row gathering on GPU: every program moves a tile of rows, and reads nothing that is not asked for.

The source may lie in `pinned_host` memory: the loads then go over the host link, and many programs with many rows each
keep it busy. XLA's own gather refuses operands in different memories. What is near is read by the same programs, so
that rows from both places are written once.

In place, rows move up within their head: a program a head takes a tile after the other, and what it reads of a tile
lies nowhere before it. Where no row of a tile moves, nothing is read or written but the list. That fills a device with
many heads alone. With few heads rows are gathered and put back, a part of all heads after the other: where launches run
side by side, layers do not share the memory of what is gathered.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int, Shaped

from clusterkv_jax.kernels.gpu import arange, call, load_rows, power_of_two

TILE_BYTES = 8192
# Of a tile in place, the warps of its program, and the heads from which on that is taken.
IN_PLACE_BYTES, IN_PLACE_WARPS, IN_PLACE_HEADS = 16384, 4, 256
# Of few heads' rows, what is gathered before it is put back: so many parts of all, but no fewer bytes.
PARTS, LEAST_PART = 16, 2**22


def gather_rows(
    source: Shaped[Array, "B K N D"],
    rows: Int[Array, "B K R"],
    near: Shaped[Array, "B K M D"] | None = None,
    place: Int[Array, "B K R"] | None = None,
    *,
    in_place: bool = False,
    in_place_heads: int = IN_PLACE_HEADS,
    least_part: int = LEAST_PART,
    tile_bytes: int = TILE_BYTES,
    warps: int = 4,
    interpret: bool = False,
) -> Shaped[Array, "B K R D"]:
    """See `clusterkv_jax.kernels.gather_rows.gather_rows`."""
    batch, heads, _, width = source.shape
    count = rows.shape[2]
    if not jnp.issubdtype(source.dtype, jnp.number):
        raise NotImplementedError(f"The GPU kernel of gather_rows moves rows of numbers, got {source.dtype}.")
    # The source may be in another memory, so that what is not there is never looked at.
    sources = [(source, rows)] if near is None or place is None else [(near, place), (source, rows)]
    sources = [(x, numbers) for x, numbers in sources if x.size > 0]
    if not sources or rows.size == 0:
        return jnp.zeros((batch, heads, count, width), source.dtype)

    def flat(x):
        return x.reshape(batch * heads, *x.shape[2:])

    sources = [(flat(x), flat(numbers)) for x, numbers in sources]
    gathered = partial(_gathered, tile_bytes=tile_bytes, warps=warps, interpret=interpret)
    if not in_place or near is not None or count != source.shape[2]:
        outputs = gathered(sources)
    elif batch * heads >= in_place_heads:
        outputs = _moved_up(*sources[0], interpret)
    else:
        least = least_part * count // source.nbytes
        outputs = _moved_by_parts(*sources[0], gathered, max(1, least, pl.cdiv(count, PARTS)))
    return outputs.reshape(batch, heads, count, width)


def _gathered(
    sources: list[tuple[Shaped[Array, "BK _ D"], Int[Array, "BK R"]]], tile_bytes: int, warps: int, interpret: bool
) -> Shaped[Array, "BK R D"]:
    (source, rows), *_ = sources
    tile = _rows_of_tile(tile_bytes, source, rows.shape[1])
    return call(
        partial(_kernel, tile=tile),
        jax.ShapeDtypeStruct((*rows.shape, source.shape[2]), source.dtype),
        *(x for pair in sources for x in pair),
        grid=(pl.cdiv(rows.shape[1], tile), len(rows)),
        warps=warps,
        interpret=interpret,
    )


def _moved_by_parts(
    source: Shaped[Array, "BK N D"], rows: Int[Array, "BK N"], gathered: Callable[..., Array], size: int
) -> Shaped[Array, "BK N D"]:
    """So many rows of every head, then the next. What a part reads lies nowhere before it."""
    count = rows.shape[1]
    if size >= count:
        return gathered([(source, rows)])

    def move(start: Any, source: Array, size: int) -> Array:
        part = gathered([(source, jax.lax.dynamic_slice_in_dim(rows, start, size, axis=1))])
        return jax.lax.dynamic_update_slice_in_dim(source, part, start, axis=1)

    whole, rest = divmod(count, size)
    source = jax.lax.fori_loop(0, whole, lambda i, source: move(i * size, source, size), source)
    return move(whole * size, source, rest) if rest else source


def _rows_of_tile(size: int, source: Array, count: int) -> int:
    return min(power_of_two(count), max(1, size // (power_of_two(source.shape[-1]) * source.dtype.itemsize)))


def _moved_up(source: Shaped[Array, "BK N D"], rows: Int[Array, "BK N"], interpret: bool) -> Shaped[Array, "BK N D"]:
    return call(
        partial(_move_up, tile=_rows_of_tile(IN_PLACE_BYTES, source, source.shape[1]), barrier=not interpret),
        jax.ShapeDtypeStruct(source.shape, source.dtype),
        source,
        rows,
        grid=(len(source),),
        warps=IN_PLACE_WARPS,
        aliases={0: 0},
        interpret=interpret,
    )


def _move_up(source, rows, out, *, tile, barrier):
    """All rows of one head, a tile after the other."""
    del source  # in place: read as the output that aliases it
    head, (_, count, width) = pl.program_id(0), out.shape
    columns = arange(power_of_two(width))

    def move(i, _):
        entry = i * tile + arange(tile)
        inside = entry < count
        row = plgpu.load(rows.at[head, entry], mask=inside, other=-1)

        @pl.when(jnp.max((inside & (row != entry)).astype(jnp.int32)) > 0)
        def _():
            there = (row >= 0) & (row < count)
            moved = load_rows(out, head, jnp.where(there, row, 0), columns, there, width)
            if barrier:  # other threads write their rows where this one reads
                plgpu.debug_barrier()
            inside_row = inside[:, None] & (columns < width)[None, :]
            plgpu.store(out.at[head, entry[:, None], columns[None, :]], moved, mask=inside_row)

    jax.lax.fori_loop(0, pl.cdiv(count, tile), move, None)


def _kernel(*refs, tile):
    """`refs` are a source and the numbers of its rows, once or twice, and the output; the first that has a row wins."""
    *inputs, out = refs
    head, count, width = pl.program_id(1), *out.shape[1:]
    entry = pl.program_id(0) * tile + arange(tile)
    inside = entry < count
    columns = arange(power_of_two(width))
    todo, result = inside, jnp.zeros((tile, columns.shape[0]), out.dtype)
    for source, rows in zip(inputs[::2], inputs[1::2], strict=True):
        row = plgpu.load(rows.at[head, entry], mask=inside, other=-1)
        here = todo & (row >= 0) & (row < source.shape[1])
        result = jnp.where(here[:, None], load_rows(source, head, row, columns, here, width), result)
        todo &= ~here
    plgpu.store(
        out.at[head, entry[:, None], columns[None, :]], result, mask=inside[:, None] & (columns < width)[None, :]
    )
