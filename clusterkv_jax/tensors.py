"""Any method on bare tensors: a layer's compressed cache, the index of a recall method, and what it selects."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.budget import MOST_ROWS, concrete
from clusterkv_jax.cache import HeadGroups, LayerCache, PagedHeads, from_tokens
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.clusterkv import ClusterKV
from clusterkv_jax.methods.families.recall import Index, Recall
from clusterkv_jax.methods.infinigen import InfiniGen
from clusterkv_jax.methods.request import Request, request_rows
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


def build_index(
    method: Recall,
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    key: Array | None = None,
    *,
    queries: Float[Array, "B H N D"] | None = None,
    initial_rows: Int[Array, " C"] | None = None,
    skew: Float[Array, "B K D D"] | None = None,
) -> Index:
    """What a recall method remembers of a prompt to choose its rows by.

    Args:
        method: `ClusterKV`, `Quest` or `InfiniGen`.
        keys: post-RoPE keys.
        values: of these keys; no method looks at them.
        key: PRNG key of methods that draw; that of seed 0 by default.
        queries: the prompt's, by which `InfiniGen` finds its columns; its keys by default.
        initial_rows: the rows of the prompt that the clusters of `ClusterKV` start from; random ones by default.
        skew: orthogonal, applied by `InfiniGen` to queries and keys; that of the queries by default.

    Returns:
        arrays by name, for `select`. Of ClusterKV: `centroids` [B,K,C,D] in the dtype of the keys and `sizes` [B,K,C];
        the rows of cluster c are `order[starts[c] : starts[c] + sizes[c]]`.

    Raises:
        ValueError: if shapes do not fit, the budget is impossible, or an argument belongs to another method.
    """
    _, kv_heads, tokens, dim = keys.shape
    if keys.shape != values.shape:
        raise ValueError(f"keys and values must have the same shape, got {keys.shape} and {values.shape}.")
    if tokens == 0:
        raise ValueError("there is nothing to index: keys have no tokens.")
    if not isinstance(method, Recall):
        raise ValueError(f"method must be one that recalls (ClusterKV, Quest, InfiniGen), got {method!r}.")
    given: dict[str, Any] = {}
    for name, value, owner in (("initial_rows", initial_rows, ClusterKV), ("skew", skew, InfiniGen)):
        if value is not None and not isinstance(method, owner):
            raise ValueError(f"{type(method).__name__} takes no {name}; {owner.__name__} does.")
        given |= {} if value is None else {name: value}
    request = Request(
        np.asarray([tokens]), 1, kv_heads, row_bytes=dim * (keys.dtype.itemsize + values.dtype.itemsize) + 4
    )
    method.check([tokens], request)
    rows = int(method.rows(request.lengths, request)[0])
    count = method.most_recalled(tokens if rows >= MOST_ROWS else rows)
    return _build(method, count, keys, values, queries, rows, jax.random.key(0) if key is None else key, given)


@partial(jax.jit, static_argnums=(0, 1))
def _build(
    method: Recall,
    count: int,
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    queries: Float[Array, "B H N D"] | None,
    rows: Int[Array, ""],
    key: Array,
    given: dict[str, Array],
) -> Index:
    batch, _, tokens, _ = keys.shape
    prompt = from_tokens(keys, values, jnp.full(batch, tokens, jnp.int32))
    return method.index(prompt, queries, jnp.full(batch, rows, jnp.int32), count, 0, key, **given)


@partial(jax.jit, static_argnums=0)
def select(method: Recall, index: Index, query: Float[Array, "B H D"]) -> Int[Array, "B H budget"]:
    """The positions that a query per head attends to, by the index alone; -1 where there are fewer than the budget.

    ClusterKV: its sinks, then cluster after cluster. While decoding, the rows that are not indexed yet come on top.
    """
    batch, kv_heads = index["recalled"].shape[:2]
    grouped = query.reshape(batch, kv_heads, -1, query.shape[-1])
    rows = method.choose(index, grouped)
    return jnp.broadcast_to(rows, (*grouped.shape[:3], rows.shape[-1])).reshape(*query.shape[:2], -1)
