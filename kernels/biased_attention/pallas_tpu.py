"""Biased attention on the TPU: one pass over keys and values, a block of slots at a time (flash decoding).

    grid (B, K, blocks of slots)      the query rows of one KV head, G x T of them, stay in VMEM; blocks stream past

Bytes read per slot: a key, a value and 4 bytes of bias, of quantised rows two scales more. Blocks that lie wholly at or
beyond `length` are not fetched: their index is that of the last block that counts, and a block that is there already is
not fetched again. A step's arithmetic is 4 x G x T x D operations per slot, far below what the bytes allow.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from clusterkv_jax.kernels.biased_attention.reference import log_degree
from clusterkv_jax.kernels.quantised import Quantised, halves, in_basis_of_codes, is_packed, numbers
from clusterkv_jax.kernels.soft_cap import capped
from clusterkv_jax.kernels.tpu import step_bytes, vmem_budget
from clusterkv_jax.kernels.tuning import blocks
from clusterkv_jax.runtime.dispatch import matmul_precision

LANES = 128


@in_basis_of_codes
def biased_attention(
    q, keys, values, degree, length, *, soft_cap=None, return_lse, return_probs, block=None, interpret=False
):
    """See `clusterkv_jax.kernels.biased_attention.biased_attention`; `block` slots are read at a time."""
    batch, tokens, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    dtypes = {x.dtype for x in (q, keys, values) if not isinstance(x, Quantised)}
    if len(dtypes) > 1 or q.dtype not in (jnp.float32, jnp.bfloat16):
        found = ", ".join(sorted(map(str, dtypes)))
        raise NotImplementedError(f"q, keys and values must all be float32 or bfloat16, got {found}.")
    if not capacity:
        raise NotImplementedError("A cache without slots has no block to read.")
    rows = heads // kv_heads * tokens
    stored: Any = keys.codes if isinstance(keys, Quantised) else keys
    block = min(block or _block(rows, capacity, stored.shape[-1], stored.dtype.itemsize, q.dtype.itemsize), capacity)
    if block != capacity and block % LANES:
        raise NotImplementedError(f"block must be a multiple of {LANES} or all {capacity} slots, got {block}.")

    bias = log_degree(degree, length)
    ends = jnp.full((batch, kv_heads), capacity) if length is None else jnp.clip(length, 0, capacity)
    # Query row g * T + t of a KV head.
    grouped = q.reshape(batch, tokens, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, rows, dim)
    out, lse, *scores = _call(
        grouped, keys, values, bias[:, :, None], ends.astype(jnp.int32), block, soft_cap, return_probs, interpret
    )

    def to_tokens(x: Array) -> Array:  # [B, K, G x T, ...] -> [B, T, H, ...]
        split = x.reshape(batch, kv_heads, -1, tokens, *x.shape[3:])
        return jnp.moveaxis(split, 3, 1).reshape(batch, tokens, heads, *x.shape[3:])

    result = [to_tokens(out)]
    if return_lse:
        result.append(to_tokens(lse[..., 0]))
    if return_probs:
        # Scores of blocks that were not read are whatever memory held.
        probs = jnp.where(bias[:, :, None] > -jnp.inf, jnp.exp(scores[0] - lse), 0.0)
        result.append(probs.reshape(batch, heads, tokens, capacity).sum(axis=2))
    return result[0] if len(result) == 1 else tuple(result)


def _block(rows: int, capacity: int, dim: int, itemsize: int, width: int) -> int:
    """Slots per block: a power of two that keeps the memory busy for a step and fits VMEM. Numbers of rows have
    `itemsize` bytes as they are stored, and `width` as they are multiplied.
    """
    if measured := blocks("biased_attention", rows=rows, slots=capacity, dim=dim, itemsize=itemsize):
        return measured["block"]
    lanes = -(-dim // LANES) * LANES
    read = 2 * lanes * itemsize
    # Twice what is read (the next block arrives meanwhile), the scores in float32 and their exponentials; what codes
    # stand for on its way through 32 bits.
    memory = 2 * read + (4 + 4 + 4 + width) * max(rows, 8) + (width + 4) * 2 * lanes * (itemsize < width)
    size = min(step_bytes() / read, vmem_budget() / memory, 2**16)
    return max(LANES, 2 ** int(math.log2(size)))


def _call(q, keys, values, bias, ends, block, soft_cap, with_scores, interpret):
    batch, kv_heads, rows, dim = q.shape
    capacity = keys.shape[2]
    count = -(-capacity // block)

    def here(b, k, j, ends):
        return jnp.minimum(j, jnp.maximum(-(-ends[b, k] // block) - 1, 0))

    def of_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda b, k, j, ends: (b, k, 0, 0))

    rows_block = pl.BlockSpec((None, None, block, dim), lambda b, k, j, ends: (b, k, here(b, k, j, ends), 0))

    def lanes_block(n):
        return pl.BlockSpec((None, None, n, block), lambda b, k, j, ends: (b, k, 0, here(b, k, j, ends)))

    cache = (_beside_bias(keys), _beside_bias(values), bias)
    stored = jax.tree.leaves(cache)
    out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, kv_heads, rows, 1), jnp.float32)]
    out_specs = [of_head(rows, dim), of_head(rows, 1)]
    if with_scores:
        out_shape.append(jax.ShapeDtypeStruct((batch, kv_heads, rows, capacity), jnp.float32))
        out_specs.append(lanes_block(rows))
    return pl.pallas_call(
        functools.partial(_kernel, block=block, scale=1 / math.sqrt(dim), soft_cap=soft_cap),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, count),
            in_specs=[
                of_head(rows, dim),
                *jax.tree.map(
                    lambda x: rows_block if x.shape[2:] == keys.shape[2:] else lanes_block(x.shape[2]), cache
                ),
            ],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((rows, n), jnp.float32) for n in (1, 1, dim)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * kv_heads * rows * capacity * dim,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*stored, q, q)),
            transcendentals=batch * kv_heads * rows * capacity,
        ),
        interpret=interpret,
        name="biased_attention",
    )(ends, q, *cache)


def _kernel(ends, q, keys, values, bias, out, lse, *rest, block, scale, soft_cap):
    *scores, peak, total, mean = rest
    precision = matmul_precision(q.dtype)
    first = pl.program_id(2) * block
    end = ends[pl.program_id(0), pl.program_id(1)]

    @pl.when(first == 0)
    def _():
        peak[...] = jnp.full(peak.shape, -jnp.inf)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        mean[...] = jnp.zeros(mean.shape, jnp.float32)

    @pl.when(first < end)
    def _():
        slot = first + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        empty = (slot >= end) | (bias[...] == -jnp.inf)
        product = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        key, key_scale = _read(keys, q.dtype)
        queries = halves(q[...], keys) if isinstance(keys, Quantised) else [q[...]]
        across = _across(keys)
        score = sum(product(*part, (((1,), (across,)), ((), ()))) for part in zip(queries, key, strict=True))
        score = score if key_scale is None else score * key_scale
        score = jnp.where(empty, -jnp.inf, capped(score * scale, soft_cap) + bias[...])
        if scores:
            scores[0][...] = score
        new_peak = jnp.maximum(peak[...], jnp.max(score, axis=1, keepdims=True))
        # A row that has seen nothing yet has peak -inf, and -inf - -inf is no number.
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weight = jnp.exp(score - shift)
        old = jnp.exp(peak[...] - shift)
        value, value_scale = _read(values, q.dtype)
        rows = [_without_empty(part, empty) if across else part for part in value]
        scaled = (weight if value_scale is None else jnp.where(empty, 0.0, weight * value_scale)).astype(q.dtype)
        parts = [product(scaled, part, (((1,), (1 - across,)), ((), ()))) for part in rows]
        part = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        total[...] = old * total[...] + jnp.sum(weight, axis=1, keepdims=True)
        mean[...] = old * mean[...] + part
        peak[...] = new_peak

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        out[...] = (mean[...] / jnp.where(total[...] > 0, total[...], 1.0)).astype(out.dtype)
        lse[...] = peak[...] + jnp.log(total[...])


def _beside_bias(rows):
    """Scales stand as the bias does. So do rows of two codes a byte: short ones, XLA keeps them by columns."""
    if not isinstance(rows, Quantised):
        return rows
    codes = jnp.swapaxes(rows.codes, 2, 3) if is_packed(rows) else rows.codes
    return Quantised(codes, rows.scales[:, :, None])


def _across(rows):
    """The axis of a block along which a row stands."""
    return 0 if isinstance(rows, Quantised) and is_packed(rows) else 1


def _read(rows, dtype):
    """A block of rows in parts of their columns, and its scales: None where it has none."""
    if isinstance(rows, Quantised):
        return numbers(rows.codes[...], dtype), rows.scales[...]
    return [rows[...]], None


def _without_empty(values, empty):
    """Zeros for the rows of empty slots, which may hold NaN; only blocks that have some pay for turning the mask."""

    def cleared(values):
        column = jnp.broadcast_to(empty.astype(jnp.float32), (values.shape[1], values.shape[0])).T
        return jnp.where(column > 0, 0.0, values.astype(jnp.float32)).astype(values.dtype)

    return jax.lax.cond(jnp.max(empty.astype(jnp.float32)) > 0, cleared, lambda values: values, values)
