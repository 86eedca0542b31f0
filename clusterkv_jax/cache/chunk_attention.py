"""Attention of a chunk of a prompt: over the rows that a layer holds and, causally, over itself.

Where the device has a library's attention it takes both parts, the heads of a layer as sequences of their own: heads
hold unequally many rows, and the library knows one length for each sequence. Rows that count by their degrees, and
capped scores, go by the library's own causal half at most.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.blocks.causal_attention import attention_with_lse
from clusterkv_jax.cache.attention import attend_cache, attend_new, combine, with_mean
from clusterkv_jax.cache.layers import HeadGroups, Layer, LayerCache, PagedHeads, StepInputs, from_pages, pad_slots
from clusterkv_jax.cache.pages import most_slots
from clusterkv_jax.kernels.quantised import Quantised, dequantised


@jax.named_scope("attend")
def attend_chunk(layer: Layer, tokens: StepInputs, *, plain: bool) -> Float[Array, "B T H D"]:
    """New tokens over the rows that a layer held before them, and over each other.

    `plain` rows are tokens, all of degree 1.
    """
    q, k, v = tokens.q, jnp.swapaxes(tokens.k, 1, 2), jnp.swapaxes(tokens.v, 1, 2)
    library = attention_with_lse(q) if tokens.soft_cap is None else None
    if library is None:
        among = attend_new(q, tokens.k, tokens.v, tokens.real, tokens.soft_cap)
    else:
        among = _tokens_first(*library(jnp.swapaxes(q, 1, 2), k, v, None))
    if library is not None and isinstance(layer, PagedHeads):
        layer = _in_equal_slots(layer)
    if library is None or not plain or not isinstance(layer, LayerCache | HeadGroups):
        rows = attend_cache(layer, q, tokens.soft_cap, tokens.degree_power)
    else:
        rows = _by_library(library, layer, q)
    return combine(rows, among, tokens.sink_logits)


def _in_equal_slots(layer: PagedHeads) -> LayerCache:
    """Heads that share pages in slots as many as the largest can have: kernels look at no more than each holds.

    Page after page each query would have an output of its own.
    """
    return from_pages(layer, most_slots(layer) or layer.degree[0].size)


def _by_library(
    library: Callable[..., Any], layer: LayerCache | HeadGroups, q: Array
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """`attend_cache` of rows that all count alike."""
    joined = _joined(layer, q.dtype)
    batch, tokens, heads, dim = q.shape
    rows = batch * joined.length.shape[1]
    alone = jnp.swapaxes(q, 1, 2).reshape(rows, -1, tokens, dim)
    keys, values = (x.reshape(rows, 1, *x.shape[2:]) for x in (joined.keys, joined.values))
    out, lse = library(alone, keys, values, joined.length.reshape(-1))
    out, lse = _tokens_first(out.reshape(batch, heads, tokens, dim), lse.reshape(batch, heads, tokens))
    return out, with_mean(lse, q, joined.key_mean)


def _tokens_first(
    out: Float[Array, "B H T D"], lse: Float[Array, "B H T"]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)


def _joined(layer: LayerCache | HeadGroups, dtype: jnp.dtype) -> LayerCache:
    """All heads of a layer in their order, in slots as many as the largest has, in numbers of this type."""
    if isinstance(layer, LayerCache):
        return _in_type(layer, dtype)
    slots = max(group.capacity for group in layer.groups)
    order = [head for heads in layer.heads for head in heads]
    back = jnp.asarray(sorted(range(len(order)), key=order.__getitem__))
    parts = [_in_type(group, dtype) for group in layer.groups]

    def join(*each: Array) -> Array:
        wide = [pad_slots(x, slots) if x.ndim > 2 and x.shape[2] > 1 else x for x in each]
        return jnp.concatenate(wide, axis=1)[:, back]

    return jax.tree.map(join, *parts)


def _in_type(group: LayerCache, dtype: jnp.dtype) -> LayerCache:
    def numbers(x: Array | Quantised) -> Array:
        return dequantised(x).astype(dtype) if isinstance(x, Quantised) else x

    return LayerCache(numbers(group.keys), numbers(group.values), group.degree, group.length, None, group.key_mean)
