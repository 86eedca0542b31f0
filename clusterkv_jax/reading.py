"""A model over whole prompts, padded on the right: what methods have no part in. One program a layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.models import transformer
from clusterkv_jax.models.causal_attention import causal_attention
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.transformer import Params
from clusterkv_jax.programs import jit
from clusterkv_jax.sharding import constrain, constrain_cache

# Tokens of a prompt that a layer projects, and takes through its MLP, at once: enough to fill any matrix unit, while
# activations of 14,336 columns in bf16 stay below a GB each.
TOKENS_AT_ONCE = 32768


def _positions(batch: int, width: int) -> Int[Array, "B N"]:
    return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))


@jit(static_argnames=("config",))
def embed(
    params: Params, config: ModelConfig, tokens: Int[Array, "B N"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B N M"], Int[Array, " B"]]:
    """Hidden states, and the lengths on the same devices. What is padding becomes a token, whatever it is."""
    tokens = jnp.where(ordinals(tokens.shape[1], 2) < lengths[:, None], tokens, 0)
    hidden = transformer.embed(params, config, tokens, _positions(*tokens.shape))
    return constrain(hidden, "batch", None, None), lengths


@jit(static_argnames=("config",))
def last_logits(
    params: Params, config: ModelConfig, hidden: Float[Array, "B N M"], lengths: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Logits after each sequence's last token."""
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return transformer.unembed(params, config, last)


@jit(static_argnames=("config", "chunk"), donate_argnames=("hidden",))
def read_layer(
    weights: Params, config: ModelConfig, chunk: int | None, hidden: Float[Array, "B N M"]
) -> tuple[Float[Array, "B N M"], Float[Array, "B K N D"], Float[Array, "B K N D"]]:
    """One layer over the whole prompt, and all its keys and values."""
    hidden, _, k, v = over_prompt(weights, config, chunk, hidden)
    return constrain(hidden, "batch", None, None), *constrain_cache((k, v))


def over_prompt(
    weights: Params, config: ModelConfig, chunk: int | None, hidden: Float[Array, "B N M"]
) -> tuple[Float[Array, "B N M"], Float[Array, "B H N D"], Float[Array, "B K N D"], Float[Array, "B K N D"]]:
    """One layer over the whole prompt: hidden states, queries, keys and values."""
    batch, width, _ = hidden.shape
    positions = _positions(batch, width)
    chunk = max(1, TOKENS_AT_ONCE // batch) if chunk is None else chunk
    if chunk >= width:
        q, k, v = transformer.qkv(weights, config, hidden, positions)
        hidden = transformer.finish(weights, config, hidden, causal_attention(q, k, v))
    else:
        hidden, q, k, v = _layer_in_chunks(weights, config, chunk, hidden, positions)
    return hidden, jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def _layer_in_chunks(
    weights: Params, config: ModelConfig, chunk: int, hidden: Float[Array, "B N M"], positions: Int[Array, "B N"]
):
    """The same layer, its projections and its MLP `chunk` tokens at a time."""
    project = partial(transformer.qkv, weights, config)
    empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(project, hidden, positions))
    q, k, v = _by_chunks(lambda _, *tokens: project(*tokens), chunk, empty, hidden, positions)
    attended = causal_attention(q, k, v)
    return _by_chunks(partial(transformer.finish, weights, config), chunk, hidden, attended), q, k, v


def _by_chunks(function: Callable[..., Any], chunk: int, into: Any, *read: Shaped[Array, "B N ..."]) -> Any:
    """Arrays `into` [B, N, ...], chunk by chunk overwritten with what `function` makes of it and of `read`."""
    width = read[0].shape[1]
    count = -(-width // chunk)
    size = -(-width // count)

    def body(number: Array, into: Any) -> Any:
        start = jnp.minimum(number * size, width - size)
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)  # noqa: E731
        # The last chunk begins within the one before it, whose tokens stay.
        fresh = start + jnp.arange(size) >= number * size

        def put(x: Array, old: Array, new: Array) -> Array:
            new = jnp.where(fresh.reshape(-1, *[1] * (x.ndim - 2)), new, old)
            return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=1)

        old = jax.tree.map(cut, into)
        return jax.tree.map(put, into, old, function(old, *map(cut, read)))

    return jax.lax.fori_loop(0, count, body, into)
