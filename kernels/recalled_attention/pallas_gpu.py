"""Attention over recalled rows on GPU: flash decoding that reads its rows by index, where they lie.

    grid (splits, B K J)     a program: `span` entries of one list and what follows it, all queries that share it
    then (queries, B K J)    combines the splits of one query, as `biased_attention` does

Bytes: every row of a list once, 2 D elements, and 4 of its number. Gathered first, rows would be moved three times.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.biased_attention.pallas_gpu import (
    COMBINED_COLUMNS,
    LOG2_E,
    combine,
    mix,
    online_softmax,
    split_sizes,
)
from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, dot, load_rows, power_of_two
from clusterkv_jax.kernels.soft_cap import capped


def recalled_attention(
    q,
    keys,
    values,
    rows,
    since=None,
    length=None,
    *,
    unlisted=0,
    soft_cap=None,
    return_lse=False,
    sizes=None,
    interpret=False,
):
    """See `clusterkv_jax.kernels.recalled_attention.recalled_attention`; `sizes` as in `biased_attention`."""
    check_dtypes("recalled_attention", q, keys, values)
    batch, heads, queries, dim = q.shape
    each, listed = rows.shape[2:]
    count = listed + unlisted
    if q.size == 0 or keys.size == 0 or count == 0 or power_of_two(dim) > 256:
        raise NotImplementedError(f"The GPU kernel of recalled_attention takes rows of D up to 256, got {keys.shape}.")
    lists, share = batch * heads * each, queries // each
    options = split_sizes(q.dtype.itemsize, count, lists) | dict(sizes or {})
    block, span = options["block"], options["span"]
    splits = pl.cdiv(count, span)

    def flat(x):
        return x.reshape(batch * heads, *x.shape[2:])

    end = jnp.full((batch, heads), keys.shape[2], jnp.int32) if length is None else length
    parts = call(
        partial(
            _attend, tile=power_of_two(share, 16), block=block, span=span, each=each, count=count, soft_cap=soft_cap
        ),
        (
            jax.ShapeDtypeStruct((lists, splits, share, dim), jnp.float32),
            jax.ShapeDtypeStruct((lists, splits, share), jnp.float32),
        ),
        q.reshape(lists, share, dim),
        flat(keys),
        flat(values),
        rows.reshape(lists, listed),
        jnp.zeros(batch, jnp.int32) if since is None else since,
        end.reshape(-1),
        grid=(splits, lists),
        warps=options["warps"],
        stages=options["stages"],
        interpret=interpret,
    )
    shape = (batch, 1, heads * queries, dim)
    out, lse = call(
        partial(combine, span=span, kv_heads=heads * each),
        (jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct(shape[:3], jnp.float32)),
        *parts,
        jnp.full((lists,), count, jnp.int32),
        grid=(share, lists, pl.cdiv(dim, COMBINED_COLUMNS)),
        warps=4,
        interpret=interpret,
        name="recalled_attention_combine",
    )
    return (out.reshape(q.shape), lse.reshape(q.shape[:3])) if return_lse else out.reshape(q.shape)


def _attend(q, keys, values, rows, since, length, out, lse, *, tile, block, span, each, count, soft_cap):
    """Attention of the queries of one list over one split of it."""
    split, number = pl.program_id(0), pl.program_id(1)
    head, width, share, listed = number // each, keys.shape[2], q.shape[1], rows.shape[1]
    end, late = length[head], since[head // (length.shape[0] // since.shape[0])] - listed
    columns, query_number = arange(power_of_two(width, 16)), arange(tile)
    query = load_rows(q, number, query_number, columns, query_number < share, width)
    first = split * span
    last = jnp.minimum(first + span, count)

    def read(i):
        place = first + i * block + arange(block)
        named = plgpu.load(rows.at[number, place], mask=place < listed, other=-1)
        row = jnp.where(place < listed, named, late + place)
        real = (row >= 0) & (row < end) & (place < last)
        key = load_rows(keys, head, row, columns, real, width)
        product = dot(query, key, (1, 1))
        if soft_cap is None:
            score = product * (LOG2_E * width**-0.5)
        else:
            score = LOG2_E * capped(product * width**-0.5, soft_cap)
        score = jnp.where(real[None, :], score, -jnp.inf)
        value = load_rows(values, head, row, columns, real, width)
        return score, lambda weight: mix(weight, [value])

    (mixed,), split_lse = online_softmax(pl.cdiv(last - first, block), read, tile, [columns.shape[0]])
    inside = query_number < share
    mask = inside[:, None] & (columns < width)[None, :]
    plgpu.store(out.at[number, split, query_number[:, None], columns[None, :]], mixed, mask=mask)
    plgpu.store(lse.at[number, split, query_number], split_lse, mask=inside)
