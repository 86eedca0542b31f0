"""Accumulated attention on the TPU, in two passes over the half square below the diagonal.

    grid (B, K, half the blocks, one more than the blocks)

Pass 1 makes the log-sum-exps of a block of queries while blocks of keys stream past, pass 2 the sums of a block of keys
while blocks of queries do. Row r of the half square has r + 1 blocks, row n - 1 - r has n - r: the grid takes such a
pair at a time, so that none of its steps lies above the diagonal (with an odd number the middle row is made twice).
Blocks beyond the prompt's end are not fetched: their index is that of the last block that counts.

Scores are taken keys x queries: what belongs to a query is a row of lanes, maxima and sums over keys run along the
sublanes, and the sums over queries are added up as they are and reduced once. All query heads of a KV head are taken
in one step. Arithmetic, as much as attention's, and the exponentials bound it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.tpu import vmem_budget
from clusterkv_jax.kernels.tuning import blocks
from clusterkv_jax.runtime.dispatch import matmul_precision

LANES = 128


def accumulated_attention(
    q: Float[Array, "B H N D"],
    keys: Float[Array, "B K N D"],
    lengths: Int[Array, " B"],
    *,
    block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B K N"]:
    """See `clusterkv_jax.kernels.accumulated_attention.accumulated_attention`; a block is of `block` tokens."""
    batch, heads, tokens, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    if q.dtype != keys.dtype or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"q and keys must both be float32 or bfloat16, got {q.dtype}, {keys.dtype}.")
    if not q.size:
        raise NotImplementedError("Without queries there is no block to read.")
    if block and block % LANES:
        raise NotImplementedError(f"block must be a multiple of {LANES}, got {block}.")
    grouped = q.reshape(batch, kv_heads, group, tokens, dim)
    if extra := -tokens % LANES:
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, extra), (0, 0)))
        keys = jnp.pad(keys, ((0, 0), (0, 0), (0, extra), (0, 0)))
    block = min(block or _block(group, dim, q.dtype.itemsize), keys.shape[2])
    ends = lengths.astype(jnp.int32)
    per_query, lanes = (batch, kv_heads, group, keys.shape[2]), pltpu.VMEM((group, block), jnp.float32)
    lse = _call(_log_sum_exps, False, (ends, grouped, keys), block, per_query, [lanes, lanes], interpret)
    total = pltpu.VMEM((block, LANES), jnp.float32)
    per_key = (batch, kv_heads, 1, keys.shape[2])
    return _call(_sums, True, (ends, grouped, keys, lse), block, per_key, [total], interpret)[:, :, 0, :tokens]


def _block(group: int, dim: int, itemsize: int) -> int:
    """Tokens per block: a power of two; half of VMEM for scores and shares of all heads of a group."""
    if measured := blocks("accumulated_attention", group=group, dim=dim, itemsize=itemsize):
        return measured["block"]
    return max(LANES, 2 ** int(math.log2(math.sqrt(vmem_budget() / 2 / (2 * 4 * group)))))


def _folded(half: Any, step: Any, count: int) -> tuple[Any, Any]:
    """The row and the column of a half square of `count` blocks a side that a step of the grid stands for."""
    long = step < count - half
    return jnp.where(long, count - 1 - half, half), jnp.where(long, step, step - (count - half))


def _call(
    kernel: Callable[..., None],
    keys_stay: bool,
    operands: tuple[Array, ...],
    block: int,
    out_shape: tuple[int, ...],
    scratch: list[Any],
    interpret: Any,
) -> Array:
    """A pass; `keys_stay` says which side is outermost: keys, and queries come from the last to the diagonal."""
    _, q, keys = operands[:3]
    batch, kv_heads, group, tokens, dim = q.shape
    count = pl.cdiv(tokens, block)

    def place(half, step):  # block of queries, block of keys
        row, column = _folded(half, step, count)
        return (count - 1 - column, count - 1 - row) if keys_stay else (row, column)

    def here(side):
        def index(b, half, step, ends):
            return jnp.minimum(place(half, step)[side], jnp.maximum(pl.cdiv(ends[b], block) - 1, 0))

        return index

    query, key = here(0), here(1)
    in_specs = [
        pl.BlockSpec((None, None, group, block, dim), lambda b, k, h, s, ends: (b, k, 0, query(b, h, s, ends), 0)),
        pl.BlockSpec((None, None, block, dim), lambda b, k, h, s, ends: (b, k, key(b, h, s, ends), 0)),
    ]
    if keys_stay:  # the log-sum-exps
        in_specs.append(
            pl.BlockSpec((None, None, group, block), lambda b, k, h, s, ends: (b, k, 0, query(b, h, s, ends)))
        )
    pairs = batch * kv_heads * group * tokens * (tokens + 1) // 2
    staying, streaming = (x.size * x.dtype.itemsize for x in ((keys, q) if keys_stay else (q, keys)))
    return pl.pallas_call(
        functools.partial(kernel, place=place, count=count, block=block, scale=dim**-0.5),
        out_shape=jax.ShapeDtypeStruct(out_shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, pl.cdiv(count, 2), count + 1),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(
                (None, None, out_shape[2], block),
                lambda b, k, h, s, ends: (b, k, 0, place(h, s)[1 if keys_stay else 0]),
            ),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * dim,
            bytes_accessed=staying + streaming * (count + 1) // 2 + 4 * math.prod(out_shape),
            transcendentals=pairs,
        ),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(*operands)


def _score(keys: Array, queries: Array, scale: float) -> Float[Array, "keys queries"]:
    return scale * jax.lax.dot_general(
        keys,
        queries,
        (((1,), (1,)), ((), ())),
        precision=matmul_precision(keys.dtype),
        preferred_element_type=jnp.float32,
    )


def _visible(first_query: Any, first_key: Any, block: int, end: Any) -> Array:
    """Of a block of scores: where a query of the prompt sees the key."""
    query = first_query + jax.lax.broadcasted_iota(jnp.int32, (block, block), 1)
    key = first_key + jax.lax.broadcasted_iota(jnp.int32, (block, block), 0)
    return (key <= query) & (query < end)


def _log_sum_exps(ends, q, keys, lse, peak, total, *, place, count, block, scale):
    i, j = place(pl.program_id(2), pl.program_id(3))
    end = ends[pl.program_id(0)]

    @pl.when(j == 0)
    def _():
        peak[...] = jnp.full(peak.shape, -jnp.inf)
        total[...] = jnp.zeros(total.shape, jnp.float32)

    def add(on_diagonal):
        visible = _visible(i * block, j * block, block, end) if on_diagonal else None
        for g in range(q.shape[0]):
            score = _score(keys[...], q[g], scale)
            if visible is not None:
                score = jnp.where(visible, score, -jnp.inf)
            before = peak[g : g + 1]
            higher = jnp.maximum(before, jnp.max(score, axis=0, keepdims=True))
            shift = jnp.where(higher == -jnp.inf, 0.0, higher)
            part = jnp.sum(jnp.exp(score - shift), axis=0, keepdims=True)
            total[g : g + 1] = jnp.exp(before - shift) * total[g : g + 1] + part
            peak[g : g + 1] = higher

    counts = i * block < end
    pl.when(counts & (i > j))(lambda: add(False))
    pl.when(counts & (i == j))(lambda: add(True))

    @pl.when(i == j)
    def _():
        lse[...] = peak[...] + jnp.log(total[...])


def _sums(ends, q, keys, lse, sums, total, *, place, count, block, scale):
    i, j = place(pl.program_id(2), pl.program_id(3))
    end = ends[pl.program_id(0)]

    @pl.when(i == count - 1)
    def _():
        total[...] = jnp.zeros(total.shape, jnp.float32)

    def add(masked):
        visible = _visible(i * block, j * block, block, end) if masked else None
        for g in range(q.shape[0]):
            share = jnp.exp(_score(keys[...], q[g], scale) - lse[g : g + 1])
            if visible is not None:
                share = jnp.where(visible, share, 0.0)
            total[...] += sum(share[:, at : at + LANES] for at in range(0, block, LANES))

    counts, whole = i * block < end, (i > j) & ((i + 1) * block <= end)
    pl.when(counts & whole)(lambda: add(False))
    pl.when(counts & ~whole)(lambda: add(True))

    @pl.when(i == j)
    def _():
        sums[...] = jnp.sum(total[...].T, axis=0, keepdims=True) / q.shape[0]
