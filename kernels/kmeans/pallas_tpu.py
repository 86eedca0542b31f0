"""A step of K-means on the TPU: one pass over the keys, labels and segment sums from one tile of cosines in VMEM.

    grid (B, K, tiles of keys)        the centroids of a head stay; sums and sizes are added up over its tiles

Bytes: every key once, 4 bytes of label. Arithmetic: 2 C D per key for the cosines, three times that with bf16 keys (a
float32 centroid is the sum of three bf16 numbers) and six times with float32 keys, and as much again for the sums,
which are the product of the labels as ones and zeros with the keys: the matrix unit bounds this kernel, not memory.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from clusterkv_jax.kernels.kmeans.reference import kept, means_of, unit_rows
from clusterkv_jax.kernels.tpu import step_flops, vmem_budget
from clusterkv_jax.kernels.tuning import blocks
from clusterkv_jax.runtime.dispatch import matmul_precision

LANES = 128


def kmeans(
    keys, centroids, length, used=None, before=None,
    *, with_means, scaled=None, block=None, interpret=False,
):  # fmt: skip
    """See `clusterkv_jax.kernels.kmeans.reference.kmeans`; `block` keys are read at a time."""
    batch, heads, rows, dim = keys.shape
    count = centroids.shape[2]
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"keys must be float32 or bfloat16, got {keys.dtype}.")
    if not rows:
        raise NotImplementedError("Without keys there is no block to read.")
    block = min(block or _block(count, dim, keys.dtype.itemsize), rows)
    if block != rows and block % LANES:
        raise NotImplementedError(f"block must be a multiple of {LANES} or all {rows} keys, got {block}.")
    ends = jnp.full((batch, heads), rows) if length is None else jnp.clip(length, 0, rows)
    present = jnp.full((batch, heads), count) if used is None else jnp.clip(used, 1, count)
    unit = unit_rows(centroids)
    parts = _bf16_parts(unit) if keys.dtype == jnp.bfloat16 else unit[:, :, None]
    labels, *totals = _call(
        keys, parts, ends.astype(jnp.int32), present.astype(jnp.int32), block, with_means, interpret
    )
    labels, changed = kept(labels[:, :, 0], before)
    if not with_means:
        return labels
    sums, sizes = totals[0], totals[1][..., 0].astype(jnp.int32)
    return labels, means_of(sums, sizes, centroids), sizes, changed


def _bf16_parts(x: Float[Array, "B K C D"]) -> Float[Array, "B K 3 C D"]:
    """Three bf16 numbers whose sum is x."""
    parts = []
    for _ in range(3):
        # Not astype: the compiler may keep the excess precision that is to be left behind.
        parts.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - parts[-1]
    return jnp.stack(parts, axis=2).astype(jnp.bfloat16)


def _block(count: int, dim: int, itemsize: int) -> int:
    """Keys per tile: a power of two that keeps the matrix unit busy for a step and fits VMEM beside the centroids."""
    if measured := blocks("kmeans", centroids=count, dim=dim, itemsize=itemsize):
        return measured["block"]
    lanes = -(-dim // LANES) * LANES
    # Centroids (in parts) and sums, twice each; the key twice; its cosines, their index and its ones and zeros.
    room = (vmem_budget() - 4 * count * lanes * 4) / (2 * lanes * itemsize + 16 * count)
    if room < LANES:
        raise NotImplementedError(f"{count} centroids leave VMEM no room for a tile of {LANES} keys.")
    # Three products of cosines and one of sums, and as long again for the vector unit to rank the cosines.
    return 2 ** int(math.log2(min(room, max(LANES, step_flops() / (2 * 8 * count * lanes)))))


def _call(keys, parts, ends, present, block, with_sums, interpret):
    batch, heads, rows, dim = keys.shape
    pieces, count = parts.shape[2:4]

    def here(b, k, j, ends):
        return jnp.minimum(j, jnp.maximum(-(-ends[b, k] // block) - 1, 0))

    def of_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda b, k, j, ends, present: (b, k, *[0] * len(shape)))

    out_shape = [jax.ShapeDtypeStruct((batch, heads, 1, rows), jnp.int32)]
    out_specs = [pl.BlockSpec((None, None, 1, block), lambda b, k, j, ends, present: (b, k, 0, j))]
    if with_sums:
        out_shape += [jax.ShapeDtypeStruct((batch, heads, count, n), jnp.float32) for n in (dim, 1)]
        out_specs += [of_head(count, dim), of_head(count, 1)]
    return pl.pallas_call(
        functools.partial(_kernel, block=block),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, heads, -(-rows // block)),
            in_specs=[
                pl.BlockSpec((None, None, block, dim), lambda b, k, j, ends, present: (b, k, here(b, k, j, ends), 0)),
                of_head(pieces, count, dim),
            ],
            out_specs=out_specs,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * (pieces + with_sums) * count * keys.size,
            bytes_accessed=keys.size * keys.dtype.itemsize + 4 * batch * heads * rows + 8 * batch * heads * count * dim,
            transcendentals=0,
        ),
        interpret=interpret,
        name="kmeans",
    )(ends, present, keys, parts)


def _kernel(ends, present, keys, parts, labels, *totals, block):
    head = pl.program_id(0), pl.program_id(1)
    first = pl.program_id(2) * block
    real = ends[head] - first
    precision = matmul_precision(keys.dtype)

    if totals:

        @pl.when(first == 0)
        def _():
            for total in totals:
                total[...] = jnp.zeros(total.shape, jnp.float32)

    @pl.when(real <= 0)
    def _():
        labels[...] = jnp.full(labels.shape, -1, jnp.int32)

    @pl.when(real > 0)
    def _():
        # What lies behind the last key may be NaN, and 0 x NaN is no zero.
        row = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 0)
        tile = jnp.where(row < real, keys[...].astype(jnp.float32), 0.0).astype(keys.dtype)
        cosine = jnp.zeros((parts.shape[1], block), jnp.float32)
        for i in range(parts.shape[0]):
            cosine += jax.lax.dot_general(
                parts[i], tile, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
        number = jax.lax.broadcasted_iota(jnp.int32, cosine.shape, 0)
        cosine = jnp.where(number < present[head], cosine, -jnp.inf)
        best = jnp.where(cosine == jnp.max(cosine, axis=0, keepdims=True), number, cosine.shape[0])
        best = jnp.min(best, axis=0, keepdims=True)
        best = jnp.where(jax.lax.broadcasted_iota(jnp.int32, best.shape, 1) < real, best, -1)
        labels[...] = best
        if totals:
            member = (number == best).astype(jnp.float32)
            sums, sizes = totals
            sums[...] += jnp.dot(
                member.astype(tile.dtype), tile, precision=precision, preferred_element_type=jnp.float32
            )
            sizes[...] += jnp.sum(member, axis=1, keepdims=True)
