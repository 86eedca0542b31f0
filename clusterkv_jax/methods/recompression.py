"""When sequences are due, and their way back to the budget: in a program, or between two.

    due, steps_until_due  one condition for all layers
    recompress            for use in a jit
    recompress_late       the host calls a few small programs, which layers share

Within a program each layer is compiled anew, and a model of thirty layers takes minutes. Between two, heads in pages
are copied side by side and put back by a program for each number of pages; one between them compresses those of all
layers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from clusterkv_jax.blocks.config import Rope
from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.cache.kinds import (
    alike,
    as_it_was,
    head_slots,
    is_compressible,
    rows_by_head,
    rows_held,
    with_groups,
)
from clusterkv_jax.cache.layers import Group, KVCache, Layer, LayerCache, PagedHeads, State, groups
from clusterkv_jax.methods import heads_as_batch
from clusterkv_jax.methods.base import Compressed, Method, Rows, compacted
from clusterkv_jax.methods.driver import placed, placed_state
from clusterkv_jax.methods.request import GroupPlan
from clusterkv_jax.methods.sharing import is_by_head
from clusterkv_jax.runtime.control_flow import sequenced
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.sharding import constrain_cache

States = tuple[State | None, ...]


def due(method: Method, cache: KVCache) -> Bool[Array, ""] | None:
    """Scalar: must the cache be compressed now? None, statically, where that never happens while decoding."""
    room = _least_room(cache)
    return jnp.any(jnp.stack([jnp.any(heads <= 0) for heads in room])) if room else None


def steps_until_due(method: Method, cache: KVCache) -> Int[Array, ""] | None:
    """The fewest steps of a token that can make the cache due; none or less where it is. None as in `due`."""
    room = _least_room(cache)
    return jnp.min(jnp.stack([jnp.min(heads) for heads in room])) if room else None


def room_of_sequences(method: Method, cache: KVCache) -> Int[Array, " B"] | None:
    """`steps_until_due` of each sequence."""
    room = _least_room(cache)
    return jnp.min(jnp.stack([jnp.min(heads, axis=1) for heads in room]), axis=0) if room else None


def _least_room(cache: KVCache) -> list[Int[Array, "B heads"]]:
    """The least of all layers, for each number of heads: devices that share heads then tell each other one number, not
    one of each layer.
    """
    room: dict[tuple[int, ...], Int[Array, "B heads"]] = {}
    for layer, state in zip(cache.layers, cache.state, strict=True):
        for heads in _room(layer, state).values():
            room[heads.shape] = jnp.minimum(room[heads.shape], heads) if heads.shape in room else heads
    return list(room.values())


def _room(layer: Layer, state: tuple[State | None, ...]) -> dict[int, Int[Array, "B heads"]]:
    """Rows that each head takes until it is due, of the layer's groups that can ever be; of heads that share a budget
    all at once.

    Every head is asked, though all hold equally many: the first one may be another device's.
    """
    room = {}
    for i, (group, group_state) in enumerate(zip(groups(layer), state, strict=True)):
        if group_state is not None and "due" in group_state:
            room[i] = group_state["due"].reshape(len(group.length), -1) - rows_by_head(group)
    return room


def _through_layers(
    method: Method,
    cache: KVCache,
    ropes: tuple[Rope | None, ...],
    by_head: Callable[..., tuple[Layer, States]],
    by_group: Callable[..., tuple[Layer, States, Any]],
) -> KVCache:
    """Layers that can be due by one of two functions; those that ask for it get what an earlier one selected."""
    layers, states, selection, number = list(cache.layers), list(cache.state), None, -1
    heads_apart = is_by_head(method, sum(map(is_compressible, cache.layers)))
    for i, (layer, state, rope) in enumerate(zip(cache.layers, cache.state, ropes, strict=True)):
        if not is_compressible(layer):
            continue
        number += 1
        if not _is_ever_due(state):
            continue
        if heads_apart and head_slots(layer) is not None:
            layers[i], states[i] = by_head(layer, state, rope)
        else:
            before = selection if "selection" in method.inputs(number) else None
            layers[i], states[i], here = by_group(layer, state, rope, before)
            selection = here if before is None else before
    return replace(cache, layers=tuple(layers), state=tuple(states))


# --- in a program ---


@jax.named_scope("recompress")
def recompress(method: Method, cache: KVCache, ropes: tuple[Rope | None, ...]) -> KVCache:
    """Bring every sequence that is due back to its budget; the others stay as they are, bit for bit.

    `ropes` are the rotations of each layer, for methods that score rows by queries of other positions.
    """
    earlier = jnp.array(False)

    def alone(layer: Any, state: States, rope: Rope | None) -> tuple[PagedHeads, States]:
        nonlocal earlier

        def heads(held: Any) -> tuple[PagedHeads, States]:
            return recompress_alone(method, *held, cache.position, rope)

        late = jnp.any(_room(layer, state)[0] <= 0)
        earlier, after = sequenced(earlier, late, heads, (layer, state))
        return after

    def by_group(layer: Layer, state: States, rope: Rope | None, before: Any) -> tuple[Layer, States, Any]:
        return recompress_layer(method, layer, state, cache.position, rope, before)

    cache = _through_layers(method, cache, ropes, alone, by_group)
    return replace(cache, layers=placed(method, cache.layers), state=placed_state(method, cache.state))


@partial(jax.jit, static_argnames=("method", "rope", "in_place"))
def recompress_layer(
    method: Method,
    layer: Layer,
    state: tuple[State | None, ...],
    position: Int[Array, " B"],
    rope: Rope | None,
    selection: tuple[Any, ...] | None,
    *,
    in_place: bool = True,
) -> tuple[Layer, tuple[State | None, ...], tuple[Any, ...]]:
    """Equal layers are traced once. Rows move where they lie, or into new memory, which takes a GPU fewer launches."""
    befores = (None,) * len(state) if selection is None else selection
    parts = [
        _recompress_group(method, group, group_state, position, rope, before, in_place=in_place)
        for group, group_state, before in zip(groups(layer), state, befores, strict=True)
    ]
    layer = with_groups(layer, [part.cache for part in parts])
    return layer, tuple(part.state for part in parts), tuple(part.selection for part in parts)


@partial(jax.jit, static_argnames=("method", "rope"))
def recompress_alone(
    method: Method, layer: PagedHeads, state: tuple[State | None, ...], position: Int[Array, " B"], rope: Rope | None
) -> tuple[PagedHeads, tuple[State | None, ...]]:
    """Every head as a sequence of its own."""
    (group_state,) = state
    assert group_state is not None
    heads = (*heads_as_batch.copies(layer, group_state), position)
    done = heads_as_batch.in_turns(lambda tree: recompress_heads(method, *tree, rope), heads)
    layer, group_state = heads_as_batch.put_back(layer, *done)
    return layer, (group_state,)


@partial(jax.jit, static_argnames=("method", "rope"))
def recompress_heads(
    method: Method, cache: LayerCache, state: heads_as_batch.ByHead, position: Int[Array, " B"], rope: Rope | None
) -> tuple[LayerCache, heads_as_batch.ByHead]:
    """Heads as sequences of their own. Those of all layers, if in equal slots, are traced once."""
    heads = cache.length.shape[1]
    each = jax.tree.map(partial(heads_as_batch.alone, kv_heads=heads), cache)
    state = heads_as_batch.remembered_alone(state)
    part = _recompress_group(method, each, state, jnp.repeat(position, heads), rope, None)
    return heads_as_batch.together(part.cache, part.state, heads)


def _recompress_group(
    method: Method,
    group: Group,
    state: State | None,
    position: Int[Array, " B"],
    rope: Rope | None,
    selection: Any,
    *,
    in_place: bool = True,
) -> Compressed:
    if state is None or "due" not in state:
        return Compressed(group, state)
    group, held = constrain_cache((group, state))  # as after the prompt
    counts = rows_held(group)
    target = jnp.where(counts >= held["due"], held["budget"], counts)
    slots = group.degree.shape[2]
    plan = GroupPlan((), slots, most_rows=slots, rope=rope)
    result = method.recompress(Rows(group, target, position, held, selection=selection, plan=plan))
    result = compacted(result, in_place=in_place)
    return replace(result, state=held | (result.state or {}))


# --- between two programs ---


def recompress_late(
    method: Method,
    cache: KVCache,
    ropes: tuple[Rope | None, ...],
    late: Bool[Any, " B"],
    call: Callable[..., Any] = lambda program, *args: program(*args),
) -> KVCache:
    """Bring the sequences that are `late`, and due, back to their budgets; the others stay as they are, bit for bit.

    The cache is donated, layer by layer. As `recompress`, but not for use in a jit. `call` runs the programs, or
    compiles them.
    """

    def pages(layer: Any, state: States, rope: Rope | None) -> Any:
        """Every head as a sequence of its own."""
        now = alike(layer)
        heads = call(_side_by_side, method, now, state, late)
        after, states = call(_put_back, method, now, state, *call(_heads, method, rope, *heads, cache.position))
        return as_it_was(after, layer), states

    def by_group(layer: Layer, state: States, rope: Rope | None, before: Any) -> Any:
        return call(_layer, method, layer, state, cache.position, rope, before, late)

    return _through_layers(method, cache, ropes, pages, by_group)


def _is_ever_due(state: States) -> bool:
    return any(memory is not None and "due" in memory for memory in state)


@jit(static_argnames=("method", "rope"), donate_argnames=("layer",))
def _layer(
    method: Method,
    layer: Layer,
    state: States,
    position: Int[Array, " B"],
    rope: Rope | None,
    selection: tuple[Any, ...] | None,
    late: Bool[Array, " B"],
) -> tuple[Layer, States, tuple[Any, ...]]:
    after, states, here = recompress_layer(method, layer, _due_alone(state, late), position, rope, selection)
    return placed(method, after), placed_state(method, _due_again(states, state)), here


@jit(static_argnames=("method",))
def _side_by_side(
    method: Method, layer: PagedHeads, state: States, late: Bool[Array, " B"]
) -> tuple[LayerCache, heads_as_batch.ByHead]:
    (memory,) = _due_alone(state, late)
    assert memory is not None
    return heads_as_batch.copies(layer, memory)


@jit(static_argnames=("method", "rope"), donate_argnames=("cache",))
def _heads(
    method: Method, rope: Rope | None, cache: LayerCache, state: heads_as_batch.ByHead, position: Int[Array, " B"]
) -> tuple[LayerCache, heads_as_batch.ByHead]:
    return heads_as_batch.in_turns(lambda tree: recompress_heads(method, *tree, rope), (cache, state, position))


@jit(static_argnames=("method",))
def _put_back(
    method: Method, layer: PagedHeads, before: States, cache: LayerCache, state: heads_as_batch.ByHead
) -> tuple[PagedHeads, States]:
    after, memory = heads_as_batch.put_back(layer, cache, state)
    return placed(method, after), placed_state(method, _due_again((memory,), before))


def _due_alone(state: States, late: Bool[Array, " B"]) -> States:
    """States in which other sequences are never due."""

    def one(memory: State | None) -> State | None:
        if memory is None or "due" not in memory:
            return memory
        at = memory["due"]
        return memory | {"due": jnp.where(late.reshape(-1, *[1] * (at.ndim - 1)), at, MOST_ROWS)}

    return tuple(map(one, state))


def _due_again(state: States, before: States) -> States:
    """States that are due when those before were."""
    return tuple(
        memory if memory is None or old is None or "due" not in old else memory | {"due": old["due"]}
        for memory, old in zip(state, before, strict=True)
    )
