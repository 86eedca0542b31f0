"""How much attention each row of a cache gets: what eviction methods choose by.

    window        the last W queries over all rows, mean of their probabilities           SnapKV, PyramidKV, ChunkKV
    accumulated   all queries over all rows, sum of their probabilities                    H2O
    pooled        each row by the rows around it
    chunks        runs of rows by the sum or mean of their scores
    as_ranked     scores to as many digits as rounding leaves: equal ones go by position

Everything is float32. Rows of degree n count n times, empty slots not at all, and no query sees a later row. Scores are
per query head until `group_mean` brings them to the KV heads that keep or drop rows.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache.layers import LayerCache
from clusterkv_jax.kernels.accumulated_attention import accumulated_attention
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.runtime.dispatch import matmul_operands, matmul_precision
from clusterkv_jax.runtime.sharding import over_heads

Pooling = Literal["max", "avg"]

# Probabilities of one block of queries, in elements (f32): 256 MiB.
PROBABILITIES_AT_ONCE = 2**26


def last_queries(queries: Float[Array, "B H N D"], lengths: Int[Array, " B"], window: int) -> Float[Array, "B H W D"]:
    """The queries of the last `window` tokens of each prompt; of shorter prompts the first token's, repeated."""
    at = jnp.clip(lengths[:, None] - window + ordinals(window, 2), 0, queries.shape[2] - 1)
    return jnp.take_along_axis(queries, at[:, None, :, None], axis=2)


def probabilities(
    queries: Float[Array, "B H T D"], layer: LayerCache, visible: Bool[Array, "B #K T C"]
) -> Float[Array, "B K G T C"]:
    """Attention of every query over the rows that it sees; zeros where it sees none."""
    batch, _, tokens, dim = queries.shape
    grouped = queries.reshape(batch, layer.keys.shape[1], -1, tokens, dim)
    score = jnp.einsum(
        "bkgtd,bkcd->bkgtc",
        *matmul_operands(grouped, layer.keys.astype(queries.dtype)),
        precision=matmul_precision(queries.dtype),
        preferred_element_type=jnp.float32,
    )
    row = layer.degree > 0
    bias = jnp.log(jnp.where(row, layer.degree, 1.0))
    mask = (visible & row[:, :, None])[:, :, None]
    score = jnp.where(mask, score * dim**-0.5 + bias[:, :, None, None], -jnp.inf)
    peak = jnp.max(score, axis=-1, keepdims=True)
    weight = jnp.exp(score - jnp.where(peak > -jnp.inf, peak, 0.0))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return weight / jnp.where(total > 0, total, 1.0)


def window_scores(
    queries: Float[Array, "B H W D"], positions: Int[Array, "B W"], layer: LayerCache
) -> Float[Array, "B K G C"]:
    """Mean probability of each row over the queries of a window, causal inside it (SnapKV)."""
    assert layer.positions is not None
    visible = layer.positions[:, :, None] <= positions[:, None, :, None]
    return jnp.mean(probabilities(queries, layer, visible), axis=-2)


def accumulated_scores(queries: Float[Array, "B H N D"], prompt: LayerCache) -> Float[Array, "B K N"]:
    """Sum of each row's probabilities over all queries of its prompt, group mean (H2O)."""
    batch, _, tokens, dim = queries.shape
    kv_heads = prompt.keys.shape[1]

    def add_up(grouped: Float[Array, "B K rows D"], keys: Array, lengths: Array) -> Float[Array, "B K N"]:
        own = grouped.reshape(grouped.shape[0], -1, tokens, dim)
        return accumulated_attention(own, keys, lengths)

    # Query heads go where their KV head is.
    grouped = queries.reshape(batch, kv_heads, -1, dim)
    return over_heads(add_up, grouped, prompt.keys, prompt.length[:, 0])


def over_query_blocks(
    queries: Float[Array, "B H N D"],
    prompt: LayerCache,
    sees: Callable[[Int[Array, "T 1"], Int[Array, " N"]], Bool[Array, "..."]],
    visit: Callable[[Any, Float[Array, "B K G T N"], Bool[Array, "B T"], Int[Array, " T"]], tuple[Any, Any]],
    carry: Any,
) -> tuple[Any, Any]:
    """A scan over blocks of T queries: `visit(carry, probabilities, real, numbers)` gives the next carry and an output.

    `sees(query, row)`, both by their numbers in the prompt, says which rows a query attends to, as [B,1,T,N] or less.
    """
    batch, heads, tokens, _ = queries.shape
    lengths = prompt.length[:, 0]
    block = max(16, min(tokens, PROBABILITIES_AT_ONCE // (batch * heads * tokens)))
    count = -(-tokens // block)
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, count * block - tokens), (0, 0)))
    rows = jnp.arange(tokens)

    def one(carry: Any, start: Int[Array, ""]) -> tuple[Any, Any]:
        numbers = start + jnp.arange(block)
        real = numbers[None] < lengths[:, None]
        part = jax.lax.dynamic_slice_in_dim(padded, start, block, axis=2)
        part = jnp.where(real[:, None, :, None], part, jnp.zeros((), part.dtype))
        visible = jnp.broadcast_to(sees(numbers[:, None], rows), (batch, 1, block, tokens))
        return visit(carry, probabilities(part, prompt, visible), real, numbers)

    return jax.lax.scan(one, carry, block * jnp.arange(count))


def group_mean(scores: Float[Array, "B K G ..."]) -> Float[Array, "B K ..."]:
    """Scores of a KV head: the mean over the query heads that read it."""
    return jnp.mean(scores, axis=2)


def as_ranked(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scores to 17 binary digits: what rounding alone tells apart is a tie, in every batch and on every device."""
    return jax.lax.reduce_precision(scores, exponent_bits=8, mantissa_bits=16)


def pooled(
    scores: Float[Array, "... C"], kernel: int, pooling: Pooling, count: Int[Array, "..."]
) -> Float[Array, "... C"]:
    """Each of the first `count` scores becomes the maximum or mean of the `kernel` scores around it.

    Beyond both ends the mean counts zeros and the maximum nothing, as torch's pooling with padding kernel // 2 does.
    """
    inside = ordinals(scores.shape[-1], scores.ndim) < count[..., None]
    empty, combine = (-jnp.inf, jax.lax.max) if pooling == "max" else (0.0, jax.lax.add)
    window = (1,) * (scores.ndim - 1) + (kernel,)
    padding = [(0, 0)] * (scores.ndim - 1) + [(kernel // 2, kernel // 2)]
    scores = jnp.where(inside, scores, empty)
    out = jax.lax.reduce_window(scores, jnp.float32(empty), combine, window, (1,) * scores.ndim, padding)
    return out if pooling == "max" else out / kernel


def chunk_sums(scores: Float[Array, "B K C"], chunk: int) -> Float[Array, "B K chunks"]:
    """Sum over each run of `chunk` rows, from the first row; the last run may be short."""
    count = -(-scores.shape[-1] // chunk)
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, count * chunk - scores.shape[-1])))
    return jnp.sum(padded.reshape(*scores.shape[:2], count, chunk), axis=-1)
