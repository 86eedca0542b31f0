"""A step of K-means on GPU: a kernel for the labels, one for the segment sums.

1. `_assign`, a program per tile of keys: cosines with one tile of centroids after the other, the best so far kept.
   Cosines come from fp16 products accumulated in float32. A key is first scaled by a power of two that brings its
   largest entry to 1 ... 2, which changes no label; a 16-bit key is then exact in fp16 (to 2^-25 of that entry). A
   centroid of length 1 is the sum of two fp16 numbers (to 2^-25), a float32 key likewise.
2. `_sums`, a program per tile of centroids and share of the keys: the labels as ones and zeros times the keys. Their
   products are exact and the order of the additions is fixed, so sums are float32 and the same in every run.

Arithmetic: 4 C D per key for the labels and 2 C D for the sums (16-bit keys); the matrix units bound both.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.gpu import arange, bfloat16_parts, call, check_dtypes, dot, load_rows, power_of_two
from clusterkv_jax.kernels.kmeans.reference import unit_rows
from clusterkv_jax.kernels.tuning import blocks

# Keys and centroids of a tile, warps and stages of the programs for the labels and of those for the sums. float32 keys
# are multiplied in parts, which take more of the shared memory.
SIZES = {
    **{"label_keys": 128, "label_centroids": 64, "label_warps": 8, "label_stages": 2},
    **{"sum_keys": 32, "sum_centroids": 64, "sum_warps": 4, "sum_stages": 2},
}
FLOAT32_SIZES = SIZES | {"label_keys": 64, "label_warps": 4, "label_stages": 1, "sum_keys": 64, "sum_stages": 1}
PROGRAMS = 1056  # programs of `_sums` wanted at least


def kmeans(
    keys: Float[Array, "B K N D"],
    centroids: Float[Array, "B K C D"],
    length: Int[Array, "B K"] | None,
    used: Int[Array, "B K"] | None = None,
    *,
    with_sums: bool,
    parts: int = 2,
    interpret: bool = False,
):
    """See `clusterkv_jax.kernels.kmeans.reference.kmeans`.

    `parts` is how many fp16 numbers a centroid is.
    """
    check_dtypes("kmeans", keys)
    batch, heads, rows, dim = keys.shape
    count = centroids.shape[2]
    if power_of_two(dim) > 256 or rows == 0:
        raise NotImplementedError(f"the GPU kernel of kmeans takes keys of D up to 256, got {keys.shape}.")
    end = jnp.full((batch * heads,), rows, jnp.int32)
    if length is not None:
        end = jnp.clip(length.reshape(-1).astype(jnp.int32), 0, rows)
    present = jnp.full((batch * heads,), count, jnp.int32)
    if used is not None:
        present = jnp.clip(used.reshape(-1).astype(jnp.int32), 1, count)
    flat = keys.reshape(batch * heads, rows, dim)
    known = blocks("kmeans", centroids=count, dim=dim, itemsize=keys.dtype.itemsize)
    chosen = (FLOAT32_SIZES if keys.dtype == jnp.float32 else SIZES) | known
    tile, block = chosen["label_keys"], min(chosen["label_centroids"], power_of_two(count, 16))
    labels = call(
        partial(_assign, tile=tile, block=block, parts=parts),
        jax.ShapeDtypeStruct((batch * heads, rows), jnp.int32),
        flat,
        *_half_parts(unit_rows(centroids).reshape(batch * heads, count, dim)),
        end,
        present,
        grid=(pl.cdiv(rows, tile), batch * heads),
        warps=chosen["label_warps"],
        stages=chosen["label_stages"],
        interpret=interpret,
    )
    if not with_sums:
        return labels.reshape(batch, heads, rows)
    sums, sizes = _segment_sums(flat, labels, end, count, chosen, interpret)
    shape = (batch, heads, count)
    return labels.reshape(batch, heads, rows), sums.reshape(*shape, dim), sizes.reshape(shape)


def _half_parts(x: Float[Array, "... D"]) -> tuple[Array, Array]:
    """Two fp16 numbers whose sum is x, for |x| <= 2."""
    # Not astype alone: a compiler may keep the excess precision that is to be left behind.
    head = jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    return head.astype(jnp.float16), (x - head).astype(jnp.float16)


def _scaled(key: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """Keys in float32, each times a power of two that brings its largest entry to 1 ... 2; zeros stay."""
    key = key.astype(jnp.float32)
    peak = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(key), axis=1), jnp.int32)
    exponent = jnp.clip(peak >> 23, 1, 253)
    return key * jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)[:, None]


def _assign(keys, heads_of, tails_of, end, present, labels, *, tile, block, parts):
    """Labels of one tile of keys: -1 at or beyond `end`."""
    head, width = pl.program_id(1), heads_of.shape[2]
    count = present[head]
    row = pl.program_id(0) * tile + arange(tile)
    inside = row < end[head]
    columns = arange(power_of_two(width, 16))
    key = load_rows(keys, head, row, columns, inside, width)
    scaled = _scaled(key)
    halves = [scaled.astype(jnp.float16)]
    if key.dtype == jnp.float32:
        halves.append((scaled - halves[0].astype(jnp.float32)).astype(jnp.float16))

    def body(i, best):
        number = i * block + arange(block)
        there = number < count
        centroid = load_rows(heads_of, head, number, columns, there, width)
        cosine = dot(halves[0], centroid, (1, 1))
        if parts > 1:
            cosine += dot(halves[0], load_rows(tails_of, head, number, columns, there, width), (1, 1))
        for tail in halves[1:]:
            cosine += dot(tail, centroid, (1, 1))
        cosine = jnp.where(there[None, :], cosine, -jnp.inf)
        top = jnp.max(cosine, axis=1)
        lowest = jnp.min(jnp.where(cosine == top[:, None], number[None, :], count), axis=1)
        better = top > best[1]
        return jnp.where(better, lowest, best[0]), jnp.where(better, top, best[1])

    start = (jnp.zeros((tile,), jnp.int32), jnp.full((tile,), -jnp.inf, jnp.float32))
    label, _ = jax.lax.fori_loop(0, pl.cdiv(count, block), body, start)
    plgpu.store(labels.at[head, row], jnp.where(inside, label, -1), mask=row < labels.shape[1])


def _segment_sums(
    keys: Float[Array, "H N D"],
    labels: Int[Array, "H N"],
    end: Int[Array, " H"],
    count: int,
    sizes: Mapping[str, int],
    interpret: bool,
):
    """Sums f32 [H,C,D] and sizes i32 [H,C] of the keys by label."""
    heads, rows, width = keys.shape
    tile, block = sizes["sum_keys"], min(sizes["sum_centroids"], power_of_two(count, 16))
    across, tiles = pl.cdiv(count, block), pl.cdiv(rows, tile)
    shares = min(tiles, pl.cdiv(PROGRAMS, heads * across))
    sums, counts = call(
        partial(_sums, tile=tile, block=block, tiles=pl.cdiv(tiles, shares)),
        (
            jax.ShapeDtypeStruct((shares, heads, count, width), jnp.float32),
            jax.ShapeDtypeStruct((shares, heads, count), jnp.int32),
        ),
        keys,
        labels,
        end,
        grid=(across, shares, heads),
        warps=sizes["sum_warps"],
        stages=sizes["sum_stages"],
        interpret=interpret,
    )
    return jnp.sum(sums, axis=0), jnp.sum(counts, axis=0)


def _sums(keys, labels, end, sums, sizes, *, tile, block, tiles):
    """Sums and sizes of one tile of centroids over one share of the keys."""
    number = pl.program_id(0) * block + arange(block)
    share, head = pl.program_id(1), pl.program_id(2)
    width = keys.shape[2]
    columns = arange(power_of_two(width, 16))

    def body(i, state):
        total, size = state
        row = (share * tiles + i) * tile + arange(tile)
        label = plgpu.load(labels.at[head, row], mask=row < end[head], other=-1)
        key = load_rows(keys, head, row, columns, row < end[head], width)
        member = label[None, :] == number[:, None]
        for part in bfloat16_parts(key, 3) if key.dtype == jnp.float32 else [key]:
            total += dot(member.astype(part.dtype), part)
        return total, size + jnp.sum(member.astype(jnp.int32), axis=1)

    zeros = (jnp.zeros((block, columns.shape[0]), jnp.float32), jnp.zeros((block,), jnp.int32))
    total, size = jax.lax.fori_loop(0, tiles, body, zeros)
    there = number < sums.shape[2]
    mask = there[:, None] & (columns < width)[None, :]
    plgpu.store(sums.at[share, head, number[:, None], columns[None, :]], total, mask=mask)
    plgpu.store(sizes.at[share, head, number], size, mask=there)
