"""Any method on bare tensors: no model needed."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.budget import MOST_ROWS, concrete, look_up
from clusterkv_jax.cache import HeadGroups, LayerCache, PagedHeads
from clusterkv_jax.methods.base import Method, Request
from clusterkv_jax.models.config import Rope
from clusterkv_jax.pages import unpaged


def compress(
    method: Method,
    queries: Float[Array, "B H N D"] | None,
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    lengths: Int[Array, " B"] | None = None,
    layer: int = 0,
    num_layers: int = 1,
    max_new_tokens: int = 0,
    key: Array | None = None,
) -> LayerCache | HeadGroups:
    """Compress one layer's prompt as `prefill` does, with room for `max_new_tokens` more tokens.

    Methods that rotate keys take them for those of the default RoPE (base 10,000, all of D, halves). Heads that would
    share pages after `prefill` come with as many slots each as any of them could need.

    Args:
        method: what to keep.
        queries: post-RoPE queries; methods without scores take None.
        keys: post-RoPE keys.
        values: values.
        lengths: real tokens of each row, N by default; what lies beyond never matters.
        layer: number of this layer, 0 ... num_layers - 1.
        num_layers: layers of the model, for methods that treat them differently.
        max_new_tokens: tokens that will be appended; counts in budgets of base "prompt+new".
        key: PRNG key of methods that draw; that of seed 0 by default.

    Returns:
        the layer's cache with positions; HeadGroups where heads have different capacities.

    Raises:
        ValueError: if shapes, lengths or layer do not fit, or a budget is impossible for one of the lengths.
    """
    batch, kv_heads, tokens, _ = keys.shape
    if keys.shape != values.shape:
        raise ValueError(f"keys and values must have the same shape, got {keys.shape} and {values.shape}.")
    if tokens == 0:
        raise ValueError("there is nothing to compress: keys have no tokens.")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be between 0 and {num_layers - 1}, got {layer}.")
    # Given lengths do not shape the program, so that other lengths reuse it.
    occurring = np.asarray([tokens]) if lengths is None else np.arange(1, tokens + 1)
    counts = np.full(batch, tokens) if lengths is None else lengths
    known = concrete(counts)
    if known is not None and (known.shape != (batch,) or known.min() < 1 or known.max() > tokens):
        raise ValueError(f"lengths must be {batch} numbers between 1 and {tokens}, got {known.tolist()}.")
    row_bytes = keys.shape[-1] * (keys.dtype.itemsize + values.dtype.itemsize) + 4
    request = Request(
        occurring,
        num_layers,
        kv_heads,
        max_new_tokens,
        reserve=max_new_tokens,
        row_bytes=row_bytes,
        rope=Rope(1e4, keys.shape[-1]),
    )
    method.check(known.tolist() if known is not None else [], request)
    plan = method.plan(layer, request)
    if known is not None:
        plan = replace(plan, rounds=method.rounds(layer, replace(request, lengths=known)))
    rows = request_rows(method, counts, layer, request)
    key = jax.random.fold_in(jax.random.key(0) if key is None else key, layer)
    counts = jnp.asarray(counts, jnp.int32)
    return _compress(method, queries, keys, values, counts, rows, plan, key, tokens + max_new_tokens)


@partial(jax.jit, static_argnums=(0, 6, 8))
def _compress(method, queries, keys, values, lengths, rows, plan, key, most):
    layer = method.compress(queries, keys, values, lengths, rows, plan, key)[0]
    return unpaged(layer, min(most, layer.degree[0].size)) if isinstance(layer, PagedHeads) else layer


def request_rows(
    method: Method, lengths: Int[Array, " B"] | np.ndarray, layer: int, request: Request
) -> Int[Array, "B groups"]:
    """B of each prompt and group of the layer's heads, as device numbers that were computed on the host."""
    known = concrete(lengths)
    at = np.arange(request.longest + 1) if known is None else known
    table = [method.rows(at, request, layer, heads[0]) for heads in method.head_groups(layer, request)]
    rows = np.minimum(np.stack(table, axis=1), MOST_ROWS)  # beyond any cache, with room to add an interval
    if known is not None:
        return jnp.asarray(rows, jnp.int32)
    # Lengths that are traced cannot be checked: every head keeps at least what it must.
    return look_up(np.maximum(rows, method.fewest_rows), lengths)
