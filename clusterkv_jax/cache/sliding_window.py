"""Layers whose tokens see the last W alone: their rows stay as they are, in a ring, whatever the method.

The token of position p has slot p % C. C is W, or less where a request is shorter than a window: such a ring never
comes round.

One head, W = C = 4, after 6 tokens and after a 7th:

    slot       0   1   2   3            0   1   2   3
    position   4   5   2   3            4   5   6   3
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache.attention import attend_cache, attend_where, with_sinks
from clusterkv_jax.cache.layers import KVCache, LayerCache, StepInputs, WindowCache, append, nbytes
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.runtime.sharding import constrain_cache


@jax.named_scope("window")
def ring(
    keys: Float[Array, "B K N D"], values: Float[Array, "B K N D"], lengths: Int[Array, " B"], window: int, slots: int
) -> WindowCache:
    """The last tokens of prompts that are padded on the right, in a ring of so many slots."""
    at = _positions(lengths, slots)
    real = at >= 0
    # A head's rows come together, as for a method.
    key_rows, value_rows = (_taken(x, at, real) for x in constrain_cache((keys, values)))
    every = jnp.broadcast_to(real[:, None], (*keys.shape[:2], slots))
    held = jnp.broadcast_to(jnp.minimum(lengths, window)[:, None], keys.shape[:2])
    return WindowCache(LayerCache(key_rows, value_rows, every.astype(jnp.float32), held.astype(jnp.int32)), window)


@jax.named_scope("window")
def step_window(layer: WindowCache, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], WindowCache]:
    """New tokens enter the ring and attend to their windows."""
    if tokens.q.shape[1] > 1:
        return _attended(layer, tokens), _longer(layer, tokens)
    rows, new = layer.rows, (jnp.swapaxes(tokens.k, 1, 2), jnp.swapaxes(tokens.v, 1, 2))
    slot = jnp.broadcast_to(tokens.positions % rows.capacity, rows.length.shape)
    rows = append(replace(rows, length=slot), *new, tokens.positions, tokens.real, apart=True)
    rows = replace(rows, length=_held(layer, tokens))
    attended = with_sinks(attend_cache(rows, tokens.q, tokens.soft_cap), tokens.sink_logits)
    return attended, replace(layer, rows=rows)


def window_bytes(cache: KVCache) -> int:
    """Those of the cache's `nbytes` that are in windows."""
    layers = tuple(layer for layer in cache.layers if isinstance(layer, WindowCache))
    return nbytes(replace(cache, layers=layers, state=()))


def _positions(counts: Int[Array, " B"], slots: int) -> Int[Array, "B C"]:
    """The position of the token in each slot after so many; below 0 there is none yet."""
    last = counts[:, None] - 1
    return last - (last - ordinals(slots, 2)) % slots


def _held(layer: WindowCache, tokens: StepInputs) -> Int[Array, "B K"]:
    """Rows after the new tokens; more than there are slots where a ring with less than a window's has come round."""
    return jnp.minimum(layer.rows.length + jnp.sum(tokens.real, axis=1, dtype=jnp.int32)[:, None], layer.window)


def _longer(layer: WindowCache, tokens: StepInputs) -> WindowCache:
    """The ring after several tokens, of which it may hold the last ones alone."""
    rows, start = layer.rows, tokens.positions[:, 0]
    at = _positions(start + jnp.sum(tokens.real, axis=1, dtype=jnp.int32), rows.capacity) - start[:, None]
    new = at >= 0

    def put(old: Array, x: Array) -> Array:
        return jnp.where(new[:, None, :, None], _taken(jnp.swapaxes(x, 1, 2), at, new), old)

    degree = jnp.where(new[:, None], 1.0, rows.degree)
    keys, values = put(rows.keys, tokens.k), put(rows.values, tokens.v)
    return replace(layer, rows=LayerCache(keys, values, degree, _held(layer, tokens)))


def _attended(layer: WindowCache, tokens: StepInputs) -> Float[Array, "B T H D"]:
    """Several tokens over the ring as it was and over each other, each as far as its window reaches."""
    rows, count = layer.rows, tokens.q.shape[1]
    before = _positions(tokens.positions[:, 0], rows.capacity)
    at = jnp.concatenate([before, tokens.positions], axis=1)[:, None]
    real = jnp.concatenate([before >= 0, tokens.real], axis=1)[:, None]
    ahead = tokens.positions[:, :, None] - at
    # A padded query sees itself, so that it has something to see.
    itself = ordinals(at.shape[2], 3) == rows.capacity + ordinals(count, 2)[:, :, None]
    keys, values = (
        jnp.concatenate([old, jnp.swapaxes(new, 1, 2)], axis=2)
        for old, new in ((rows.keys, tokens.k), (rows.values, tokens.v))
    )
    visible = (real & (ahead >= 0) & (ahead < layer.window)) | itself
    return with_sinks(attend_where(tokens.q, keys, values, visible, tokens.soft_cap), tokens.sink_logits)


def _taken(x: Float[Array, "B K N D"], at: Int[Array, "B C"], real: Bool[Array, "B C"]) -> Float[Array, "B K C D"]:
    """The rows at these places, zeros where they are not real."""
    places = jnp.clip(at, 0, x.shape[2] - 1)[:, None, :, None]
    return jnp.where(real[:, None, :, None], jnp.take_along_axis(x, places, axis=2), jnp.zeros((), x.dtype))
