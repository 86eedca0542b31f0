"""Heads of unequal budgets as sequences of their own: a method brings all of a layer to their budgets in one program.

    budgets 5 1 2 of three heads, two sequences: a method is given six sequences of one head

    pages        [2,P,S,D]     each head in slots of its own number (`pages`)
    copies       [2,3,8,D]     in equal slots, side by side
    sequences    [6,1,8,D]     as a method sees them, with the budgets [6]

A program for each budget would compile as many times as a model has heads. What is remembered of a head comes along.
On a GPU a generated token enters a layer's heads and attends to them in two launches.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.cache import pages
from clusterkv_jax.cache.attention import join_heads, with_mean, with_sinks
from clusterkv_jax.cache.kinds import first_pages, group_arrays, head_slots, with_groups
from clusterkv_jax.cache.layers import (
    HeadGroups,
    LayerCache,
    PagedHeads,
    State,
    StepInputs,
    group_heads,
    groups,
    pad_slots,
    quantised,
    resize,
)
from clusterkv_jax.kernels.quantised import as_stored
from clusterkv_jax.kernels.step_in_groups import step_in_groups
from clusterkv_jax.methods.base import Method, Rows
from clusterkv_jax.methods.request import GroupPlan, PagePlan
from clusterkv_jax.runtime.dispatch import traits
from clusterkv_jax.runtime.sharding import on_one_device, over_heads, slot_ways

OF_SLOTS = ("scores",)  # what is remembered of each row, beside it
BYTES_AT_ONCE = 2**30  # of copies of heads, while decoding
WHOLE = {"budget": MOST_ROWS, "due": MOST_ROWS}  # of heads that keep every row

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


def to_pages(
    method: Method, plan: GroupPlan, cache: LayerCache, state: ByHead, first: Int[Array | np.ndarray, " K"], page: int
) -> tuple[PagedHeads, tuple[State | None, ...]]:
    """A layer's heads after the prompt, each from its `first` page on, in pages of `page` slots.

    There are as many pages as all slots that the heads come in would take: the program is the same for all layers.
    """
    rows = quantised(cache, method.cache_dtype, less_mean=not plan.soft_capped)
    most = cache.length.shape[1] * -(-cache.capacity // page)
    layer = pages.from_heads(rows, jnp.broadcast_to(jnp.asarray(first), cache.length.shape), most, page)
    return layer, (_of_layer(state, layer) or None,)


def cut(layer: PagedHeads, state: tuple[State | None, ...], count: int) -> tuple[PagedHeads, tuple[State | None, ...]]:
    """The same in so many pages, with empty ones behind those there are."""
    (group_state,) = state

    def fit(x):
        return pad_slots(x[:, None], count)[:, 0]

    keys, values, degree, positions = jax.tree.map(fit, (layer.keys, layer.values, layer.degree, layer.positions))
    layer = replace(layer, keys=keys, values=values, degree=degree, positions=positions)
    return layer, (group_state and {name: fit(x) if name in OF_SLOTS else x for name, x in group_state.items()},)


def copies(layer: PagedHeads, state: State) -> tuple[LayerCache, ByHead]:
    """The heads of a layer side by side, in equal slots."""
    slots, heads = pages.most_slots(layer), layer.length.shape[1]
    assert slots is not None

    def of_heads(name: str, x: Array) -> Array:
        if name in OF_SLOTS:
            return pages.numbers_of_heads(x, layer, slots)[:, :, None]
        return x if x.ndim == 2 else x.reshape(len(x), heads, -1, *x.shape[2:])

    return pages.from_pages(layer, slots), {name: of_heads(name, x) for name, x in state.items()}


def repaged(layer: Any, state: tuple[State | None, ...], pool: PagePlan) -> tuple[PagedHeads, tuple[State | None, ...]]:
    """The same rows in the pages of another plan; the caller looks whether its heads have room for them.

    Files from before there were pages have heads of equal budgets in arrays of their own.
    """
    layer, state = moved_to_pages(layer, state, np.asarray(pool.first, np.int32), pool.count, pool.slots)
    return replace(layer, head_slots=pool.head_slots), state


def moved_to_pages(
    layer: Any, state: tuple[State | None, ...], first: Int[Array | np.ndarray, " K"], count: int, page: int
) -> tuple[PagedHeads, tuple[State | None, ...]]:
    """`repaged` into `count` pages of `page` slots, each head from its `first` on, without the slots of each head."""
    cache, of_heads = _side_by_side(layer, state) if head_slots(layer) is None else copies(layer, state[0] or {})
    after = pages.from_heads(cache, jnp.broadcast_to(jnp.asarray(first), cache.length.shape), count, page)
    return after, (_of_layer(of_heads, after) or None,)


def remembered(
    method: Method,
    plan: GroupPlan,
    layer: PagedHeads,
    state: State,
    budgets: Int[Array, "B K"],
    shares: Float[Array | np.ndarray, " K"],
    position: Int[Array, " B"],
) -> State:
    """What a method remembers of heads whose budgets have changed."""
    heads = layer.length.shape[1]
    cache, before = copies(layer, state)
    cache = jax.tree.map(partial(alone, kv_heads=heads), cache)
    share = jnp.broadcast_to(jnp.asarray(shares), budgets.shape).reshape(-1)
    known: Any = {"budget_share": share, "plan": plan}
    rows = Rows(cache, budgets.reshape(-1), jnp.repeat(position, heads), remembered_alone(before), **known)
    return state | _of_layer(together(cache, method.init_state(rows), heads)[1], layer)


def put_back(layer: PagedHeads, cache: LayerCache, state: ByHead) -> tuple[PagedHeads, State]:
    """The layer with what its `copies` have become."""
    after = pages.from_heads(cache, layer.first, *layer.degree.shape[1:])
    after = replace(after, key_mean=layer.key_mean, head_slots=layer.head_slots)
    return after, _of_layer(state, after)


def can_fuse_step(method: Method, layer: Any, state: Sequence[State | None], count: int) -> bool:
    """Whether it is one token, which enters every group by `append_and_attend`, all rows of a head on one device.

    Pages are one for a GPU alone, and so is a layer without groups, to which it saves the copy of what its heads hold.
    """
    plain = type(method).step is Method.step or all(group_state is None for group_state in state)
    if group_arrays(layer) is not None:
        serves = on_one_device()
    else:
        one_device = slot_ways(layer.length.shape[1]) == 1 if first_pages(layer) is None else on_one_device()
        serves = traits().host_driven and one_device
    return serves and plain and count == 1


def step(
    layer: Any, state: Sequence[State | None], tokens: StepInputs
) -> tuple[Float[Array, "B 1 H D"], Any, tuple[State | None, ...]]:
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

    first = first_pages(layer)
    largest = None if first is None else pages.most_slots(layer)

    def enter(q: Array, keys: Any, values: Any, positions: Array, real: Array, *others: Any) -> Any:
        mine = group_arrays(layer) or (tuple(range(keys.shape[1])),)
        token = of_heads(q), keys, values, positions[:, 0], real[:, 0]
        options: Any = {"first": first, "heads": mine, "largest": largest, "soft_cap": tokens.soft_cap}
        options["degree_power"] = tokens.degree_power
        out, lse, *after = step_in_groups(*token, *others, **options)
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
) -> tuple[Any, tuple[State | None, ...]]:
    """The layer and what is remembered of it, with arrays as `of_groups` gives them."""
    caches = tuple(
        replace(group, keys=keys, values=values, degree=degree, length=length, positions=positions)
        for group, (keys, values, degree, positions, _), length in zip(groups(layer), buffers, lengths, strict=True)
    )
    states = tuple(
        group_state if of_rows is None or group_state is None else group_state | {"scores": of_rows}
        for group_state, (*_, of_rows) in zip(state, buffers, strict=True)
    )
    return with_groups(layer, caches), states


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


def _side_by_side(layer: LayerCache | HeadGroups, state: tuple[State | None, ...]) -> tuple[LayerCache, ByHead]:
    """`copies` of heads in groups. Of what stays whole nothing is remembered: it is never due."""
    held, order = groups(layer), np.argsort([head for heads in group_heads(layer) for head in heads])
    slots = max(group.capacity for group in held)

    def of_heads(group_state: State, group: LayerCache) -> ByHead:
        each = {name: pad_slots(x, slots) if name in OF_SLOTS else x for name, x in group_state.items()}
        shape = group.length.shape
        return {
            name: jnp.broadcast_to(x[:, None], shape) if x.ndim == 1 else x.reshape(*shape, -1, *x.shape[2:])
            for name, x in each.items()
        }

    known = [of_heads(group_state or {}, group) for group_state, group in zip(state, held, strict=True)]
    kinds = {name: x for group_state in known for name, x in group_state.items()}
    parts = [
        {
            name: group_state.get(name, jnp.full((*group.length.shape, *x.shape[2:]), WHOLE.get(name, 0), x.dtype))
            for name, x in kinds.items()
        }
        for group_state, group in zip(known, held, strict=True)
    ]
    caches = [resize(group, slots) for group in held]
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis=1)[:, order], *zip(caches, parts, strict=True))


def _of_layer(state: ByHead, layer: PagedHeads) -> State:
    """What is remembered of heads, as of the layer."""

    def joined(name: str, x: Array) -> Array:
        if name in OF_SLOTS:
            return pages.numbers_in_pages(x[:, :, 0], layer)
        return x if x.ndim == 2 else x.reshape(len(x), -1, *x.shape[3:])

    return {name: joined(name, x) for name, x in state.items()}
