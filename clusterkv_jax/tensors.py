"""Any method on bare tensors: a layer's compressed cache, the index of a recall method, and what it selects."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.budget import MOST_ROWS, Budget
from clusterkv_jax.cache.kinds import side_by_side
from clusterkv_jax.cache.layers import HeadGroups, LayerCache, from_tokens
from clusterkv_jax.methods.base import Method, Rows
from clusterkv_jax.methods.budgets import head_rows
from clusterkv_jax.methods.driver import LayerPrompt, compress_layer
from clusterkv_jax.methods.families.recall import Index, Recall
from clusterkv_jax.methods.plan import plan_layer, rows_of_request
from clusterkv_jax.methods.request import LayerPlan, request_of_tensors
from clusterkv_jax.presets import as_method
from clusterkv_jax.runtime.checks import (
    check_array,
    check_counts,
    check_key,
    check_keys,
    check_lengths,
    check_queries,
    largest,
    refuse_unsound,
    sound,
)
from clusterkv_jax.runtime.errors import shown
from clusterkv_jax.runtime.prng import own_key
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.settings import own_settings

# As of models.
MOST_LAYERS = 1024


@own_settings()
def compress(
    method: Method | str,
    queries: Float[Array, "B H N D"] | None,
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    layer: int = 0,
    num_layers: int = 1,
    max_new_tokens: int = 0,
    key: Array | None = None,
    *,
    hidden: Float[Array, "B N M"] | None = None,
    scores: Float[Array, "B K N"] | None = None,
    ratio: float | None = None,
    tokens: int | None = None,
    budget: Budget | None = None,
) -> LayerCache | HeadGroups:
    """Compress one layer's prompt as `prefill` does, with room for `max_new_tokens` more tokens.

    Methods that rotate keys take them for those of the default RoPE (base 10,000, all of D, halves). Heads that would
    share pages after `prefill` come with as many slots each as any of them could need.

    Args:
        method: what to keep, by name or as an object.
        queries: post-RoPE queries; methods without scores take None.
        keys: post-RoPE keys.
        values: values.
        lengths: real tokens of each row, N by default; what lies beyond never matters.
        layer: number of this layer, 0 ... num_layers - 1.
        num_layers: layers of the model, for methods that treat them differently.
        max_new_tokens: tokens that will be appended; counts in budgets of base "prompt+new".
        key: PRNG key of methods that draw; that of seed 0 by default.
        hidden: what enters the layer's attention (after its input norm), for methods that look at it.
        scores: what each row is worth, more is more, for methods that keep rows by learned scores: those of
            `learned.surrogate`, or any others.
        ratio: the share of the cache that a method of a name keeps.
        tokens: or how many rows.
        budget: or any budget.

    Returns:
        the layer's cache with positions; HeadGroups where heads have different capacities.

    Raises:
        ValueError: if shapes, types, lengths or layer do not fit, a budget is impossible for one of the lengths, or a
            number before `lengths` is not finite, or too large to be squared where it is no score. Under a jit that
            traces them, lengths and numbers cannot be checked.
    """
    kept: Any = method
    if isinstance(method, str) or any(x is not None for x in (ratio, tokens, budget)):
        kept = as_method(method, budget=budget, ratio=ratio, tokens=tokens, learned=scores is not None)
    if not hasattr(type(kept), "budget_rows"):
        raise ValueError(f"method must be an object such as CentroidKV(Budget(ratio=0.25)), got {shown(method)}.")
    check_keys(keys, values)
    batch, kv_heads, rows, dim = keys.shape
    if queries is not None:
        check_queries("queries", queries, batch, kv_heads, rows, dim)
    if hidden is not None:
        _check_hidden(hidden, batch, rows)
    if scores is not None:
        check_array("scores", scores, "B,K,N")
        if scores.shape != keys.shape[:3]:
            raise ValueError(f"scores must have the shape [{batch},{kv_heads},{rows}], got {scores.shape}.")
    check_counts(0, layer=layer, max_new_tokens=max_new_tokens)
    check_counts(1, MOST_LAYERS, num_layers=num_layers)
    check_key(key)
    if layer >= num_layers:
        raise ValueError(f"layer must be between 0 and {num_layers - 1}, got {layer}.")
    # The lengths do not shape the program, so that other lengths reuse it.
    occurring = np.asarray([rows]) if lengths is None else np.arange(1, rows + 1)
    counts = np.full(batch, rows) if lengths is None else lengths
    numbers = check_lengths(counts, batch, rows)
    request = request_of_tensors(keys, values, occurring, num_layers, max_new_tokens, stored=kept.cache_dtype)
    kept.check(np.empty(0, np.int64) if numbers is None else numbers.astype(np.int64), request)
    plan = replace(plan_layer(kept, layer, request), by_head=None)  # heads of equal budgets come in arrays of their own
    if not plan.selects:  # there is no earlier layer whose selection could be reused
        plan = replace(plan, inputs=kept.inputs(0))
    budgets = rows_of_request(kept, plan, counts, layer, request)
    key = jax.random.fold_in(own_key(key), layer)
    prompt = LayerPrompt(queries, keys, values, jnp.asarray(counts, jnp.int32), hidden, scores)
    cache, found = _compress(kept, prompt, budgets, plan, key, rows + max_new_tokens)
    arrays = {"queries": queries, "keys": keys, "values": values, "hidden": hidden, "scores": scores}
    refuse_unsound(found, numbers, arrays)
    return cache


@jit(static_argnames=("method", "plan", "most"))
def _compress(
    method: Method,
    prompt: LayerPrompt,
    budgets: Int[Array | np.ndarray, "B groups stages"],
    plan: LayerPlan,
    key: Array,
    most: int,
) -> tuple[LayerCache | HeadGroups, dict[str, Bool[Array, ""]]]:
    """The layer's cache, and which of the prompt's arrays are sound: in one program they are read once."""
    layer: Any = compress_layer(method, prompt, budgets, plan, key)[0]
    hidden = None if prompt.hidden is None else prompt.hidden[:, None]
    scores = None if prompt.scores is None else prompt.scores[..., None]
    arrays = {"queries": prompt.queries, "keys": prompt.keys, "values": prompt.values, "hidden": hidden}
    arrays |= {"scores": scores}
    found = {name: sound(x, prompt.lengths, largest(name)) for name, x in arrays.items() if x is not None}
    return side_by_side(layer, most), found


def _check_hidden(hidden: Any, batch: int, tokens: int) -> None:
    check_array("hidden", hidden, "B,N,M")
    if hidden.shape[:2] != (batch, tokens):
        raise ValueError(f"hidden must have the shape [{batch},{tokens},M], got {hidden.shape}.")


@own_settings()
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
        ValueError: if shapes or types do not fit, the budget is impossible, an argument belongs to another method, or a
            number that is known is not finite, or too large to be squared.
    """
    if getattr(method, "forgets", True):
        raise ValueError(f"method must be one that recalls (ClusterKV, Quest, InfiniGen), got {shown(method)}.")
    check_keys(keys, values)
    batch, kv_heads, tokens, dim = keys.shape
    if queries is not None:
        check_queries("queries", queries, batch, kv_heads, tokens, dim)
    check_key(key)
    options: dict[str, Any] = {}
    for name, value, owner in (("initial_rows", initial_rows, "ClusterKV"), ("skew", skew, "InfiniGen")):
        if value is not None and name not in method.options:
            raise ValueError(f"{type(method).__name__} takes no {name}; {owner} does.")
        options |= {} if value is None else {name: value}
    request = request_of_tensors(keys, values, np.asarray([tokens]), 1, 0)
    method.check(request.lengths, request)
    rows = int(head_rows(method.budget, request.lengths, 0, request)[0, 0])
    count = method.most_recalled(tokens if rows >= MOST_ROWS else rows)
    key = own_key(key)
    index, found = _build(method, count, keys, values, queries, min(rows, MOST_ROWS), key, options)
    refuse_unsound(found, None, {"queries": queries, "keys": keys, "values": values})
    return index


@jit(static_argnames=("method", "count"))
def _build(
    method: Recall,
    count: int,
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    queries: Float[Array, "B H N D"] | None,
    rows: int | Int[Array, ""],
    key: Array,
    options: dict[str, Array],
) -> tuple[Index, dict[str, Bool[Array, ""]]]:
    batch, _, tokens, _ = keys.shape
    lengths = jnp.full(batch, tokens, jnp.int32)
    prompt = from_tokens(keys, values, lengths)
    group = Rows(prompt, jnp.full(batch, rows, jnp.int32), lengths, {}, queries, key=key)
    arrays = {"queries": queries, "keys": keys, "values": values}
    found = {name: sound(x, lengths) for name, x in arrays.items() if x is not None}
    return method.index(group, count, 0, **options), found


@own_settings()
def select(method: Recall, index: Index, query: Float[Array | np.ndarray, "B H D"]) -> Int[Array, "B H budget"]:
    """The positions that a query per head attends to, by the index alone; -1 where there are fewer than the budget.

    ClusterKV: its sinks, then cluster after cluster. Quest: the newest page, then page after page. While decoding, the
    rows that are not indexed yet come on top.

    Raises:
        ValueError: if the index is of another method, or the query's shape does not fit; if its numbers are known, of a
            query that is not finite.
    """
    if getattr(method, "forgets", True):
        raise ValueError(f"method must be one that recalls (ClusterKV, Quest, InfiniGen), got {shown(method)}.")
    check_array("query", query, "B,H,D")
    with _index_of(method, index):
        sizes = (*index["recalled"].shape[:2], method.dim(index) or query.shape[-1])
    check_queries("query", query, *sizes)
    with _index_of(method, index):
        rows, fine = _select(method, index, jnp.asarray(query))
    refuse_unsound({"query": fine}, None, {"query": query})
    return rows


@jit(static_argnames=("method",))
def _select(
    method: Recall, index: Index, query: Float[Array, "B H D"]
) -> tuple[Int[Array, "B H budget"], Bool[Array, ""]]:
    batch, kv_heads = index["recalled"].shape[:2]
    grouped = jnp.reshape(query, (batch, kv_heads, -1, query.shape[-1]))
    rows = method.attended(index, grouped)
    rows = jnp.broadcast_to(rows, (*grouped.shape[:3], rows.shape[-1])).reshape(*query.shape[:2], -1)
    return rows, sound(jnp.expand_dims(query, 2), jnp.ones(batch, jnp.int32))


@contextmanager
def _index_of(method: Recall, index: Any) -> Iterator[None]:
    """Whatever fails in the block fails because the index is none of the method's."""
    try:
        if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in index.values()):
            raise TypeError("Complex numbers are in no index.")
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        arrays = isinstance(index, dict) and {name: np.shape(x) for name, x in index.items() if hasattr(x, "shape")}
        name = type(method).__name__
        raise ValueError(f"index must be what build_index makes for {name}, got {shown(arrays or index)}.") from error
