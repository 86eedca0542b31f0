"""Appending on GPU: one launch writes all buffers, where XLA has a scatter for each.

A program per KV head and tile of tokens: no two programs write the same slot, and none reads what another one writes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.append_rows import reference
from clusterkv_jax.kernels.gpu import DTYPES, arange, call, differentiated_by, power_of_two
from clusterkv_jax.kernels.quantised import Quantised

TILE = 16  # tokens of a program


def append_rows(
    keys, values, degree, positions, length, new_keys, new_values, new_positions, real,
    scores=None, new_scores=None, *, tile=TILE, warps=None, interpret=False,
):  # fmt: skip
    """See `clusterkv_jax.kernels.append_rows.append_rows`."""
    for x in (keys, values, new_keys, new_values):
        if not isinstance(x, Quantised) and x.dtype not in DTYPES:
            raise NotImplementedError(
                f"The GPU kernel of append_rows takes float32, bfloat16 and float16, got {x.dtype}."
            )
    if 0 in (*keys.shape, *new_keys.shape):
        raise NotImplementedError("The GPU kernel of append_rows takes at least one slot and one token.")
    tile = min(power_of_two(new_keys.shape[2]), tile)
    options = (tile, warps or (1 if tile == 1 else 4), interpret)
    rows = keys, values, degree, positions, length, new_keys, new_values, new_positions, real, scores, new_scores
    return _append(options, *rows)


@differentiated_by(lambda _: reference.append_rows)
def _append(
    options, keys, values, degree, positions, length, new_keys, new_values, new_positions, real, scores, new_scores
):
    tile, warps, interpret = options
    batch, heads, tokens, _ = new_keys.shape
    new = jax.tree.leaves((new_keys, new_values, new_scores))
    inputs = (*new, new_positions, real, length)
    # In the shapes that they have: reshaped, XLA would take what else reads them for other arrays, and copy.
    buffers, tree = jax.tree.flatten((keys, values, scores, degree, positions))
    outputs = call(
        partial(_kernel, tile=tile, rows=len(new)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in buffers],
        *inputs,
        *buffers,
        grid=(heads, batch, pl.cdiv(tokens, tile)),
        warps=warps,
        aliases={len(inputs) + i: i for i in range(len(buffers))},
        interpret=interpret,
    )
    keys, values, scores, degree, positions = jax.tree.unflatten(tree, outputs)
    return keys, values, degree, positions, scores


def _kernel(*refs, tile, rows):
    """The new rows, with codes, scales and scores `rows` arrays in all; what else is known of the tokens; and the
    buffers to be written, as arguments and then as the outputs in their place.
    """
    new, (new_positions, real, length), buffers = refs[:rows], refs[rows : rows + 3], refs[rows + 3 :]
    head, row = pl.program_id(0), pl.program_id(1)
    token = pl.program_id(2) * tile + arange(tile)
    write(new, new_positions, real, length[row, head], buffers[len(buffers) // 2 :], row, head, head, token)


def write(new, new_positions, real, length, buffers, row, head, source_head, token, first=0, slots=None):
    """These tokens of a sequence behind the `length` rows of a head, all of whose slots are there or `slots` from the
    `first` on; the new rows are those of `source_head`.
    """
    stores, (degree, *positions) = buffers[: len(new)], buffers[len(new) :]
    inside = token < new[0].shape[2]
    slot, slots = length + token, degree.shape[2] if slots is None else slots
    stored = inside & plgpu.load(real.at[row, token], mask=inside, other=False) & (slot >= 0) & (slot < slots)
    slot += first
    # Read whether it is stored or not, so that the reads do not wait for each other.
    for source, buffer in zip(new, stores, strict=True):
        zero = jnp.zeros((), source.dtype)
        if len(source.shape) == 3:  # scales, scores
            number = plgpu.load(source.at[row, source_head, token], mask=inside, other=zero)
            plgpu.store(buffer.at[row, head, slot], number, mask=stored)
            continue
        column = arange(power_of_two(source.shape[3]))
        across = (column < source.shape[3])[None, :]
        at = source.at[row, source_head, token[:, None], column[None, :]]
        values = plgpu.load(at, mask=inside[:, None] & across, other=zero).astype(buffer.dtype)
        plgpu.store(buffer.at[row, head, slot[:, None], column[None, :]], values, mask=stored[:, None] & across)
    plgpu.store(degree.at[row, head, slot], jnp.ones(token.shape, degree.dtype), mask=stored)
    for buffer in positions:
        position = plgpu.load(new_positions.at[row, token], mask=inside, other=0)
        plgpu.store(buffer.at[row, head, slot], position.astype(buffer.dtype), mask=stored)
