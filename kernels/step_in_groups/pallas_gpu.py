"""A step of several groups on GPU: three launches for all of them, where each group would have three of its own.

    append    grid (K, B)                     a program: one KV head's row, what else is known of it, and the length
    attend    grid (splits of all heads, B)   a program: `span` slots of one KV head, the query heads that share it
    combine   grid (query rows, B K)          the splits of one query row

A program finds its group by its number, which is compared with where the groups begin: the code of a group stands in a
branch of its own, since each has arrays of its own.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from clusterkv_jax.kernels import words
from clusterkv_jax.kernels.append_rows.pallas_gpu import write
from clusterkv_jax.kernels.biased_attention.pallas_gpu import (
    COMBINED_COLUMNS,
    attend_split,
    combine_splits,
    split_sizes,
)
from clusterkv_jax.kernels.gpu import DTYPES, arange, call, check_codes, check_dtypes, power_of_two
from clusterkv_jax.kernels.quantised import Quantised, as_array, is_packed, kind, rotated
from clusterkv_jax.kernels.step_in_groups import reference
from clusterkv_jax.kernels.tuning import blocks

MOST_QUERIES = 64  # query heads of a KV head


def step_in_groups(
    q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths, *, heads, soft_cap=None, sizes=None,
    interpret=False,
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
    options = heads, soft_cap, tuple((sizes or {}).items()), interpret
    return _run(options, q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths):
    heads, soft_cap, sizes, interpret = options
    new = (new_keys, new_values), new_scores, new_positions, real
    buffers, lengths = _appended(new, (buffers, lengths), heads, interpret)
    turns = isinstance(new_keys, Quantised) and is_packed(new_keys)
    out, lse = _attended(rotated(q) if turns else q, buffers, lengths, heads, soft_cap, dict(sizes), interpret)
    return rotated(out) if turns else out, lse, buffers, lengths


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""
    definition = partial(reference.step_in_groups, heads=options[0], soft_cap=options[1])
    return _run(options, *operands), jax.jvp(definition, operands, tangents)[1]


def _appended(new, held, heads, interpret):
    """Buffers and lengths, changed where they lie: a sum beside the kernel would have lengths copied at every step."""
    before = len(jax.tree.leaves(new))
    return call(
        partial(_append, heads=heads),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), held),
        *new,
        *held,
        grid=(sum(map(len, heads)), len(new[3])),
        warps=1,
        aliases={before + i: i for i in range(len(jax.tree.leaves(held)))},
        interpret=interpret,
    )


def _attended(q, buffers, lengths, heads, soft_cap, sizes, interpret):
    batch, _, query_heads, dim = q.shape
    kv_heads = sum(map(len, heads))
    rows = [as_array(group[0]) for group in buffers]
    slots = [x.shape[2] for x in rows]
    mean = sum(n * len(mine) for n, mine in zip(slots, heads, strict=True)) // kv_heads
    queries = query_heads // kv_heads
    tile = power_of_two(queries, 16)
    row = {"dim": rows[0].shape[-1], "itemsize": rows[0].dtype.itemsize}
    measured = blocks("biased_attention", heads=batch * kv_heads, tile=tile, slots=mean, **row)
    options = split_sizes(rows[0].dtype, mean, batch * kv_heads) | measured | sizes
    span, coded = options["span"], isinstance(buffers[0][0], Quantised)
    splits = [pl.cdiv(n, span) for n in slots]
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    in_words = lambda x: words.in_words(x) if coded else x  # noqa: E731
    cache = [jax.tree.map(flat, (in_words(keys), in_words(values), degree)) for keys, values, degree, *_ in buffers]
    ends = [length.reshape(-1) for length in lengths]
    common = {"tile": tile, "block": options["block"], "span": span, "kv_heads": kv_heads, "soft_cap": soft_cap}
    parts = call(
        partial(_attend, heads=heads, splits=splits, stored=kind(buffers[0][0]) if coded else None, **common),
        (
            jax.ShapeDtypeStruct((batch * kv_heads, max(splits), queries, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch * kv_heads, max(splits), queries), jnp.float32),
        ),
        q,
        cache,
        ends,
        grid=(sum(n * len(mine) for n, mine in zip(splits, heads, strict=True)), batch),
        warps=options["warps"],
        stages=options["stages"],
        interpret=interpret,
    )
    return call(
        partial(_combine, heads=heads, span=span, kv_heads=kv_heads),
        (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        *parts,
        ends,
        grid=(queries, batch * kv_heads, pl.cdiv(dim, COMBINED_COLUMNS)),
        warps=4,
        interpret=interpret,
    )


def _append(new, new_scores, new_positions, real, old, lengths, buffers, longer, *, heads):
    """A row of one head, in the branch of its group."""
    del old  # in place: written as the outputs that alias them, as lengths are
    program, row, first = pl.program_id(0), pl.program_id(1), 0
    every = zip(heads, lengths, longer, buffers, strict=True)
    for mine, length, new_length, (keys, values, degree, positions, scores) in every:
        number = program - first
        sources = [*jax.tree.leaves(new), *([] if scores is None else [new_scores])]
        stores = [*jax.tree.leaves((keys, values)), *([] if scores is None else [scores]), degree]
        stores += [] if positions is None else [positions]

        @pl.when((number >= 0) & (number < len(mine)))
        def _(mine=mine, number=number, length=length, new_length=new_length, sources=sources, stores=stores):
            write(sources, new_positions, real, length, stores, row, number, _nth(mine, number), arange(1))
            # In the place of the length, so after what reads it.
            new_length[row, number] = length[row, number] + real[row, 0].astype(jnp.int32)

        first += len(mine)


def _attend(q, cache, lengths, out, lse, *, heads, splits, kv_heads, **options):
    """One split of one head, in the branch of its group."""
    program, row, first = pl.program_id(0), pl.program_id(1), 0
    for mine, count, (keys, values, degree), end in zip(heads, splits, cache, lengths, strict=True):
        number = program - first

        @pl.when((number >= 0) & (number < count * len(mine)))
        def _(mine=mine, count=count, number=number, keys=keys, values=values, degree=degree, end=end):
            head, split = jax.lax.div(number, jnp.int32(count)), jax.lax.rem(number, jnp.int32(count))
            where = row * len(mine) + head, row * kv_heads + _nth(mine, head)
            attend_split(q, keys, values, degree, end, out, lse, split, *where, 0, kv_heads=kv_heads, **options)

        first += count * len(mine)


def _combine(parts, lses, lengths, out, lse, *, heads, span, kv_heads):
    """Some columns of one query row."""
    row, head = (f(pl.program_id(1), jnp.int32(kv_heads)) for f in (jax.lax.div, jax.lax.rem))
    held = jnp.int32(0)
    for mine, length in zip(heads, lengths, strict=True):
        for number, its_head in enumerate(mine):
            held = jnp.where(head == its_head, length[row * len(mine) + number], held)
    combine_splits(parts, lses, pl.cdiv(held, span), out, lse, kv_heads=kv_heads)


def _nth(numbers: tuple[int, ...], i: Array) -> Array:
    """numbers[i] of static numbers."""
    result = jnp.int32(numbers[0])
    for place, number in enumerate(numbers[1:], start=1):
        result = jnp.where(i == place, number, result)
    return result
