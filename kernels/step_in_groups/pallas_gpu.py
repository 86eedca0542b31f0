"""A step of several groups on GPU: two launches for all of them, where each group would have three of its own.

    attend    grid (splits of all heads, B)   a program: `span` slots of one KV head, the query heads that share it
    combine   grid (query rows, B K)          the splits of one query row, and what its head holds then

The token's row enters by the program that reads its slot, which then reads it among the others. A program finds its
group by its number, which is compared with where the groups begin: the code of a group stands in a branch of its own,
since each has arrays of its own. Pages of a group are one row of slots; there a program finds its head by where the
splits of each head begin, which it counts itself: a sum beside the kernel would be a launch more.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from clusterkv_jax.kernels import words
from clusterkv_jax.kernels.append_rows.pallas_gpu import write
from clusterkv_jax.kernels.biased_attention.pallas_gpu import (
    COMBINED_COLUMNS,
    attend_split,
    combine_splits,
    split_sizes,
)
from clusterkv_jax.kernels.gpu import DTYPES, arange, call, check_codes, check_dtypes, differentiated_by, power_of_two
from clusterkv_jax.kernels.quantised import Quantised, as_array, is_packed, kind, rotated
from clusterkv_jax.kernels.step_in_groups import reference
from clusterkv_jax.kernels.tuning import blocks
from clusterkv_jax.runtime.dispatch import platform

MOST_QUERIES = 64  # query heads of a KV head


def step_in_groups(
    q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths, first=None,
    *, heads, largest=None, soft_cap=None, degree_power=1.0, sizes=None, interpret=False,
):  # fmt: skip
    """See `clusterkv_jax.kernels.step_in_groups.step_in_groups`; `sizes` as in `biased_attention`."""
    rows = [x for group in buffers for x in group[:2]]
    check_dtypes("step_in_groups", q, *(x for x in rows if not isinstance(x, Quantised)))
    stored = {kind(x) if isinstance(x, Quantised) else str(x.dtype) for x in (*rows, new_keys, new_values)}
    group, dim = q.shape[2] // sum(map(len, heads)), q.shape[3]
    if len(stored) > 1:
        raise NotImplementedError(f"The GPU kernel of step_in_groups takes rows of one type, got {', '.join(stored)}.")
    if q.shape[1] != 1 or group > MOST_QUERIES or power_of_two(dim) > 256 or 0 in (q.size, *(x.size for x in lengths)):
        raise NotImplementedError(f"The GPU kernel of step_in_groups takes a token of D up to 256, got {q.shape}.")
    if isinstance(new_keys, Quantised):
        check_codes("step_in_groups", kind(new_keys))
        if as_array(new_keys).shape[3] % 2:
            raise NotImplementedError(
                f"The GPU kernel of step_in_groups reads codes in words of two bytes, got D {dim}."
            )
    elif new_keys.dtype not in DTYPES:
        raise NotImplementedError(f"The GPU kernel of step_in_groups takes no rows of {new_keys.dtype}.")
    options = heads, largest, (soft_cap, degree_power), tuple((sizes or {}).items()), interpret
    return _run(options, q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths, first)


def _definition(options):
    heads, largest, (soft_cap, degree_power), *_ = options
    how = {"heads": heads, "largest": largest, "soft_cap": soft_cap, "degree_power": degree_power}
    return partial(reference.step_in_groups, **how)


@differentiated_by(_definition)
def _run(options, q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths, first):
    heads, largest, bias, sizes, interpret = options
    coded = isinstance(new_keys, Quantised)
    turns = coded and is_packed(new_keys)
    stored = kind(new_keys) if coded else None

    def in_words(*rows):
        return tuple(words.in_words(x) for x in rows) if coded else rows

    new = in_words(new_keys, new_values), new_scores, new_positions, real
    held = tuple((*in_words(keys, values), *beside) for keys, values, *beside in buffers)
    q = rotated(q) if turns else q
    where = heads, first, largest
    out, lse, held, lengths = _stepped(q, new, held, lengths, where, stored, bias, dict(sizes), interpret)

    def back(x):
        return words.out_of_words(x, as_array(new_keys).dtype) if coded else x

    buffers = tuple((back(keys), back(values), *beside) for keys, values, *beside in held)
    return rotated(out) if turns else out, lse, buffers, lengths


def _stepped(q, new, buffers, lengths, where, stored, bias, sizes, interpret):
    """Buffers and lengths change where they lie: a sum beside the kernels would have lengths copied at every step."""
    heads, first, largest = where
    soft_cap, degree_power = bias
    batch, _, query_heads, dim = q.shape
    kv_heads = sum(map(len, heads))
    queries = query_heads // kv_heads
    shapes, page = jax.tree.map(jnp.shape, buffers), None
    if first is not None:
        page = buffers[0][2].shape[2]
        buffers = jax.tree.map(lambda x: x.reshape(batch, 1, -1, *x.shape[3:]), buffers)
    slots = [degree.shape[2] for _, _, degree, *_ in buffers]
    total = sum(n * (1 if page else len(mine)) for n, mine in zip(slots, heads, strict=True))
    options = _sizes(as_array(buffers[0][0]), total // kv_heads, batch, queries, kv_heads, stored) | sizes
    splits = [pl.cdiv(n, options["span"]) for n in slots]
    most, programs = max(splits), sum(n * len(mine) for n, mine in zip(splits, heads, strict=True))
    if page:
        most = pl.cdiv(largest or total, options["span"])
        programs = total // options["span"] + kv_heads  # no head has a split more than its slots need
    common = {"heads": heads, "page": page, "span": options["span"], "kv_heads": kv_heads}
    attend = {
        "splits": splits,
        "block": options["block"],
        "tile": options["tile"],
        "stored": stored,
        "soft_cap": soft_cap,
        "degree_power": degree_power,
    } | common

    def like(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    before = len(jax.tree.leaves((q, new, lengths, first)))
    parts, lses, ends, buffers = call(
        partial(_attend, **attend),
        (
            jax.ShapeDtypeStruct((batch * kv_heads, most, queries, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch * kv_heads, most, queries), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32),
            like(buffers),
        ),
        *(q, *new, lengths, first, buffers),
        grid=(programs, batch),
        warps=options["warps"],
        stages=options["stages"],
        aliases={before + i: 3 + i for i in range(len(jax.tree.leaves(buffers)))},
        interpret=interpret,
    )
    out, lse, lengths = call(
        partial(_combine, splits=splits, all_slots=total, **common),
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
            like(lengths),
        ),
        *(parts, lses, ends, first, lengths),
        grid=(queries, batch * kv_heads, pl.cdiv(dim, COMBINED_COLUMNS)),
        warps=4,
        aliases={3 + (first is not None) + i: 2 + i for i in range(len(lengths))},
        interpret=interpret,
    )
    return out, lse, jax.tree.map(lambda x, shape: x.reshape(shape), buffers, shapes), lengths


def _sizes(rows, mean, batch, queries, kv_heads, stored):
    """Rows of queries, and slots of a block and of a split, for heads of so many slots in the mean."""
    width, itemsize = (rows.shape[-1], rows.dtype.itemsize) if stored is None else (2 * rows.shape[-1], 1)
    tile, row = power_of_two(queries, 16), {"dim": width, "itemsize": itemsize}
    measured = blocks("biased_attention", heads=batch * kv_heads, tile=tile, slots=mean, **row)
    return {"tile": tile} | split_sizes(itemsize, mean, batch * kv_heads) | measured


def _attend(
    q, new, new_scores, new_positions, real, lengths, firsts, old, out, lse, ends, buffers,
    *, heads, splits, page, span, kv_heads, **options,
):  # fmt: skip
    """One split of one head, in the branch of its group."""
    del old  # in place: read and written as the outputs that alias them
    program, row, first = pl.program_id(0), pl.program_id(1), 0

    def of_head(group, length, head, place, at, split, begin, slots):
        """Head `head` of the model is number `place` of its group, and number `at` of the arrays."""
        keys, values, degree, positions, scores = group
        slot, enters = length[row, place], real[row, 0]
        end = slot + enters.astype(jnp.int32)

        @pl.when(enters & (split == jax.lax.div(slot, jnp.int32(span))))
        def _():
            sources = [*jax.tree.leaves(new), *([] if scores is None else [new_scores])]
            stores = [*jax.tree.leaves((keys, values)), *([] if scores is None else [scores]), degree]
            stores += [] if positions is None else [positions]
            write(sources, new_positions, real, slot, stores, row, at, head, arange(1), begin, slots)
            if platform() != "cpu":  # other threads of this program read it
                plgpu.debug_barrier()

        @pl.when(split == 0)
        def _():
            ends[row, head] = end

        where = (row, at), row * kv_heads + head
        mine = {"span": span, "kv_heads": kv_heads, "begin": begin, "slots": slots} | options
        attend_split(q, keys, values, degree, end, out, lse, split, *where, 0, **mine)

    if page is not None:
        (group,), (length,) = buffers, lengths
        all_slots = group[2].shape[2]
        head, split, begin, slots = split_of(program, firsts, row, all_slots, page, span, kv_heads)

        @pl.when(split * span < slots)
        def _():
            of_head(group, length, head, head, 0, split, begin, slots)

        @pl.when((split == 0) & (slots == 0))  # of a sequence that never came
        def _():
            ends[row, head] = length[row, head] + real[row, 0].astype(jnp.int32)

        return
    for mine, count, length, group in zip(heads, splits, lengths, buffers, strict=True):
        number = program - first

        @pl.when((number >= 0) & (number < count * len(mine)))
        def _(mine=mine, count=count, number=number, length=length, group=group):
            place, split = jax.lax.div(number, jnp.int32(count)), jax.lax.rem(number, jnp.int32(count))
            of_head(group, length, _nth(mine, place), place, place, split, 0, group[2].shape[2])

        first += count * len(mine)


def split_of(program, firsts, row, all_slots, page, span, kv_heads):
    """Whose split a program reads of heads in pages, which one, and where the head's slots begin and how many it has.

    A head without slots has one split, too. A program beyond the last gets one that its head does not have.
    """
    head = arange(power_of_two(kv_heads))
    begin, slots = slots_of(firsts, row, head, all_slots, page, kv_heads)
    count = jnp.maximum(jax.lax.div(slots + jnp.int32(span - 1), jnp.int32(span)), 1)
    count = jnp.where(head < kv_heads, count, 0)
    earlier = head[None, :] < head[:, None]
    before = jnp.sum(jnp.where(earlier, count[None, :], 0), axis=1, dtype=jnp.int32)
    place = jnp.sum(((head < kv_heads) & (before <= program)).astype(jnp.int32), dtype=jnp.int32) - 1

    def of_place(x):
        return jnp.sum(jnp.where(head == place, x, 0), dtype=jnp.int32)

    return place, program - of_place(before), of_place(begin), of_place(slots)


def slots_of(firsts, row, head, all_slots, page, kv_heads):
    """Where the slots of heads begin, and how many each has."""
    pages = all_slots // page
    first = plgpu.load(firsts.at[row, head], mask=head < kv_heads, other=pages)
    behind = plgpu.load(firsts.at[row, head + 1], mask=head + 1 < kv_heads, other=pages)
    return first * page, (behind - first) * page


def _combine(parts, lses, ends, firsts, old, out, lse, lengths, *, heads, splits, all_slots, page, span, kv_heads):
    """Some columns of one query row; the first of a head's programs writes what it holds, where its length was."""
    del old
    row, head = (f(pl.program_id(1), jnp.int32(kv_heads)) for f in (jax.lax.div, jax.lax.rem))
    end = ends[row, head]
    filled = pl.cdiv(end, span)  # a token without a slot may count as one more
    if page is not None:
        _, slots = slots_of(firsts, row, head + arange(1), all_slots, page, kv_heads)
        filled = jnp.minimum(filled, pl.cdiv(jnp.max(slots), span))
    for mine, count, length in zip(heads, splits, lengths, strict=True):
        place = jnp.int32(-1)
        for at, number in enumerate(mine):
            place = jnp.where(head == number, jnp.int32(at), place)
        filled = jnp.where(place >= 0, jnp.minimum(filled, count), filled)

        @pl.when((place >= 0) & (pl.program_id(0) == 0) & (pl.program_id(2) == 0))
        def _(length=length, place=place):
            length[row, place] = end

    combine_splits(parts, lses, filled, out, lse, kv_heads=kv_heads)


def _nth(numbers: tuple[int, ...], i: Array) -> Array:
    """numbers[i] of static numbers."""
    result = jnp.int32(numbers[0])
    for place, number in enumerate(numbers[1:], start=1):
        result = jnp.where(i == place, number, result)
    return result
