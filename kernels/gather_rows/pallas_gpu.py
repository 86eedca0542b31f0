"""Row gathering on GPU: every program moves a tile of rows, and reads nothing that is not asked for.

The source may lie in `pinned_host` memory: the loads then go over the host link, and many programs with many rows each
keep it busy. XLA's own gather refuses operands in different memories.
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
    *,
    tile_bytes: int = TILE_BYTES,
    warps: int = 4,
    interpret: bool = False,
) -> Shaped[Array, "B K R D"]:
    """See `clusterkv_jax.kernels.gather_rows.gather_rows`."""
    batch, heads, count, width = source.shape
    wanted = rows.shape[2]
    if not jnp.issubdtype(source.dtype, jnp.floating):
        raise NotImplementedError(f"the GPU kernel of gather_rows moves floating point rows, got {source.dtype}.")
    if source.size == 0 or rows.size == 0:
        return jnp.zeros((batch, heads, wanted, width), source.dtype)
    tile = min(power_of_two(wanted), max(1, tile_bytes // (power_of_two(width) * source.dtype.itemsize)))
    made = call(
        partial(_kernel, tile=tile, count=count),
        jax.ShapeDtypeStruct((batch * heads, wanted, width), source.dtype),
        source.reshape(batch * heads, count, width),
        rows.reshape(batch * heads, wanted),
        grid=(pl.cdiv(wanted, tile), batch * heads),
        warps=warps,
        interpret=interpret,
    )
    return made.reshape(batch, heads, wanted, width)


def _kernel(source, rows, out, *, tile, count):
    head, wanted, width = pl.program_id(1), *out.shape[1:]
    place = pl.program_id(0) * tile + arange(tile)
    inside = place < wanted
    row = plgpu.load(rows.at[head, place], mask=inside, other=-1)
    columns = arange(power_of_two(width))
    found = load_rows(source, head, row, columns, (row >= 0) & (row < count), width)
    plgpu.store(
        out.at[head, place[:, None], columns[None, :]], found, mask=inside[:, None] & (columns < width)[None, :]
    )
