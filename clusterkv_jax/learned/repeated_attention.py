"""Attention of a pass that repeats a piece of a context: cuDNN's on a GPU, blocks of queries in XLA elsewhere.

A fed token reads the whole context and the fed tokens up to itself. Beside that the pass wants maxima of another
softmax, which is cut out of it: over the sinks, the rows of the piece, and the fed tokens.

    context   s s . . . . p p p p . . . .      fed tokens   t t t t t
              sinks       piece                             each sees those before it
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.causal_attention import LARGEST_BLOCK, attention_with_lse, segment_edges
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.soft_cap import capped
from clusterkv_jax.runtime.dispatch import matmul_operands, matmul_precision, traits
from clusterkv_jax.runtime.sharding import ambient_mesh


@dataclass(frozen=True)
class AttentionView:
    """What is static of a pass: rows of the piece, sinks, the layer's window and its soft cap of scores."""

    size: int
    sinks: int
    window: int | None
    soft_cap: float | None


def attend(
    q: Float[Array, "B n H D"],
    rows: tuple[Array, Array, Array, Array],
    below: Float[Array, "B n"],
    counts: Int[Array, " B"],
    start: Int[Array, ""],
    sight: AttentionView,
    sink_logits: Float[Array, " H"] | None = None,
    *,
    last: bool = False,
) -> tuple[Float[Array, "B n H D"] | None, Float[Array, "B K G size"]]:
    """Attention of the fed tokens to context and themselves, and the maxima of the softmax that is cut out of it.

    That softmax has no sinks: rows are ranked by what a query gives them of what it gives to rows. The maxima are
    logarithms, less `below`, which each fed token has. `rows` are keys and values [B,K,.,D] of the context, and of the
    fed tokens. Nobody reads the attention of the `last` layer: it is None, and the rest of the context is not read.
    """
    library = attention_with_lse(q)
    if library is not None and (sight.window, sight.soft_cap, sink_logits) == (None, None, None):
        return by_library(library, q, rows, below, counts, start, sight, last=last)
    if last:
        cut = cut_out(rows[0], start, sight), cut_out(rows[1], start, sight)
        rows, counts = (*cut, *rows[2:]), sight.sinks + jnp.maximum(counts - start, 0)
        start = jnp.int32(sight.sinks)
    attended, best = _in_xla(q, rows, below, counts, start, sight, sink_logits)
    return None if last else attended, best


def cut_out(x: Float[Array, "B K N D"], start: Int[Array, ""], sight: AttentionView) -> Float[Array, "B K rows D"]:
    """The sinks and the rows of the piece."""
    piece = jax.lax.dynamic_slice_in_dim(x, start, sight.size, axis=2)
    return jnp.concatenate([x[:, :, : sight.sinks], piece], axis=2)


def by_library(
    attention: Callable[..., tuple[Array, Array]],
    q: Float[Array, "B n H D"],
    rows: tuple[Array, Array, Array, Array],
    below: Float[Array, "B n"],
    counts: Int[Array, " B"],
    start: Int[Array, ""],
    sight: AttentionView,
    *,
    last: bool,
) -> tuple[Float[Array, "B n H D"] | None, Float[Array, "B K G size"]]:
    """`attend` by an attention that tells the log-sum-exp of its scores, heads first: (q, k, v, lengths or None if
    causal) -> out [B,H,n,D], lse [B,H,n]. Pieces of the rows are attended to apart and combined.
    """
    keys, values, *fed = rows
    by_head = jnp.swapaxes(q, 1, 2)
    own, own_lse = attention(by_head, *fed, None)
    there = sight.sinks + jnp.clip(counts - start, 0, sight.size)
    _, lse = attention(by_head, cut_out(keys, start, sight), cut_out(values, start, sight), jnp.maximum(there, 1))
    lse = jnp.where(there[:, None, None] > 0, lse, -jnp.inf)
    less = jnp.logaddexp(lse, own_lse) + below[:, None]
    best = _maxima(q, jax.lax.dynamic_slice_in_dim(keys, start, sight.size, axis=2), less)
    if last:
        return None, best
    context, lse = attention(by_head, keys, values, counts)
    share = jax.nn.sigmoid(lse - own_lse)[..., None]
    return jnp.swapaxes((share * context + (1 - share) * own).astype(q.dtype), 1, 2), best


def _maxima(
    q: Float[Array, "B n H D"], keys: Float[Array, "B K size D"], less: Float[Array, "B H n"]
) -> Float[Array, "B K G size"]:
    """The greatest logit of each row, less what its query has, over all queries; a block of them after the other."""
    batch, fed, heads, dim = q.shape
    kv_heads, size = keys.shape[1:3]
    most = max(16, traits().scratch // (batch * heads * size))
    blocks = math.ceil(fed / most)
    block = math.ceil(fed / blocks)
    padding = blocks * block - fed
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))).reshape(batch, blocks, block, kv_heads, -1, dim)
    less = jnp.pad(less, ((0, 0), (0, 0), (0, padding)), constant_values=jnp.inf)
    less = less.reshape(batch, kv_heads, -1, blocks, block)

    def more(best: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        queries, less = part
        logits = jax.vmap(_logits)(queries.transpose(0, 2, 3, 1, 4), keys)
        return jnp.maximum(best, jnp.max(logits - less[..., None], axis=3)), None

    best = jnp.full((batch, kv_heads, heads // kv_heads, size), -jnp.inf)
    return jax.lax.scan(more, best, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(less, 3, 0)))[0]


def _in_xla(
    q: Float[Array, "B n H D"],
    rows: tuple[Array, Array, Array, Array],
    below: Float[Array, "B n"],
    counts: Int[Array, " B"],
    start: Int[Array, ""],
    sight: AttentionView,
    sink_logits: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "B n H D"], Float[Array, "B K G size"]]:
    """`attend` in blocks of queries. One sequence goes after the other where they are `serial`."""
    batch, fed, heads, dim = q.shape
    kv_heads, count = rows[0].shape[1:3]
    alone = traits().serial and ambient_mesh() is None
    at_once = traits().scratch // (heads * (count + fed) * (1 if alone else batch))
    block = max(16, min(LARGEST_BLOCK, at_once))

    sinks = None if sink_logits is None else sink_logits.reshape(kv_heads, -1).astype(jnp.float32)

    def one(arrays: Any) -> tuple[Array, Array]:
        return _attend_one(*arrays, start=start, sight=sight, block=block, sink_logits=sinks)

    q = q.reshape(batch, fed, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    arrays = q, *rows, below, counts
    attended, best = jax.lax.map(one, arrays) if alone else jax.vmap(one)(arrays)
    return attended.transpose(0, 3, 1, 2, 4).reshape(batch, fed, heads, dim), best


def _attend_one(
    q: Float[Array, "K G n D"],
    keys: Float[Array, "K N D"],
    values: Float[Array, "K N D"],
    new_keys: Float[Array, "K n D"],
    new_values: Float[Array, "K n D"],
    below: Float[Array, " n"],
    count: Int[Array, ""],
    start: Int[Array, ""],
    sight: AttentionView,
    block: int,
    sink_logits: Float[Array, "K G"] | None,
) -> tuple[Float[Array, "K G n D"], Float[Array, "K G size"]]:
    """A sequence: `block` queries after the other, so that logits are never n x N for all of them.

    Later queries see more of the fed tokens, so those come in segments, as in `causal_attention`.
    """
    row = ordinals(keys.shape[1], 2)

    def attend(end: int, best: Array, part: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q, number, below = part
        there, mine = row < count, ordinals(end, 2) <= number[:, None]
        if sight.window is not None:  # a query's own number counts from the end of the context
            first = number[:, None] - sight.window
            there, mine = there & (row > count + first), mine & (ordinals(end, 2) > first)
        context = jnp.where(there[None, None], capped(_logits(q, keys), sight.soft_cap), -jnp.inf)
        own = jnp.where(mine[None, None], capped(_logits(q, new_keys[:, :end]), sight.soft_cap), -jnp.inf)
        peak = jnp.maximum(jnp.max(context, axis=-1), jnp.max(own, axis=-1))[..., None]
        weights = jnp.exp(context - peak), jnp.exp(own - peak)
        total = jnp.sum(weights[0], axis=-1) + jnp.sum(weights[1], axis=-1)
        attended = _weighted(weights[0], values) + _weighted(weights[1], new_values[:, :end])
        if sink_logits is not None:
            total += jnp.exp(sink_logits[..., None] - peak[..., 0])
        piece = jax.lax.dynamic_slice_in_dim(context, start, sight.size, axis=3)
        inside = [jax.nn.logsumexp(x, axis=-1) for x in (context[..., : sight.sinks], piece, own) if x.shape[-1]]
        less = jax.nn.logsumexp(jnp.stack(inside), axis=0) + below[None, None]
        best = jnp.maximum(best, jnp.max(piece - less[..., None], axis=2))
        return best, (attended / total[..., None]).astype(q.dtype)

    best, outputs = jnp.full((*q.shape[:2], sight.size), -jnp.inf), []
    for begin, end in pairwise(segment_edges(q.shape[2])):
        blocks = -(-(end - begin) // block)
        length = -(-(end - begin) // blocks)
        # What fills the last block up asks as the last token does, for nothing.
        at = jnp.minimum(begin + jnp.arange(blocks * length, dtype=jnp.int32), end - 1).reshape(blocks, length)
        parts = jnp.moveaxis(q[:, :, at], 2, 0), at, below[at]
        best, out = jax.lax.scan(lambda best, part, end=end: attend(end, best, part), best, parts)
        outputs.append(jnp.moveaxis(out, 0, 2).reshape(*q.shape[:2], -1, q.shape[3])[:, :, : end - begin])
    return jnp.concatenate(outputs, axis=2), best


def _logits(q: Float[Array, "K G t D"], keys: Float[Array, "K N D"]) -> Float[Array, "K G t N"]:
    product = jnp.einsum(
        "kgtd,knd->kgtn",
        *matmul_operands(q, keys),
        precision=matmul_precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    return product * q.shape[-1] ** -0.5


def _weighted(weights: Float[Array, "K G t N"], values: Float[Array, "K N D"]) -> Float[Array, "K G t D"]:
    return jnp.einsum(
        "kgtn,knd->kgtd",
        *matmul_operands(weights.astype(values.dtype), values),
        precision=matmul_precision(values.dtype),
        preferred_element_type=jnp.float32,
    )
