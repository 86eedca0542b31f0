"""KVzip (2505.23416) and KVzip+ (2601.07891): a model repeats its context, and rows are worth what that looks at.

The context is read once, then piece by piece again behind its full cache, each piece after an instruction to repeat it.
Every pass starts at position N again; what it makes of its own tokens is thrown away.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.checks import check_counts
from clusterkv_jax.kernels.dispatch import matmul_operands, matmul_precision
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.learned.output import projected_norms
from clusterkv_jax.models import transformer
from clusterkv_jax.models.causal_attention import causal_attention
from clusterkv_jax.models.config import ModelConfig

Params = dict[str, Any]
# Logits of one block of queries, in elements (f32): 256 MiB.
LOGITS_AT_ONCE = 2**26


def reconstruction(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B N"],
    *,
    chunk: int = 2048,
    prompts: Sequence[Any],
    sinks: int = 4,
    normalize: bool = False,
    prefix: int = 0,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
) -> list[Float[Array, "B K N"]]:
    """The greatest attention that a row gets while the model repeats its piece of the context (KVzip, section 3).

    Pass j feeds `prompts[j]` and then piece j, at positions N and following, behind the full cache. Its softmax is over
    the sinks before the piece, the rows of the piece, and the pass's own tokens; the score is the maximum over all
    tokens that are fed and the query heads of a KV head. One layer at a time is compiled; the passes run one after the
    other.

    Args:
        params: of the model.
        config: of the model.
        tokens: the context, right-padded.
        chunk: tokens of a piece; the last may be short.
        prompts: for each piece all ids fed before it, [n] or a row per sequence [B,n]: the instruction, the tail of the
            piece before, and what a chat template puts before an answer.
        sinks: rows at the start that every later piece's softmax sees too.
        normalize: KVzip+: attention times |W_O^h v| / |h|, h the input of the attention for the token that is fed.
        prefix: tokens at the start, of a chat template, that no piece holds.
        lengths: real tokens of each sequence; N by default.

    Returns:
        scores of each layer, f32, more is more. The first `sinks` rows get the greatest of all layers and heads of
        their sequence + 1, other rows of the prefix 0, rows beyond `lengths` -inf.

    Raises:
        ValueError: if there are not as many prompts as pieces, or a number is impossible.
    """
    batch, count = tokens.shape
    starts = _check(count, chunk, prompts, sinks, prefix)
    counts = jnp.full(batch, count, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    real = ordinals(count, 2) < counts[:, None]
    rows = _read(params, config, jnp.where(real, tokens, 0))

    pieces = []
    for start, ids in zip(starts, prompts, strict=True):
        piece = tokens[:, start : start + chunk]
        fed = jnp.asarray(ids, jnp.int32)
        fed = jnp.concatenate([jnp.broadcast_to(fed, (batch, fed.shape[-1])), piece.astype(jnp.int32)], axis=1)
        pieces.append(
            _repeat(params, config, rows, fed, jnp.int32(start), counts, piece.shape[1], min(sinks, start), normalize)
        )
    unmeasured = jnp.zeros((batch, config.num_kv_heads, prefix), jnp.float32)
    scores = [jnp.concatenate([unmeasured, *layer], axis=2) for layer in zip(*pieces, strict=True)]
    best = jnp.max(jnp.stack([jnp.max(jnp.where(real[:, None], x, 0.0), axis=(1, 2)) for x in scores]), axis=0)
    first = ordinals(count, 3) < sinks
    return [jnp.where(real[:, None], jnp.where(first, best[:, None, None] + 1, x), -jnp.inf) for x in scores]


def _check(count: int, chunk: int, prompts: Sequence[Any], sinks: int, prefix: int) -> range:
    """Where the pieces start. Raises ValueError for what cannot be."""
    check_counts(1, chunk=chunk)
    check_counts(0, sinks=sinks, prefix=prefix)
    if prefix >= count:
        raise ValueError(f"prefix must be smaller than the context of {count} tokens, got {prefix}.")
    starts = range(prefix, count, chunk)
    if len(prompts) != len(starts):
        raise ValueError(
            f"prompts must be {len(starts)}, one for each piece of {chunk} of {count - prefix} tokens, "
            f"got {len(prompts)}."
        )
    return starts


def _read(params: Params, config: ModelConfig, tokens: Int[Array, "B N"]) -> list[tuple[Array, Array]]:
    """Keys and values [B,K,N,D] of every layer."""
    positions = jnp.broadcast_to(ordinals(tokens.shape[1], 2), tokens.shape)
    hidden, rows = transformer.embed(params, config, tokens, positions), []
    for layer in params["layers"]:
        hidden, keys, values = _read_layer(layer, config, hidden, positions)
        rows.append((keys, values))
    return rows


@partial(jax.jit, static_argnames=("config",))
def _read_layer(
    layer: Params, config: ModelConfig, hidden: Float[Array, "B N M"], positions: Int[Array, "B N"]
) -> tuple[Float[Array, "B N M"], Float[Array, "B K N D"], Float[Array, "B K N D"]]:
    q, k, v = transformer.qkv(layer, config, hidden, positions)
    hidden = transformer.finish(layer, config, hidden, causal_attention(q, k, v))
    return hidden, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def _repeat(
    params: Params,
    config: ModelConfig,
    rows: list[tuple[Array, Array]],
    fed: Int[Array, "B n"],
    start: Int[Array, ""],
    counts: Int[Array, " B"],
    size: int,
    sinks: int,
    normalize: bool,
) -> list[Float[Array, "B K size"]]:
    """Scores of the piece of `size` rows from `start` on, which stands at the end of what is fed, in every layer."""
    before = fed.shape[1] - size
    # Of a sequence that ends in the piece only its own tokens are fed; of one that ended before, none.
    number = ordinals(fed.shape[1], 2)
    real = (number < before + jnp.clip(counts - start, 0, size)[:, None]) & (counts > start)[:, None]
    fed, positions = jnp.where(real, fed, 0), counts[:, None] + number
    hidden, scores = transformer.embed(params, config, fed, positions), []
    for layer, (keys, values) in zip(params["layers"], rows, strict=True):
        hidden, score = _repeat_layer(
            layer, config, hidden, positions, real, keys, values, start, counts, size, sinks, normalize
        )
        scores.append(score)
    return scores


@partial(jax.jit, static_argnames=("config", "size", "sinks", "normalize"))
def _repeat_layer(
    layer: Params,
    config: ModelConfig,
    hidden: Float[Array, "B n M"],
    positions: Int[Array, "B n"],
    real: Bool[Array, "B n"],
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    start: Int[Array, ""],
    counts: Int[Array, " B"],
    size: int,
    sinks: int,
    normalize: bool,
) -> tuple[Float[Array, "B n M"], Float[Array, "B K size"]]:
    """One layer of a pass: its hidden states, and the scores of the piece."""
    q, k, v = transformer.qkv(layer, config, hidden, positions)
    new = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    weight = input_norm = None
    if normalize:
        piece = jax.lax.dynamic_slice_in_dim(values, start, size, axis=2)
        weight = projected_norms(piece, layer["attention"]["o"])
        inputs = transformer.attention_input(layer, config, hidden).astype(jnp.float32)
        input_norm = jnp.maximum(jnp.linalg.norm(inputs, axis=-1), jnp.finfo(jnp.float32).tiny)
    attended, score = _attend(q, (keys, values), new, real, counts, start, size, sinks, weight, input_norm)
    return transformer.finish(layer, config, hidden, attended), score


def _attend(
    q: Float[Array, "B n H D"],
    rows: tuple[Float[Array, "B K N D"], Float[Array, "B K N D"]],
    new: tuple[Float[Array, "B K n D"], Float[Array, "B K n D"]],
    real: Bool[Array, "B n"],
    counts: Int[Array, " B"],
    start: Int[Array, ""],
    size: int,
    sinks: int,
    weight: Float[Array, "B H size"] | None,
    input_norm: Float[Array, "B n"] | None,
) -> tuple[Float[Array, "B n H D"], Float[Array, "B K size"]]:
    """Attention of the fed tokens to context and themselves, and the maxima of the softmax that is cut out of it.

    Queries go block after block, so that logits are never n x N for all of them.
    """
    batch, fed, heads, dim = q.shape
    kv_heads, count = rows[0].shape[1:3]
    keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(rows, new, strict=True))
    column = ordinals(count + fed, 2)
    there = jnp.concatenate([ordinals(count, 2) < counts[:, None], real], axis=1)
    inside = (column < sinks) | ((column >= start) & (column < start + size)) | (column >= count)
    group = heads // kv_heads
    per_head = None if weight is None else weight.reshape(batch, kv_heads, group, 1, size)

    def block(best: Float[Array, "B K size"], part: tuple[Array, ...]) -> tuple[Array, Array]:
        q, number, queries, norm = part
        q = q.reshape(batch, -1, kv_heads, group, dim)
        logits = jnp.einsum(
            "btkgd,bknd->bkgtn",
            *matmul_operands(q, keys),
            precision=matmul_precision(q.dtype),
            preferred_element_type=jnp.float32,
        )
        visible = there[:, None] & (column <= count + number[:, None])[None]
        # A token that is padding may see nothing but itself, which is no number but must be one.
        visible = (visible | (column == count + number[:, None])[None])[:, None, None]
        logits = jnp.where(visible, logits * dim**-0.5, -jnp.inf)
        attended = jnp.einsum(
            "bkgtn,bknd->btkgd",
            *matmul_operands(jax.nn.softmax(logits, axis=-1).astype(values.dtype), values),
            precision=matmul_precision(values.dtype),
            preferred_element_type=jnp.float32,
        )
        total = jax.nn.logsumexp(jnp.where(inside[None, None, None], logits, -jnp.inf), axis=-1, keepdims=True)
        share = jnp.exp(jax.lax.dynamic_slice_in_dim(logits, start, size, axis=4) - total)
        if per_head is not None:
            share = share * per_head / norm[:, None, None, :, None]
        share = jnp.where(queries[:, None, None, :, None], share, 0.0)
        return jnp.maximum(best, jnp.max(share, axis=(2, 3))), attended.astype(q.dtype)

    length = max(16, min(fed, LOGITS_AT_ONCE // (batch * heads * (count + fed))))
    blocks = -(-fed // length)
    norm = jnp.ones((batch, fed), jnp.float32) if input_norm is None else input_norm
    parts = _in_blocks(q, blocks, length), _in_blocks(real, blocks, length), _in_blocks(norm, blocks, length, 1.0)
    # What fills the last block up asks as the last token does, for nothing.
    numbers = jnp.minimum(jnp.arange(blocks * length, dtype=jnp.int32), fed - 1).reshape(blocks, length)
    first = jnp.zeros((batch, kv_heads, size), jnp.float32)
    best, attended = jax.lax.scan(block, first, (parts[0], numbers, *parts[1:]))
    return jnp.moveaxis(attended, 0, 1).reshape(batch, blocks * length, heads, dim)[:, :fed], best


def _in_blocks(x: Float[Array, "B n ..."] | Bool[Array, "B n"], blocks: int, length: int, fill: float = 0.0) -> Array:
    """Blocks of tokens first."""
    padding = [(0, 0), (0, blocks * length - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding, constant_values=fill if x.dtype != jnp.bool else False)
    return jnp.moveaxis(x.reshape(x.shape[0], blocks, length, *x.shape[2:]), 1, 0)
