"""Accumulated attention on GPU, in two passes over the half square below the diagonal.

    log-sum-exps    grid (B H, tiles of queries)    a tile of queries of one head, the keys stream past
    sums            grid (B K, tiles of keys)       a tile of keys, the queries of all heads that share it stream past

Arithmetic: twice 2 D per query head and pair of a query and a key that it sees, as much as attention itself; that and
the exponentials bound it. Programs that run at the same time stream the same blocks at about the same time, which then
come from the cache: every pass begins at the end that all tiles share. The longest ones are started first. Blocks above
the diagonal or beyond the prompt's end are not read, and only those on the diagonal are masked.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, dot, load_rows, power_of_two
from clusterkv_jax.kernels.tuning import blocks

LOG2_E = math.log2(math.e)


def accumulated_attention(
    q: Float[Array, "B H N D"],
    keys: Float[Array, "B K N D"],
    lengths: Int[Array, " B"],
    *,
    sizes: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> Float[Array, "B K N"]:
    """See `clusterkv_jax.kernels.accumulated_attention.accumulated_attention`.

    `sizes` go before what was measured on this device (`kernels.tuning`) and what is taken where nothing was: rows of
    a program's own `tile` and of a `block` of those that stream past, warps, and `stages`, blocks on their way at once.
    """
    check_dtypes("accumulated_attention", q, keys)
    batch, heads, tokens, dim = q.shape
    kv_heads = keys.shape[1]
    if q.size == 0:
        raise NotImplementedError("The GPU kernel of accumulated_attention needs queries.")
    if power_of_two(dim) > 256:
        raise NotImplementedError(f"The GPU kernel of accumulated_attention takes D up to 256, got {dim}.")
    measured = blocks("accumulated_attention", dim=dim, itemsize=q.dtype.itemsize)
    blocking = _sizes(q.dtype) | measured | dict(sizes or {})
    tile = blocking["tile"]
    options: dict[str, Any] = {"warps": blocking["warps"], "stages": blocking["stages"], "interpret": interpret}
    shape = {"tile": tile, "block": blocking["block"], "group": heads // kv_heads}
    ends = jnp.repeat(lengths.astype(jnp.int32), kv_heads)
    queries, rows = q.reshape(batch * heads, tokens, dim), keys.reshape(batch * kv_heads, tokens, dim)

    lse = call(
        partial(_log_sum_exps, **shape),
        jax.ShapeDtypeStruct((batch * heads, tokens), jnp.float32),
        queries,
        rows,
        ends,
        grid=(batch * heads, pl.cdiv(tokens, tile)),
        **options,
    )
    sums = call(
        partial(_sums, **shape),
        jax.ShapeDtypeStruct((batch * kv_heads, tokens), jnp.float32),
        queries,
        rows,
        lse,
        ends,
        grid=(batch * kv_heads, pl.cdiv(tokens, tile)),
        **options,
    )
    return sums.reshape(batch, kv_heads, tokens)


def _sizes(dtype: Any) -> dict[str, int]:
    """Where nothing was measured. tf32 products keep several copies of a float32 tile in shared memory."""
    if dtype == jnp.float32:
        return {"tile": 64, "block": 32, "warps": 4, "stages": 2}
    return {"tile": 128, "block": 64, "warps": 4, "stages": 3}


def _log_sum_exps(q, keys, ends, lse, *, tile, block, group):
    """The log-sum-exps of one tile of queries of one head, in units of ln 2."""
    head, first = pl.program_id(0), (pl.num_programs(1) - 1 - pl.program_id(1)) * tile
    kv_head, width = head // group, q.shape[2]
    end = ends[kv_head]

    @pl.when(first < end)
    def _():
        columns = arange(power_of_two(width, 16))
        row = first + arange(tile)
        query = load_rows(q, head, row, columns, row < end, width)

        def step(i, state, on_diagonal):
            peak, total = state
            slot = i * block + arange(block)
            key = load_rows(keys, kv_head, slot, columns, slot < end, width)
            score = dot(query, key, (1, 1)) * (LOG2_E / math.sqrt(width))
            if on_diagonal:
                score = jnp.where(slot[None, :] <= row[:, None], score, -jnp.inf)
            higher = jnp.maximum(peak, jnp.max(score, axis=1))
            total = total * jnp.exp2(peak - higher) + jnp.sum(jnp.exp2(score - higher[:, None]), axis=1)
            return higher, total

        whole, stop = (first + 1) // block, pl.cdiv(jnp.minimum(first + tile, end), block)
        state = jnp.full((tile,), -jnp.inf, jnp.float32), jnp.zeros((tile,), jnp.float32)
        state = jax.lax.fori_loop(0, whole, partial(step, on_diagonal=False), state)
        peak, total = jax.lax.fori_loop(whole, stop, partial(step, on_diagonal=True), state)
        plgpu.store(lse.at[head, row], peak + jnp.log2(total), mask=row < end)


def _sums(q, keys, lse, ends, sums, *, tile, block, group):
    """The sums of one tile of keys, over the queries of all heads that read it."""
    head, first = pl.program_id(0), pl.program_id(1) * tile
    width, end = keys.shape[2], ends[head]
    slot = first + arange(tile)
    plgpu.store(sums.at[head, slot], jnp.zeros((tile,), jnp.float32), mask=slot < sums.shape[1])

    @pl.when(first < end)
    def _():
        columns = arange(power_of_two(width, 16))
        key = load_rows(keys, head, slot, columns, slot < end, width)
        stop = pl.cdiv(end, block)

        def step(i, total, on_diagonal):
            number = jax.lax.div(i, group)
            member = head * group + i - number * group
            row = (stop - 1 - number) * block + arange(block)
            query = load_rows(q, member, row, columns, row < end, width)
            whole = plgpu.load(lse.at[member, row], mask=row < end, other=jnp.inf)
            share = jnp.exp2(dot(key, query, (1, 1)) * (LOG2_E / math.sqrt(width)) - whole[None, :])
            if on_diagonal:
                share = jnp.where(slot[:, None] <= row[None, :], share, 0.0)
            return total + jnp.sum(share, axis=1)

        # Every query of these blocks sees the whole tile; behind them, in the order of the loop, come the others.
        whole = jnp.maximum(stop - pl.cdiv(first + tile - 1, block), 0) * group
        total = jnp.zeros((tile,), jnp.float32)
        total = jax.lax.fori_loop(0, whole, partial(step, on_diagonal=False), total)
        total = jax.lax.fori_loop(whole, (stop - first // block) * group, partial(step, on_diagonal=True), total)
        plgpu.store(sums.at[head, slot], total / group, mask=slot < end)
