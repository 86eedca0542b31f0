"""Chunked matching on the TPU: one pass over the features, a score matrix per few chunks that stays in VMEM.

    grid (B, K, blocks of rows)       a block is a few groups, a group one or more whole chunks

Bytes: every row once, 8 bytes out per pair of rows. The scores of a group are taken B x A, so that the best over B
runs along the sublanes and the result is a row of lanes, as it is stored. A and B rows alternate in memory; they are
parted on chip, where bf16 keeps two neighbouring rows in the halves of one 32-bit word. A `start` costs a copy of the
features first, because blocks begin at whole tiles.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from clusterkv_jax.kernels.chunked_matching.reference import as_product, listed_rows, rows_from
from clusterkv_jax.kernels.quantised import dequantised
from clusterkv_jax.kernels.tpu import step_bytes, vmem_budget
from clusterkv_jax.kernels.tuning import blocks
from clusterkv_jax.runtime.dispatch import matmul_precision

# Rows of a group: at least one side of the matrix unit in A rows, at most what keeps its scores small.
SMALLEST_GROUP, LARGEST_GROUP = 256, 1024
# Blocks begin at whole tiles of bf16 rows.
TILE, LANES = 16, 128


def chunked_matching(
    features, *, chunk, bias, normalize, start, length, index=None,
    values=None, key_weight=None, value_weight=1.0, squares=(None, None), block=None, interpret=False,
):  # fmt: skip
    """See `clusterkv_jax.kernels.chunked_matching.chunked_matching`; about `block` rows are read at a time."""
    del squares  # it sums them itself
    features = dequantised(features)
    if values is not None and key_weight is not None:
        match = functools.partial(chunked_matching, chunk=chunk, block=block, interpret=interpret)
        return as_product(match, features, dequantised(values), key_weight, value_weight, bias, start, length, index)
    features, bias = listed_rows(features, bias, index)
    batch, heads, rows, width = features.shape
    if features.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"features must be float32 or bfloat16, got {features.dtype}.")
    if not rows:
        raise NotImplementedError("Without rows there is no block to read.")
    group = _group(min(chunk, rows + rows % 2))
    block = block or _block(group, width, features.dtype.itemsize)
    groups = max(1, min(block // group, -(-rows // group)))

    first = jnp.broadcast_to(jnp.asarray(0 if start is None else start, jnp.int32), (batch, heads))
    count = rows - first if length is None else jnp.asarray(length, jnp.int32)
    ends = jnp.broadcast_to(jnp.clip(count, 0, rows - first), (batch, heads))
    if start is not None:
        features, bias = rows_from(features, bias, first, jnp.arange(rows))
    # A block is not larger than the array, and float32 rows are read in strides of whole lanes.
    short = max(0, groups * group - rows), -width % LANES if features.dtype == jnp.float32 else 0
    if any(short):
        features = jnp.pad(features, ((0, 0), (0, 0), (0, short[0]), (0, short[1])))
    match, score = _call(features, bias, ends, min(chunk, group), group, groups, normalize, interpret)
    edges = (rows + 1) // 2
    match, score = (x.reshape(batch, heads, -1)[..., :edges] for x in (match, score))
    return jnp.where(match < 0, -1, match + first[..., None]), score


def _group(chunk: int) -> int:
    """Rows whose scores are taken in one product: whole chunks and whole tiles."""
    least = math.lcm(chunk, TILE)
    if least > LARGEST_GROUP:
        raise NotImplementedError(
            f"Chunks of {chunk} rows are whole tiles of {TILE} rows only every {least} rows; at most {LARGEST_GROUP}."
        )
    return least * max(1, SMALLEST_GROUP // least)


def _block(group: int, width: int, itemsize: int) -> int:
    """Rows per block: enough to keep the memory busy for a step, within VMEM beside the scores of a group."""
    if measured := blocks("chunked_matching", group=group, width=width, itemsize=itemsize):
        return measured["block"]
    row = -(-width // LANES) * LANES * itemsize
    scores = 4 * 4 * (group // 2) ** 2
    return int(min(step_bytes(), (vmem_budget() - scores) / 4) / row)


def _call(features, bias, ends, chunk, group, groups, normalize, interpret):
    batch, heads, rows, width = features.shape
    block, half = group * groups, group // 2
    count = -(-rows // block)

    def here(b, k, j, ends):
        return jnp.minimum(j, jnp.maximum(-(-ends[b, k] // block) - 1, 0))

    def per_group(n, index=lambda b, k, j, ends: j):  # n rows of lanes per block; the lanes are the pairs of a group
        return pl.BlockSpec((None, None, None, n, half), lambda *at: (at[0], at[1], index(*at), 0, 0))

    # Strided reads want refs of 128 lanes: float32 features come as several.
    lanes = LANES if features.dtype == jnp.float32 else width
    operands = [features] * (width // lanes)
    in_specs = [
        pl.BlockSpec((None, None, block, lanes), lambda b, k, j, ends, i=i: (b, k, here(b, k, j, ends), i))
        for i in range(len(operands))
    ]
    if bias is not None:
        # Rows 2i and 2i + 1: the biases of the A and of the B rows of group i.
        padded = jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, 0), (0, count * block - bias.shape[2])))
        halves = [padded[:, :, odd::2].reshape(batch, heads, count, groups, half) for odd in (0, 1)]
        operands.append(jnp.stack(halves, axis=4).reshape(batch, heads, count, 2 * groups, half))
        in_specs.append(per_group(2 * groups, here))
    shape = (batch, heads, count, groups, half)
    return pl.pallas_call(
        functools.partial(_kernel, parts=width // lanes, chunk=chunk, group=group, normalize=normalize),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, count),
            in_specs=in_specs,
            out_specs=[per_group(groups), per_group(groups)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=batch * heads * rows * half * width,
            bytes_accessed=features.size * features.dtype.itemsize + 8 * math.prod(shape),
            transcendentals=batch * heads * rows,
        ),
        interpret=interpret,
        name="chunked_matching",
    )(ends, *operands)


def _kernel(ends, *refs, parts, chunk, group, normalize):
    features, bias, (match, score) = refs[:parts], refs[parts:-2], refs[-2:]
    groups, pairs = match.shape
    match[...] = jnp.full(match.shape, -1, jnp.int32)
    score[...] = jnp.full(score.shape, -jnp.inf, jnp.float32)
    start = pl.program_id(2) * groups * group
    real = ends[pl.program_id(0), pl.program_id(1)] - start

    def body(i, _):
        first = pl.multiple_of(i * group, group)
        halves = zip(*(_parted(part, first, pairs) for part in features), strict=True)
        a, b = (jnp.concatenate(half, axis=1) for half in halves)
        biases = [bias[0][pl.ds(2 * i + odd, 1)] for odd in (0, 1)] if bias else None
        best, highest = _best(a, b, biases, real - first, chunk // 2, normalize)
        match[pl.ds(i, 1)] = jnp.where(highest > -jnp.inf, start + first + 2 * best + 1, -1)
        score[pl.ds(i, 1)] = highest

    jax.lax.fori_loop(0, jnp.clip(pl.cdiv(real, group), 0, groups), body, None)


def _parted(features, first, pairs):
    """The even and the odd ones of 2 x `pairs` rows."""
    if features.dtype == jnp.float32:
        return features[pl.ds(first, pairs, stride=2)], features[pl.ds(first + 1, pairs, stride=2)]
    words = pltpu.bitcast(features[pl.ds(first, 2 * pairs)], jnp.uint32)
    even, odd = words << 16, words & jnp.uint32(0xFFFF0000)
    return tuple(jax.lax.bitcast_convert_type(x, jnp.float32).astype(jnp.bfloat16) for x in (even, odd))


def _best(a, b, biases, real, per_chunk, normalize):
    """For every A row the first best B row of its chunk and its score, both [1, pairs]."""
    pairs = a.shape[0]
    square = (pairs, pairs)
    score = jax.lax.dot_general(
        b, a, (((1,), (1,)), ((), ())), precision=matmul_precision(a.dtype), preferred_element_type=jnp.float32
    )
    if normalize:
        score = score * jnp.broadcast_to(_inverse_length(a), square).T * _inverse_length(b)
    if biases is not None:
        score = score + biases[0] + jnp.broadcast_to(biases[1], square).T
    row_a = jax.lax.broadcasted_iota(jnp.int32, square, 1)
    row_b = jax.lax.broadcasted_iota(jnp.int32, square, 0)
    allowed = (2 * row_a < real) & (2 * row_b + 1 < real)
    if per_chunk < pairs:

        def number(row):
            return jnp.floor((row.astype(jnp.float32) + 0.5) * (1 / per_chunk))

        allowed &= number(row_a) == number(row_b)
    score = jnp.where(allowed, score, -jnp.inf)
    highest = jnp.max(score, axis=0, keepdims=True)
    return jnp.min(jnp.where(score == highest, row_b, pairs), axis=0, keepdims=True), highest


def _inverse_length(x):
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny))
