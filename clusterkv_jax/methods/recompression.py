"""Recompression between two programs: the host calls a few small ones, which layers share.

Within a program each layer would be compiled anew, and a model of thirty layers takes minutes. Heads in pages are
copied side by side and put back by a program for each number of pages; one between them compresses those of all layers.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from clusterkv_jax.blocks.config import Rope
from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.cache.kinds import alike, as_it_was, head_slots, is_compressible
from clusterkv_jax.cache.layers import KVCache, Layer, LayerCache, PagedHeads, State
from clusterkv_jax.methods import heads_as_batch
from clusterkv_jax.methods.base import Method, is_by_head
from clusterkv_jax.methods.driver import placed, placed_state, recompress_heads, recompress_layer
from clusterkv_jax.runtime.programs import jit

States = tuple[State | None, ...]


def recompress_late(method: Method, cache: KVCache, ropes: tuple[Rope | None, ...], late: Bool[Any, " B"]) -> KVCache:
    """Bring the sequences that are `late`, and due, back to their budgets; the others stay as they are, bit for bit.

    The cache is donated, layer by layer. As `driver.recompress`, but not for use in a jit.
    """
    layers, states, selection, number = list(cache.layers), list(cache.state), None, -1
    by_heads = is_by_head(method, sum(map(is_compressible, cache.layers)))
    for i, (layer, state, rope) in enumerate(zip(cache.layers, cache.state, ropes, strict=True)):
        if not is_compressible(layer):
            continue
        number += 1
        if not _is_ever_due(state):
            continue
        if by_heads and head_slots(layer) is not None:
            layers[i], states[i] = _pages(method, layer, state, cache.position, rope, late)
        else:
            before = selection if "selection" in method.inputs(number) else None
            layers[i], states[i], here = _layer(method, layer, state, cache.position, rope, before, late)
            selection = here if before is None else before
    return replace(cache, layers=tuple(layers), state=tuple(states))


def _is_ever_due(state: States) -> bool:
    return any(memory is not None and "due" in memory for memory in state)


def _pages(
    method: Method,
    layer: Any,
    state: States,
    position: Int[Array, " B"],
    rope: Rope | None,
    late: Bool[Any, " B"],
) -> tuple[PagedHeads, States]:
    """Every head as a sequence of its own."""
    now = alike(layer)
    heads = _side_by_side(method, now, state, late)
    after, states = _put_back(method, now, state, *_heads(method, rope, *heads, position))
    return as_it_was(after, layer), states


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
