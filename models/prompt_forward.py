"""A model over whole prompts, padded on the right: what methods have no part in. One program a layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from clusterkv_jax.blocks.context_parallel import attention_over_tokens
from clusterkv_jax.blocks.linear import tokens_at_once
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.models import decoder
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.sharding import constrain, constrain_cache, token_ways


def _positions(batch: int, width: int) -> Int[Array, "B N"]:
    return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))


@jit(static_argnames=("config",))
def embed(
    params: Params, config: ModelConfig, tokens: Int[Array, "B N"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B N M"], Int[Array, " B"]]:
    """Hidden states, and the lengths on the same devices. What is padding becomes a token, whatever it is."""
    tokens = jnp.where(ordinals(tokens.shape[1], 2) < lengths[:, None], tokens, 0)
    hidden = decoder.embed(params, config, tokens, _positions(*tokens.shape))
    return constrain(hidden, "batch", "tokens", None), constrain(lengths, None)


@jit(static_argnames=("config",))
def last_logits(
    params: Params, config: ModelConfig, hidden: Float[Array, "B N M"], lengths: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Logits after each sequence's last token."""
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return decoder.unembed(params, config, last)


@jit(static_argnames=("config", "chunk"), donate_argnames=("hidden",))
def read_layer(
    weights: Params, config: ModelConfig, chunk: int | None, hidden: Float[Array, "B N M"]
) -> tuple[Float[Array, "B N M"], Float[Array, "B K N D"], Float[Array, "B K N D"]]:
    """One layer over the whole prompt, and all its keys and values; `config` is the layer's (`of_layer`)."""
    hidden, _, k, v, _ = over_prompt(weights, config, chunk, hidden)
    return constrain(hidden, "batch", "tokens", None), *constrain_cache((k, v))


def over_prompt(
    weights: Params,
    config: ModelConfig,
    chunk: int | None,
    hidden: Float[Array, "B N M"],
    surrogate: Params | None = None,
) -> tuple[
    Float[Array, "B N M"],
    Float[Array, "B H N D"],
    Float[Array, "B K N D"],
    Float[Array, "B K N D"],
    Float[Array, "B K N"] | None,
]:
    """One layer over the whole prompt: hidden states, queries, keys and values, and the scores of a surrogate, None
    without; `config` as in `read_layer`.
    """
    batch, width, _ = hidden.shape
    positions = _positions(batch, width)
    chunk = max(1, tokens_at_once() // batch) if chunk is None else chunk
    if chunk >= width // token_ways(width):
        # Heads on their devices: without a word the partitioner takes the cache's places for them, its slots too.
        *heads, scores = decoder.attention_in(weights, config, hidden, positions, surrogate)
        q, k, v = _on_heads(*heads)
        attended = _attended(weights, config, q, k, v)
        hidden = decoder.attention_out_and_mlp(weights, config, hidden, attended)
    else:
        hidden, q, k, v, scores = _layer_in_chunks(weights, config, chunk, hidden, positions, surrogate)
    by_head = partial(jnp.swapaxes, axis1=1, axis2=2)
    return hidden, by_head(q), by_head(k), by_head(v), None if scores is None else by_head(scores)


def _on_heads(
    q: Float[Array, "B N H D"], k: Float[Array, "B N K D"], v: Float[Array, "B N K D"]
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N K D"], Float[Array, "B N K D"]]:
    names = ("heads", "kv_heads", "kv_heads")
    q, k, v = (constrain(x, "batch", "tokens", name, None) for x, name in zip((q, k, v), names, strict=True))
    return q, k, v


def _attended(
    weights: Params,
    config: ModelConfig,
    q: Float[Array, "B N H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
) -> Float[Array, "B N H D"]:
    options: Any = {"window": config.window, "soft_cap": config.soft_cap}
    return attention_over_tokens(q, k, v, **options, sink_logits=decoder.sink_logits(weights, config))


def _layer_in_chunks(
    weights: Params,
    config: ModelConfig,
    chunk: int,
    hidden: Float[Array, "B N M"],
    positions: Int[Array, "B N"],
    surrogate: Params | None,
):
    """The same layer, its projections and its MLP `chunk` tokens at a time."""

    def project(hidden: Array, positions: Array) -> Any:
        return decoder.attention_in(weights, config, hidden, positions, surrogate)

    empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(project, hidden, positions))
    q, k, v, scores = _by_chunks(lambda _, *tokens: project(*tokens), chunk, empty, hidden, positions)
    q, k, v = _on_heads(q, k, v)
    attended = _attended(weights, config, q, k, v)
    hidden = _by_chunks(partial(decoder.attention_out_and_mlp, weights, config), chunk, hidden, attended)
    return hidden, q, k, v, scores


def _by_chunks(function: Callable[..., Any], chunk: int, into: Any, *read: Shaped[Array, "B N ..."]) -> Any:
    """Arrays `into` [B, N, ...], chunk by chunk overwritten with what `function` makes of it and of `read`.

    Devices that share a prompt's tokens each take chunks of their own: their parts stand as sequences.
    """
    batch, width, parts = *read[0].shape[:2], token_ways(read[0].shape[1])

    def apart(x):
        return x.reshape(batch * parts, width // parts, *x.shape[2:])

    def together(x):
        return constrain(x.reshape(batch, width, *x.shape[2:]), "batch", "tokens", *[None] * (x.ndim - 2))

    result = _chunk_after_chunk(function, chunk, jax.tree.map(apart, into), *map(apart, read))
    return jax.tree.map(together, result)


def _chunk_after_chunk(function: Callable[..., Any], chunk: int, into: Any, *read: Shaped[Array, "B N ..."]) -> Any:
    width = read[0].shape[1]
    count = -(-width // chunk)
    size = -(-width // count)

    def body(number: Array, into: Any) -> Any:
        start = jnp.minimum(number * size, width - size)

        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

        # The last chunk begins within the one before it, whose tokens stay.
        fresh = start + jnp.arange(size) >= number * size

        def put(x: Array, old: Array, new: Array) -> Array:
            if count * size > width:
                new = jnp.where(fresh.reshape(-1, *[1] * (x.ndim - 2)), new, old)
            return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=1)

        old = jax.tree.map(cut, into)
        return jax.tree.map(put, into, old, function(old, *map(cut, read)))

    return jax.lax.fori_loop(0, count, body, into)
