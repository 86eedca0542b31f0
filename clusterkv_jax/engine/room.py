"""Room: whether a cache fits an engine's slots, and how many tokens may still follow in it."""

from typing import Any

import jax
import numpy as np

from clusterkv_jax.cache.kinds import first_pages, never_fills, rows_by_head, slots_by_head
from clusterkv_jax.cache.layers import KVCache, groups
from clusterkv_jax.runtime.sharding import fetch

# Of caches whose method makes room for tokens as they come.
ENDLESS = 2**31


def fits(cache: KVCache, one: KVCache) -> bool:
    """Whether a cache has the arrays of a slot, none of them larger; pages are as many."""
    if jax.tree.structure(cache) != jax.tree.structure(one):
        return False
    for x, slot in zip(jax.tree.leaves(cache), jax.tree.leaves(one), strict=True):
        if x.dtype != slot.dtype or x.ndim != slot.ndim or any(a > b for a, b in zip(x.shape, slot.shape, strict=True)):
            return False
    parts = zip(cache.layers, one.layers, strict=True)
    pairs = (pair for layer, slots in parts for pair in zip(groups(layer), groups(slots), strict=True))
    return all(group.degree.shape == slot.degree.shape for group, slot in pairs if first_pages(slot) is not None)


def room_behind(cache: KVCache, one: KVCache, step_tokens: int) -> int:
    """Tokens that may follow in a slot that holds a cache which fits it; `step_tokens` enter at once."""
    counts = [
        _counts(group, memory, slot)
        for layer, state, slots in zip(cache.layers, cache.state, one.layers, strict=True)
        if not never_fills(slots)
        for group, memory, slot in zip(groups(layer), state, groups(slots), strict=True)
    ]
    # All at once: to wait for each of them would take longer than a step.
    return min((_room(step_tokens=step_tokens, **each) for each in fetch(counts)), default=ENDLESS)


def _counts(group: Any, memory: Any, slot: Any) -> dict[str, Any]:
    """Of the heads of a group: rows, slots, and from how many rows on its method makes room, where it does."""
    # Which of as many pages belong to a head is the group's own.
    pool = slot if first_pages(slot) is None else group
    makes_room = memory is not None and "indexed" not in memory
    due, budget = ((memory or {}).get(name) if makes_room else None for name in ("due", "budget"))
    return {"held": rows_by_head(group), "slots": slots_by_head(pool), "due": due, "budget": budget}


def _room(held: Any, slots: Any, due: Any, budget: Any, step_tokens: int) -> int:
    """Of one group of heads: what its method never fills is endless."""
    held, slots = np.asarray(held), np.asarray(slots)
    most = slots + 1
    if due is not None:
        most = np.maximum(held, due.reshape(len(held), -1) - 1) + step_tokens
    elif budget is not None:
        most = np.maximum(held, budget.reshape(len(held), -1)) + 1
    short = np.broadcast_to(most > slots, held.shape)
    return int(np.broadcast_to(slots - held, short.shape)[short].min()) if np.any(short) else ENDLESS
