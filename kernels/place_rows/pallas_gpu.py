"""Rows in their place on GPU: a program copies a tile of one head's rows and sums their squares on the way.

Rows come in the order of their tokens, as projections make them: the order that `swapaxes` restores is that of memory.
XLA copies as fast, but reads the rows once more for their squares.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, power_of_two
from clusterkv_jax.kernels.quantised import squares_of

TILE_BYTES, WARPS = 8192, 4


def place_rows(held, squares, rows, lengths, place, *, interpret=False):
    """See `clusterkv_jax.kernels.place_rows.place_rows`."""
    check_dtypes("place_rows", held, rows)
    batch, heads, tokens, width = rows.shape
    tile = min(power_of_two(tokens), max(1, TILE_BYTES // (power_of_two(width) * rows.dtype.itemsize)))
    return call(
        partial(_kernel, tile=tile),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (held, squares)),
        held,
        squares,
        jnp.swapaxes(rows, 1, 2),
        lengths,
        jnp.reshape(place, 1),
        # Heads first: programs that run together read the rows of the same tokens.
        grid=(heads, pl.cdiv(tokens, tile), batch),
        warps=WARPS,
        aliases={0: 0, 1: 1},
        interpret=interpret,
    )


def _kernel(held, squares, rows, lengths, place, new_held, new_squares, *, tile):
    del held, squares  # in place: what is not written stays
    head, sequence = pl.program_id(0), pl.program_id(2)
    token = pl.program_id(1) * tile + arange(tile)
    tokens, width = rows.shape[1], rows.shape[3]
    columns, inside = arange(power_of_two(width)), token < tokens
    at, there = (place[0], sequence, head), inside[:, None] & (columns < width)[None, :]
    real = there & (token < lengths[sequence])[:, None]
    row = plgpu.load(rows.at[sequence, token[:, None], head, columns[None, :]], mask=real, other=0.0)
    plgpu.store(new_held.at[(*at, token[:, None], columns[None, :])], row.astype(new_held.dtype), mask=there)
    plgpu.store(new_squares.at[(*at, token)], squares_of([row.astype(jnp.float32)]), mask=inside)
