"""Biased attention on GPU: flash decoding, split over the slots.

    grid (splits, B K, tiles of queries)     a program: `span` slots of one KV head, all query heads that share it
    then (query rows, B K)                   combines the splits of one query row

Bytes: keys, values and degree of the slots below `length`, once; a program beyond `length` ends at once. The queries of
a KV head (G of them, times T) fill the rows of one matrix product, at least 16 as the matrix unit wants. Softmax runs
online in base 2. Partial outputs are float32: 4 (D + 1) bytes per split and query, 2 % of the reading at span 512.
Codes of quantised rows are read in words and become float16 on their way into the matrix product, one product for each
number of a word (`kernels.words`). Queries, and weights with their scales, are brought below 1 for that.
"""

import functools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels import words
from clusterkv_jax.kernels.gpu import arange, call, check_codes, check_dtypes, dot, load_rows, power_of_two
from clusterkv_jax.kernels.quantised import Quantised, as_array, in_basis_of_codes, kind
from clusterkv_jax.kernels.soft_cap import capped
from clusterkv_jax.kernels.tuning import blocks

MOST_QUERIES = 64  # query rows of a tile
MANY_QUERIES = 1024  # query rows of a head from which on products take the time, and not reading
MOST_SPLITS = 128
MOST_SPAN = 512  # short rows of a ragged batch free their multiprocessors early
PROGRAMS = 528  # wanted at least: four for each multiprocessor of an H200
COMBINED_COLUMNS = 32  # of a program that combines splits: more programs, each sooner done
LOG2_E = math.log2(math.e)


@in_basis_of_codes
def biased_attention(
    q, keys, values, degree, length, *, soft_cap=None, return_lse, return_probs, sizes=None, interpret=False
):
    """See `clusterkv_jax.kernels.biased_attention.biased_attention`.

    `sizes` go before what was measured on this device (`kernels.tuning`) and what is computed where nothing was: slots
    of a block and of a split (`span`), warps of a program, and `stages`, blocks on their way at once.
    """
    check_rows("biased_attention", q, keys, values)
    batch, tokens, heads, dim = q.shape
    kv_heads, slots = keys.shape[1:3]
    queries = tokens * heads // kv_heads
    many = queries >= MANY_QUERIES and not isinstance(keys, Quantised)
    tile = 2 * MOST_QUERIES if many else min(power_of_two(queries, 16), MOST_QUERIES)
    programs = batch * kv_heads * pl.cdiv(queries, tile)
    options = _sizes(as_array(keys), programs, tile, many) | dict(sizes or {})
    block, span, warps, stages = (options[name] for name in ("block", "span", "warps", "stages"))
    splits = pl.cdiv(slots, span)
    end = (jnp.full((batch * kv_heads,), slots) if length is None else length.reshape(-1)).astype(jnp.int32)
    common: dict[str, Any] = {"block": block, "kv_heads": kv_heads, "stored": None, "soft_cap": soft_cap}
    if isinstance(keys, Quantised):
        common["stored"] = kind(keys)
        keys, values = words.in_words(keys), words.in_words(values)

    def flat(x):
        return x.reshape(batch * kv_heads, *x.shape[2:])

    cache = (*jax.tree.map(flat, (keys, values, degree)), end)

    out, lse = call(
        partial(_attend, tile=tile, span=span, **common),
        (
            jax.ShapeDtypeStruct((batch * kv_heads, splits, queries, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch * kv_heads, splits, queries), jnp.float32),
        ),
        q,
        *cache,
        grid=(splits, batch * kv_heads, pl.cdiv(queries, tile)),
        warps=warps,
        stages=stages,
        interpret=interpret,
    )
    out, lse = call(
        partial(combine, span=span, kv_heads=kv_heads),
        (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        out,
        lse,
        end,
        grid=(queries, batch * kv_heads, pl.cdiv(dim, COMBINED_COLUMNS)),
        warps=4,
        interpret=interpret,
    )
    result = [out]
    if return_lse:
        result.append(lse)
    if return_probs:
        probs = call(
            partial(_probabilities, **common),
            jax.ShapeDtypeStruct((batch, heads, slots), jnp.float32),
            q,
            *cache,
            lse,
            grid=(pl.cdiv(slots, block), batch * kv_heads),
            warps=warps,
            interpret=interpret,
        )
        result.append(probs)
    return result[0] if len(result) == 1 else tuple(result)


def check_rows(op, q, keys, values):
    """Raise NotImplementedError for what the kernels do not take."""
    check_dtypes(op, q, *(x for x in (keys, values) if not isinstance(x, Quantised)))
    dim = q.shape[3]
    if q.size == 0 or as_array(keys).size == 0:
        raise NotImplementedError(f"The GPU kernel of {op} needs queries and slots.")
    if power_of_two(dim) > 256:
        raise NotImplementedError(f"The GPU kernel of {op} takes D up to 256, got {dim}.")
    if isinstance(keys, Quantised):
        if as_array(keys).shape[3] % 2:
            raise NotImplementedError(f"The GPU kernel of {op} reads codes in words of two bytes, got D {dim}.")
        check_codes(op, kind(keys))


def _sizes(stored, programs, tile, many):
    """What was measured on this device, or is computed where nothing was."""
    slots, row = stored.shape[2], {"dim": stored.shape[-1], "itemsize": stored.dtype.itemsize}
    measured = blocks("biased_attention", heads=programs, tile=tile, slots=slots, **row)
    computed = split_sizes(stored.dtype.itemsize, slots, programs, slots if many else MOST_SPAN)
    return computed | ({"warps": 8} if many else {}) | measured


def split_sizes(itemsize: int, slots: int, programs: int, most_span: int = MOST_SPAN) -> dict[str, int]:
    """Where nothing was measured: spans that fill the device with programs, but few enough to combine cheaply."""
    block, stages = {4: (32, 2), 2: (64, 3), 1: (128, 3)}[itemsize]
    splits = min(MOST_SPLITS, max(1, PROGRAMS // programs), pl.cdiv(slots, block))
    splits = max(splits, min(MOST_SPLITS, pl.cdiv(slots, most_span)))
    span = pl.cdiv(pl.cdiv(slots, splits), block) * block
    return {"block": block, "span": span, "warps": 4, "stages": stages}


def _query_rows(q, head, first, tile, kv_heads):
    """One tile of the T G query rows of a KV head: sequence, token, query head, whether there is such a row."""
    tokens, heads = q.shape[1:3]
    group = heads // kv_heads
    row = first + arange(tile)
    return head // kv_heads, row // group, (head % kv_heads) * group + row % group, row < tokens * group


def _parts(rows, stored, width):
    """What a row is loaded by, and how many of that there are; and the columns of each part that is multiplied."""
    if stored is None:
        columns = arange(power_of_two(width, 16))
        return columns, width, [columns]
    count = rows.codes.shape[-1]
    word = arange(power_of_two(count, 16))
    return word, count, words.columns_of_parts(word, stored, width)


def _load_queries(q, rows, columns, stored):
    """The queries of a tile by the parts of their columns, and what they were divided by to become float16."""
    b, token, head, inside = rows
    number, count, parts = columns
    mask = inside[:, None] & (number < count)[None, :]
    tiles = [plgpu.load(q.at[b, token[:, None], head[:, None], part[None, :]], mask=mask, other=0.0) for part in parts]
    if stored is None or q.dtype == jnp.float32:
        return tiles, None
    wide = [tile.astype(jnp.float32) for tile in tiles]
    peak = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(tile), axis=1) for tile in wide])
    peak = jnp.where(peak > 0, peak, 1.0)
    return [(tile / peak[:, None]).astype(jnp.float16) for tile in wide], peak


def _load_rows(rows, stored, head, slot, columns, mask, wide):
    """A tile of rows in parts of their columns, in float32 if `wide`, and their scales, None where they have none."""
    number, count, _ = columns
    if stored is None:
        return [load_rows(rows, head, slot, number, mask, count)], None
    tiles = words.parts(load_rows(rows.codes, head, slot, number, mask, count), stored)
    tiles = [tile.astype(jnp.float32) for tile in tiles] if wide else tiles
    return tiles, plgpu.load(rows.scales.at[(*head, slot)], mask=mask, other=0.0)


def _scores(query, keys, degree, head, slot, inside, columns, stored, width, soft_cap, degree_power=1.0):
    """Biased scores [queries, slots] in units of ln 2, -inf for empty slots, and which slots are not empty."""
    tiles, peak = query
    count = plgpu.load(degree.at[(*head, slot)], mask=inside, other=0.0)
    occupied = count > 0
    key, scale = _load_rows(keys, stored, head, slot, columns, inside, peak is None)
    bias = jnp.log2(jnp.where(occupied, count, 1.0))
    bias = bias if degree_power == 1 else degree_power * bias
    score: Any = sum(dot(*part, (1, 1)) for part in zip(tiles, key, strict=True))
    score = score if scale is None else score * scale[None, :]
    factor = (LOG2_E if soft_cap is None else 1.0) / math.sqrt(width)
    score = score * (factor if peak is None else factor * peak[:, None])
    score = score if soft_cap is None else LOG2_E * capped(score, soft_cap)
    return jnp.where(occupied[None, :], score + bias[None, :], -jnp.inf), occupied


def _attend(q, keys, values, degree, end, out, lse, *, tile, block, span, kv_heads, stored, soft_cap):
    split, head, first_row = pl.program_id(0), pl.program_id(1), pl.program_id(2) * tile
    options = {"block": block, "span": span, "kv_heads": kv_heads, "stored": stored, "soft_cap": soft_cap}
    attend_split(q, keys, values, degree, end[head], out, lse, split, (head,), head, first_row, tile=tile, **options)


def attend_split(
    q, keys, values, degree, end, out, lse, split, head, of_q, first_row,
    *, tile, block, span, kv_heads, stored, soft_cap, begin=0, slots=None, degree_power=1.0,
):  # fmt: skip
    """Attention of one tile of queries over the slots of one split; of an empty split nothing is written.

    `head` is where a KV head's rows are in the arrays, and `end` how many; `of_q` counts all KV heads of all sequences.
    Its slots are all that are there, or so many from `begin` on.
    """
    first, width = split * span, q.shape[3]
    last = jnp.minimum(jnp.minimum(end, degree.shape[-1] if slots is None else slots), first + span)

    @pl.when(first < last)
    def _():
        columns = number, count, parts = _parts(keys, stored, width)
        row = first_row + arange(tile)
        query = _load_queries(q, _query_rows(q, of_q, first_row, tile, kv_heads), columns, stored)

        def read(i):
            slot = first + i * block + arange(block)
            inside, slot = slot < last, begin + slot
            how = columns, stored, width, soft_cap, degree_power
            score, occupied = _scores(query, keys, degree, head, slot, inside, *how)
            value, scale = _load_rows(values, stored, head, slot, columns, occupied, q.dtype == jnp.float32)
            return score, lambda weight: mix(weight, value, scale)

        mixed, split_lse = online_softmax(pl.cdiv(last - first, block), read, tile, [number.shape[0]] * len(parts))
        inside = row < out.shape[2]
        mask = inside[:, None] & (number < count)[None, :]
        for columns_of_part, part in zip(parts, mixed, strict=True):
            plgpu.store(out.at[of_q, split, row[:, None], columns_of_part[None, :]], part, mask=mask)
        plgpu.store(lse.at[of_q, split, row], split_lse, mask=inside)


def mix(weight, values, scale=None):
    """Weighted sums of the rows, for each part of their columns; weights times scales are at most 1 in float16."""
    if scale is None:
        return [dot(weight.astype(value.dtype), value) for value in values]
    most = jnp.max(scale)
    most = jnp.where(most > 0, most, 1.0)
    weight = (weight * (scale / most)[None, :]).astype(values[0].dtype)
    return [dot(weight, value) * most for value in values]


def online_softmax(blocks, read, tile, widths):
    """Attention of a tile of queries over blocks of rows, and the base 2 logarithm of its sum.

    `read(i)` gives the scores of block i in base 2, -inf where there is no row, and a function that mixes its values by
    their weights, in parts of these `widths`.
    """

    def body(i, state):
        peak, total, mixed = state
        score, mix_by = read(i)
        higher = jnp.maximum(peak, jnp.max(score, axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        weight, shrink = jnp.exp2(score - base[:, None]), jnp.exp2(peak - base)
        mixed = [part * shrink[:, None] + new for part, new in zip(mixed, mix_by(weight), strict=True)]
        return higher, total * shrink + jnp.sum(weight, axis=1), mixed

    start = (
        jnp.full((tile,), -jnp.inf, jnp.float32),
        jnp.zeros((tile,), jnp.float32),
        [jnp.zeros((tile, width), jnp.float32) for width in widths],
    )
    peak, total, mixed = jax.lax.fori_loop(0, blocks, body, start)
    return [part / jnp.where(total > 0, total, 1.0)[:, None] for part in mixed], peak + jnp.log2(total)


def combine(parts, lses, end, out, lse, *, span, kv_heads):
    """`combine_splits` of heads that have this number of slots each."""
    combine_splits(parts, lses, pl.cdiv(end[pl.program_id(1)], span), out, lse, kv_heads=kv_heads)


def combine_splits(parts, lses, filled, out, lse, *, kv_heads):
    """Some columns of one query row: its `filled` splits weighted by their share of the whole sum."""
    row, head = pl.program_id(0), pl.program_id(1)
    splits, _, width = parts.shape[1:]
    group = out.shape[2] // kv_heads
    split = arange(power_of_two(splits))
    columns = arange(min(COMBINED_COLUMNS, power_of_two(width)), pl.program_id(2) * COMBINED_COLUMNS)
    inside = (split < splits) & (split < filled)
    part_lse = plgpu.load(lses.at[head, split, row], mask=inside, other=-jnp.inf)
    peak = jnp.max(part_lse)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight = jnp.exp2(part_lse - base)
    total = jnp.sum(weight)
    mask = inside[:, None] & (columns < width)[None, :]
    part = plgpu.load(parts.at[head, split[:, None], row, columns[None, :]], mask=mask, other=0.0)
    mixed = jnp.sum(part * weight[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    where = (head // kv_heads, row // group, (head % kv_heads) * group + row % group)
    plgpu.store(out.at[(*where, columns)], mixed.astype(out.dtype), mask=columns < width)

    @pl.when(pl.program_id(2) == 0)
    def _():
        lse[where] = (base + jnp.log2(total)) / LOG2_E


def _probabilities(q, keys, values, degree, end, lse, probs, *, block, kv_heads, stored, soft_cap):
    """Probabilities of one block of slots for the query heads of one KV head, summed over the tokens."""
    del values
    head, tokens, group = pl.program_id(1), q.shape[1], q.shape[2] // kv_heads
    slots, tile, width = probs.shape[2], power_of_two(group, 16), q.shape[3]
    columns = _parts(keys, stored, width)
    slot = pl.program_id(0) * block + arange(block)
    b, first = head // kv_heads, (head % kv_heads) * group
    member = arange(tile)
    inside = member < group

    def one_token(t, total):
        token = jnp.full((tile,), t, jnp.int32)
        query = _load_queries(q, (b, token, first + member, inside), columns, stored)
        within = slot < jnp.minimum(end[head], slots)
        score, _ = _scores(query, keys, degree, (head,), slot, within, columns, stored, width, soft_cap)
        whole = plgpu.load(lse.at[b, token, first + member], mask=inside, other=0.0) * LOG2_E
        return total + jnp.exp2(score - jnp.where(whole == -jnp.inf, 0.0, whole)[:, None])

    total = jax.lax.fori_loop(0, tokens, one_token, jnp.zeros((tile, block), jnp.float32))
    mask = inside[:, None] & (slot < slots)[None, :]
    plgpu.store(probs.at[b, (first + member)[:, None], slot[None, :]], total, mask=mask)
