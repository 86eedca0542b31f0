"""Row gathering on GPU: every program moves a tile of rows, and reads nothing that is not asked for.

The source may lie in `pinned_host` memory: the loads then go over the host link, and many programs with many rows each
keep it busy. XLA's own gather refuses operands in different memories. What is near is read by the same programs, so
that rows from both places are written once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int, Shaped

from clusterkv_jax.kernels.gpu import arange, call, load_rows, power_of_two

TILE_BYTES = 8192


def gather_rows(
    source: Shaped[Array, "B K N D"],
    rows: Int[Array, "B K R"],
    near: Shaped[Array, "B K M D"] | None = None,
    place: Int[Array, "B K R"] | None = None,
    *,
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
    tile = min(power_of_two(count), max(1, tile_bytes // (power_of_two(width) * source.dtype.itemsize)))
    flat = lambda x: x.reshape(batch * heads, *x.shape[2:])  # noqa: E731
    outputs = call(
        partial(_kernel, tile=tile),
        jax.ShapeDtypeStruct((batch * heads, count, width), source.dtype),
        *(flat(x) for pair in sources for x in pair),
        grid=(pl.cdiv(count, tile), batch * heads),
        warps=warps,
        interpret=interpret,
    )
    return outputs.reshape(batch, heads, count, width)


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
