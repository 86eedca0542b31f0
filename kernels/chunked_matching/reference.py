"""Chunked matching in plain jnp: the definition, and the path of platforms without a kernel."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import dequantised
from clusterkv_jax.runtime.dispatch import head_after_head, matmul_operands, matmul_precision


def chunked_matching(
    features, *, chunk, bias, normalize, start, length, index=None,
    values=None, key_weight=None, value_weight=1.0, squares=(None, None),
):  # fmt: skip
    """See `clusterkv_jax.kernels.chunked_matching.chunked_matching`."""
    del squares  # it sums them itself
    features = dequantised(features)
    if values is not None and key_weight is not None:
        match = partial(chunked_matching, chunk=chunk)
        return as_product(match, features, dequantised(values), key_weight, value_weight, bias, start, length, index)
    features, bias = listed_rows(features, bias, index)
    batch, heads, rows, _ = features.shape
    edges = (rows + 1) // 2
    if rows == 0:
        return jnp.zeros((batch, heads, 0), jnp.int32), jnp.zeros((batch, heads, 0), jnp.float32)
    chunk = min(chunk, rows + rows % 2)
    first = jnp.broadcast_to(jnp.asarray(0 if start is None else start, jnp.int32), (batch, heads))
    count = rows - first if length is None else jnp.broadcast_to(jnp.asarray(length, jnp.int32), (batch, heads))

    padded = -(-rows // chunk) * chunk
    offset = jnp.arange(padded)
    real = offset[None, None] < jnp.minimum(count, rows - first)[..., None]
    if start is None:
        padding = [(0, 0), (0, 0), (0, padded - rows)]
        features, bias = jnp.pad(features, [*padding, (0, 0)]), None if bias is None else jnp.pad(bias, padding)
    else:
        features, bias = rows_from(features, bias, first, offset)
    features = jnp.where(real[..., None], features, jnp.zeros((), features.dtype))

    def pairs(x: Array) -> Array:  # [B, K, chunks, chunk / 2, 2, ...]: A at 0, B at 1
        return x.reshape(batch, heads, padded // chunk, chunk // 2, 2, *x.shape[3:])

    f, ok = pairs(features), pairs(real)
    score = jnp.einsum(
        "bkcae,bkcoe->bkcao",
        *matmul_operands(f[..., 0, :], f[..., 1, :]),
        precision=matmul_precision(f.dtype),
        preferred_element_type=jnp.float32,
    )
    if normalize:
        square = jnp.sum(jnp.square(f.astype(jnp.float32)), axis=-1)
        scale = jax.lax.rsqrt(jnp.maximum(square, jnp.finfo(jnp.float32).tiny))
        score = score * scale[..., :, 0][..., :, None] * scale[..., :, 1][..., None, :]
    if bias is not None:
        w = pairs(jnp.where(real, bias.astype(jnp.float32), 0.0))
        score = score + w[..., :, 0][..., :, None] + w[..., :, 1][..., None, :]
    score = jnp.where(ok[..., :, 0][..., :, None] & ok[..., :, 1][..., None, :], score, -jnp.inf)

    best = jnp.argmax(score, axis=-1).astype(jnp.int32)  # the first of equal maxima: the lowest b
    score = jnp.max(score, axis=-1).reshape(batch, heads, -1)[..., :edges]
    chunk_start = jnp.arange(0, padded, chunk, dtype=jnp.int32)[None, None, :, None]
    match = (chunk_start + 2 * best + 1).reshape(batch, heads, -1)[..., :edges] + first[..., None]
    return jnp.where(score > -jnp.inf, match, -1), score


def as_product(match, keys, values, key_weight, value_weight, bias, start, length, index):
    """`match` by the score of keys and values, as a product of features [sqrt(w) k, sqrt(value_weight) v / |v|] and a
    bias.

    One head after the other: float32 features are twice to four times as large as what they are made of, and must not
    exist for all heads at once.
    """
    weight = 0.0 if bias is None else bias.astype(jnp.float32)
    bias = jnp.broadcast_to(weight, keys.shape[:3])
    batch, heads, rows, _ = keys.shape
    first = jnp.broadcast_to(jnp.asarray(0 if start is None else start, jnp.int32), (batch, heads))
    count = jnp.broadcast_to(jnp.asarray(rows if length is None else length, jnp.int32), (batch, heads))
    if index is None:
        index = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, heads, rows))
        count = jnp.minimum(count, rows - first)

    def one_head(*head: Array) -> tuple[Array, Array]:
        keys, values, bias, w, first, count, index = (x[None, None] for x in head)
        keys, values = (jnp.take_along_axis(x, index[..., None], axis=2) for x in (keys, values))
        bias = jnp.take_along_axis(bias, index, axis=2)
        here = ordinals(index.shape[2], 3) - first[..., None]
        real = ((here >= 0) & (here < count[..., None]))[..., None]
        keys, values = (jnp.where(real, x.astype(jnp.float32), 0.0) for x in (keys, values))
        norm = jnp.sqrt(jnp.sum(values**2, axis=-1, keepdims=True))
        values = values * (value_weight**0.5 / jnp.where(norm > 0, norm, 1.0))
        w = w[..., None]
        joint = jnp.concatenate([keys * jnp.sqrt(w)[..., None], values], axis=-1)
        bias = bias - w * jnp.sum(keys**2, axis=-1) / 2
        begin = None if start is None else first
        edge, score = match(joint, bias=bias, normalize=False, start=begin, length=count, index=None)
        return edge[0, 0], score[0, 0]

    return head_after_head(one_head, keys, values, bias, key_weight.astype(jnp.float32), first, count, index)


def listed_rows(
    features: Float[Array, "B K N E"], bias: Float[Array, "B K N"] | None, index: Int[Array, "B K R"] | None
) -> tuple[Array, Array | None]:
    """The rows that `index` lists; without one, all."""
    if index is None:
        return features, bias
    features = jnp.take_along_axis(features, index[..., None], axis=2)
    return features, None if bias is None else jnp.take_along_axis(bias, index, axis=2)


def rows_from(
    features: Array, bias: Array | None, first: Int[Array, "B K"], offset: Int[Array, " P"]
) -> tuple[Array, Array | None]:
    """Rows `first + offset`, the last row where there is none."""
    index = jnp.minimum(first[..., None] + offset[None, None], features.shape[2] - 1)
    values = jnp.take_along_axis(features, index[..., None], axis=2)
    return values, None if bias is None else jnp.take_along_axis(bias, index, axis=2)
