"""The index of a recall method on bare tensors, and what it selects: no model needed."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.cache import from_tokens
from clusterkv_jax.methods.clusterkv import ClusterKV
from clusterkv_jax.methods.infinigen import InfiniGen
from clusterkv_jax.methods.recall import Index, Recall
from clusterkv_jax.methods.request import Request


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
