"""Attention over pages on GPU: flash decoding, as `biased_attention`, over the slots of each head alone.

    attend    grid (splits of all heads, B, tiles of queries)    a program: `span` slots of one KV head
    combine   grid (query rows, B K)                             the splits of one query row

A head's pages are one row of slots, which no program leaves: the queries of a head never have an output for each page.
A program finds its head by where the splits of each head begin, as in `step_in_groups`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from clusterkv_jax.kernels import words
from clusterkv_jax.kernels.biased_attention.pallas_gpu import (
    COMBINED_COLUMNS,
    MOST_QUERIES,
    attend_split,
    check_rows,
    combine_splits,
    split_sizes,
)
from clusterkv_jax.kernels.gpu import arange, call, differentiated_by, power_of_two
from clusterkv_jax.kernels.paged_attention import reference
from clusterkv_jax.kernels.quantised import Quantised, as_array, in_basis_of_codes, kind
from clusterkv_jax.kernels.step_in_groups.pallas_gpu import slots_of, split_of
from clusterkv_jax.kernels.tuning import blocks


def paged_attention(
    q, keys, values, degree, length, first, *, soft_cap=None, degree_power=1.0, sizes=None, interpret=False
):
    """See `clusterkv_jax.kernels.paged_attention.paged_attention`; `sizes` as in `biased_attention`."""
    check_rows("paged_attention", q, keys, values)
    options = soft_cap, degree_power, tuple((sizes or {}).items()), interpret
    return _run(options, q, keys, values, degree, length, first)


def _definition(options):
    soft_cap, degree_power, *_ = options
    return partial(reference.paged_attention, soft_cap=soft_cap, degree_power=degree_power)


@differentiated_by(_definition)
def _run(options, *operands):
    return _attended(*operands, options=options)


@in_basis_of_codes
def _attended(q, keys, values, degree, length, first, *, options):
    soft_cap, degree_power, sizes, interpret = options
    batch, tokens, heads, dim = q.shape
    kv_heads, page, slots = length.shape[1], degree.shape[2], degree[0].size
    queries, coded = tokens * heads // kv_heads, isinstance(keys, Quantised)
    tile = min(power_of_two(queries, 16), MOST_QUERIES)
    tiles = pl.cdiv(queries, tile)
    chosen = _sizes(as_array(keys), slots // kv_heads, batch * kv_heads * tiles, tile) | dict(sizes)
    stored = kind(keys) if coded else None
    if coded:
        keys, values = words.in_words(keys), words.in_words(values)
    cache = jax.tree.map(lambda x: x.reshape(batch, -1, *x.shape[3:]), (keys, values, degree))
    span, most = chosen["span"], pl.cdiv(slots, chosen["span"])
    common = {"page": page, "slots": slots, "span": span, "kv_heads": kv_heads}
    bias = {"stored": stored, "soft_cap": soft_cap, "degree_power": degree_power}
    parts, lses = call(
        partial(_attend, tile=tile, block=chosen["block"], **common, **bias),
        (
            jax.ShapeDtypeStruct((batch * kv_heads, most, queries, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch * kv_heads, most, queries), jnp.float32),
        ),
        *(q, *cache, length, first),
        grid=(slots // span + kv_heads, batch, tiles),  # no head has a split more than its slots need
        warps=chosen["warps"],
        stages=chosen["stages"],
        interpret=interpret,
    )
    return call(
        partial(_combine, **common),
        (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        *(parts, lses, length, first),
        grid=(queries, batch * kv_heads, pl.cdiv(dim, COMBINED_COLUMNS)),
        warps=4,
        interpret=interpret,
    )


def _sizes(stored, mean, programs, tile):
    """Slots of a block and of a split, for heads of so many slots in the mean."""
    row = {"dim": stored.shape[-1], "itemsize": stored.dtype.itemsize}
    measured = blocks("biased_attention", heads=programs, tile=tile, slots=mean, **row)
    return split_sizes(stored.dtype.itemsize, mean, programs) | measured


def _attend(q, keys, values, degree, length, first, out, lse, *, page, slots, span, kv_heads, tile, **options):
    program, row, first_row = pl.program_id(0), pl.program_id(1), pl.program_id(2) * tile
    head, split, begin, own = split_of(program, first, row, slots, page, span, kv_heads)

    @pl.when(split * span < own)
    def _():
        where = split, (row,), row * kv_heads + head, first_row
        mine = {"tile": tile, "span": span, "kv_heads": kv_heads, "begin": begin, "slots": own} | options
        attend_split(q, keys, values, degree, length[row, head], out, lse, *where, **mine)


def _combine(parts, lses, length, first, out, lse, *, page, slots, span, kv_heads):
    row, head = (f(pl.program_id(1), jnp.int32(kv_heads)) for f in (jax.lax.div, jax.lax.rem))
    own = jnp.max(slots_of(first, row, head + arange(1), slots, page, kv_heads)[1])
    filled = pl.cdiv(jnp.minimum(length[row, head], own), span)
    combine_splits(parts, lses, filled, out, lse, kv_heads=kv_heads)
