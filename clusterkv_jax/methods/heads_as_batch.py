"""Heads of unequal budgets as sequences of their own: a method brings all of a layer to their budgets in one program.

    budgets 5 1 2 of three heads, two sequences: a method is given six sequences of one head

    groups       [2,1,6,D]  [2,1,2,D]  [2,1,3,D]      each head in slots of its own number
    copies       [2,3,8,D]                            in equal slots, side by side
    sequences    [6,1,8,D]                            as a method sees them, with the budgets [6]

A program for each group would compile as many times as a model has heads. What is remembered of a head comes along.
A generated token enters all groups at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from clusterkv_jax.cache.attention import join_heads, with_mean, with_sinks
from clusterkv_jax.cache.layers import (
    HeadGroups,
    LayerCache,
    State,
    StepInputs,
    group_heads,
    groups,
    pad_slots,
    quantised,
    resize,
    select_heads,
)
from clusterkv_jax.kernels.gpu import power_of_two
from clusterkv_jax.kernels.quantised import as_stored
from clusterkv_jax.kernels.step_in_groups import step_in_groups
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.request import LayerPlan
from clusterkv_jax.runtime.dispatch import traits
from clusterkv_jax.runtime.sharding import on_one_device, over_heads, slot_ways

OF_SLOTS = ("scores",)  # what is remembered of each row, beside it
BYTES_AT_ONCE = 2**30  # of copies of heads, while decoding

# What is remembered of each head of each sequence: [B,K] of numbers of a sequence, else [B,K,n,...].
ByHead = dict[str, Shaped[Array, "B K ..."]]


def alone(x: Shaped[Array, "B heads ..."], kv_heads: int) -> Shaped[Array, "BK heads_each ..."]:
    """The heads that belong to a KV head, for each KV head as a sequence of its own."""
    return x.reshape(x.shape[0] * kv_heads, -1, *x.shape[2:])


def together(cache: Any, state: State | None, kv_heads: int) -> tuple[LayerCache, ByHead]:
    """What a method left of sequences that are heads, as heads again."""
    cache = jax.tree.map(lambda x: x.reshape(-1, kv_heads, *x.shape[2:]), cache)
    return cache, {name: x.reshape(-1, kv_heads, *x.shape[1:]) for name, x in (state or {}).items()}


def remembered_alone(state: ByHead) -> State:
    """What is remembered of heads, as of sequences."""
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in state.items()}


def grouped(
    method: Method, plan: LayerPlan, cache: LayerCache, group_state: ByHead
) -> tuple[HeadGroups, tuple[State | None, ...]]:
    """A layer's heads after the prompt, in groups of equal budgets."""
    caches, state = [], []
    for group in plan.groups:
        rows = resize(select_heads(cache, group.heads), group.capacity)
        mine = {name: x[:, jnp.asarray(group.heads)] for name, x in group_state.items()}
        caches.append(quantised(rows, method.cache_dtype, less_mean=not group.soft_capped))
        state.append(None if group.keep_all else _of_group(mine, group.capacity) or None)
    return HeadGroups(tuple(caches), plan.heads), tuple(state)


def copies(layer: Any, state: Sequence[Any], which: Sequence[int]) -> tuple[LayerCache, ByHead]:
    """The heads of these groups side by side, in equal slots."""
    # Layers whose largest heads differ little have copies of the same size, and so one program.
    slots = power_of_two(max(layer.groups[i].capacity for i in which))
    parts = [(resize(layer.groups[i], slots), _of_heads(state[i], len(layer.heads[i]), slots)) for i in which]
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *parts)


def put_back(
    layer: Any, state: Sequence[Any], which: Sequence[int], cache: LayerCache, group_state: ByHead
) -> tuple[HeadGroups, tuple[State | None, ...]]:
    """The layer with what `copies` has become in these groups."""
    held, states = list(layer.groups), list(state)
    counts = [len(layer.heads[i]) for i in which]
    for i, end, count in zip(which, np.cumsum(counts).tolist(), counts, strict=True):
        mine, remembered = jax.tree.map(lambda x, part=slice(end - count, end): x[:, part], (cache, group_state))
        states[i] = _of_group(remembered, held[i].capacity)
        held[i] = resize(mine, held[i].capacity)
    return replace(layer, groups=tuple(held)), tuple(states)


def can_fuse_step(method: Method, layer: Any, state: Sequence[State | None], count: int) -> bool:
    """Whether it is one token, which enters every group by `append_and_attend`, all rows of a head on one device.

    A layer without groups is one for a GPU alone, to which it saves the copy of what its heads hold. The kernel reads
    degrees as they are stored.
    """
    plain = method.degree_power == 1 and (
        type(method).step is Method.step or all(group_state is None for group_state in state)
    )
    if isinstance(layer, LayerCache):
        serves = traits().host_driven and slot_ways(layer.keys.shape[1]) == 1
    else:
        serves = isinstance(layer, HeadGroups) and on_one_device()
    return serves and plain and count == 1


def step(
    layer: Any, state: Sequence[State | None], tokens: StepInputs
) -> tuple[Float[Array, "B 1 H D"], HeadGroups | LayerCache, tuple[State | None, ...]]:
    """`append_and_attend` of all groups at once: on a GPU in two launches, where one group would take three."""
    held, heads = groups(layer), group_heads(layer)

    def of_heads(x):
        return jnp.swapaxes(x, 1, 2)

    mean = None
    if held[0].key_mean is not None:
        mean = of_heads(join_heads([of_heads(group.key_mean) for group in held], heads))
    keys = as_stored(of_heads(tokens.k), held[0].keys, mean)
    values = as_stored(of_heads(tokens.v), held[0].values)
    scores = None if tokens.scores is None else of_heads(tokens.scores)
    buffers, lengths = of_groups(layer, state)

    def enter(q: Array, keys: Any, values: Any, positions: Array, real: Array, *others: Any) -> Any:
        mine = heads if isinstance(layer, HeadGroups) else (tuple(range(keys.shape[1])),)
        token = of_heads(q), keys, values, positions[:, 0], real[:, 0]
        out, lse, *after = step_in_groups(*token, *others, heads=mine, soft_cap=tokens.soft_cap)
        return of_heads(out), of_heads(lse), *after

    # Positions and `real` are the same for all heads: they get a head axis of size 1, which no mesh splits.
    token = of_heads(tokens.q), keys, values, tokens.positions[:, None], tokens.real[:, None], scores
    run = enter if on_one_device() else partial(over_heads, enter)
    out, lse, after, longer = run(*token, buffers, lengths)
    attended = with_sinks((of_heads(out), with_mean(of_heads(lse), tokens.q, mean)), tokens.sink_logits)
    return attended, *put_in_groups(layer, state, after, longer)


def of_groups(layer: Any, state: Sequence[State | None]) -> tuple[tuple[Any, ...], tuple[Array, ...]]:
    """The arrays of each group, with the scores of its rows, and what its heads hold."""
    beside = [None if group_state is None else group_state.get("scores") for group_state in state]
    buffers = tuple(
        (group.keys, group.values, group.degree, group.positions, of_rows)
        for group, of_rows in zip(groups(layer), beside, strict=True)
    )
    return buffers, tuple(group.length for group in groups(layer))


def put_in_groups(
    layer: Any, state: Sequence[State | None], buffers: Sequence[Any], lengths: Sequence[Array]
) -> tuple[HeadGroups | LayerCache, tuple[State | None, ...]]:
    """The layer and what is remembered of it, with arrays as `of_groups` gives them."""
    caches = tuple(
        LayerCache(keys, values, degree, length, positions, group.key_mean)
        for group, (keys, values, degree, positions, _), length in zip(groups(layer), buffers, lengths, strict=True)
    )
    states = tuple(
        group_state if of_rows is None or group_state is None else group_state | {"scores": of_rows}
        for group_state, (*_, of_rows) in zip(state, buffers, strict=True)
    )
    layer = replace(layer, groups=caches) if isinstance(layer, HeadGroups) else caches[0]
    return layer, states


def in_turns(function: Callable[[Any], Any], tree: Any, most_bytes: int = BYTES_AT_ONCE) -> Any:
    """A function of arrays [B, ...], of as many sequences at a time as have so many bytes, at least of one."""
    leaves = jax.tree.leaves(tree)
    batch = leaves[0].shape[0]
    size = sum(x.size * x.dtype.itemsize for x in leaves) // batch
    at_once = max(n for n in range(1, batch + 1) if batch % n == 0 and n * size <= max(size, most_bytes))
    if at_once == batch:
        return function(tree)
    turns = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), tree)
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), jax.lax.map(function, turns))


def _of_group(state: ByHead, capacity: int) -> State:
    """What is remembered of heads, as of a group: a number of a sequence is the same for all of its heads."""
    joined = {name: x[:, 0] if x.ndim == 2 else x.reshape(len(x), -1, *x.shape[3:]) for name, x in state.items()}
    return _in_slots(joined, capacity)


def _of_heads(state: State, heads: int, capacity: int) -> ByHead:
    """What is remembered of a group of so many heads, as of each of them."""

    def of_each(x: Array) -> Array:
        if x.ndim == 1:
            return jnp.broadcast_to(x[:, None], (len(x), heads))
        return x.reshape(len(x), heads, -1, *x.shape[2:])

    return {name: of_each(x) for name, x in _in_slots(state, capacity).items()}


def _in_slots(state: State, capacity: int) -> State:
    return {name: pad_slots(x, capacity) if name in OF_SLOTS else x for name, x in state.items()}
