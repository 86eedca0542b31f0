"""StreamingLLM: the first tokens and the latest (Xiao et al., "Efficient Streaming Language Models with Attention
Sinks").
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.attention import attend_cache
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import LayerCache, NewTokens, State, put_row, take_rows
from clusterkv_jax.errors import check_fields, is_count
from clusterkv_jax.methods.base import LayerPlan, Request, one_by_one
from clusterkv_jax.methods.families.eviction import EveryStep
from clusterkv_jax.models.config import Rope
from clusterkv_jax.models.rope import rotate


class Streaming(EveryStep):
    """Sinks and a ring of the latest rows: a new token takes the slot of the oldest row that is no sink."""

    budget: Budget
    sinks: int

    def __post_init__(self) -> None:
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("sinks", is_count(self.sinks), "a whole number of at least 0"),
        )

    @property
    def always_kept(self) -> dict[str, int]:
        """The first rows."""
        return {"sinks": self.sinks}

    def start(self, group: LayerCache, rows: Array, queries: Array | None, plan: LayerPlan, key: Any) -> State:
        """The budget of each batch row."""
        del group, queries, plan, key
        return {"budget": rows}

    def stay(self, prompt: LayerCache, rows: Int[Array, " B"]) -> Bool[Array, "B K C"]:
        """Sinks and latest rows of the prompts that exceed their budget, all of the others."""
        slot, length = jnp.arange(prompt.capacity), prompt.length[..., None]
        latest = slot >= length - (rows - self.sinks)[:, None, None]
        return (prompt.degree > 0) & ((slot < self.sinks) | latest | (length <= rows[:, None, None]))

    def oldest(self, group: LayerCache) -> Int[Array, "B K"]:
        """The slot of the oldest row that is no sink."""
        assert group.positions is not None
        candidate = (group.degree > 0) & (jnp.arange(group.capacity) >= self.sinks)
        never = jnp.iinfo(jnp.int32).max
        return jnp.argmin(jnp.where(candidate, group.positions, never), axis=-1).astype(jnp.int32)


@dataclass(frozen=True)
class StreamingLLM(Streaming):
    """Keep the first `sinks` rows and the B - sinks latest, while decoding too.

    Rows keep their true positions. `rerotate` moves them together as the paper does, so that the distance from a query
    to a sink is that of their places in the cache; it needs a model with RoPE.
    """

    budget: Budget
    sinks: int = 4
    rerotate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("rerotate", isinstance(self.rerotate, bool), "True or False"))

    def plan(self, layer: int, request: Request) -> LayerPlan:
        """As for all methods; with the model's rotations where keys are moved."""
        if self.rerotate and request.rope is None:
            raise ValueError("StreamingLLM with rerotate=True needs a model with rotary positions; this one has none.")
        return replace(super().plan(layer, request), rope=request.rope if self.rerotate else None)

    def slots_after(self, kept: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
        """B rows: a token takes its slot before it attends."""
        return np.minimum(kept + request.reserve, np.maximum(kept, rows))

    def start(self, group: LayerCache, rows: Array, queries: Array | None, plan: LayerPlan, key: Any) -> State:
        """With `rerotate` also how far the rows have been moved, and the sinks as they were."""
        del queries, plan, key
        if not self.rerotate:
            return {"budget": rows}
        assert group.positions is not None
        moved = jnp.max(group.positions[:, 0], axis=-1) + 1 - group.length[:, 0]
        return {"budget": rows, "moved": moved, "sinks": group.keys[:, :, : self.sinks]}

    def compress_group(
        self,
        prompt: LayerCache,
        queries: Float[Array, "B H N D"] | None,
        rows: Int[Array, " B"],
        capacity: int,
        plan: LayerPlan,
        key: Array | None,
        handed: Any,
    ) -> tuple[LayerCache, State, None]:
        """Keep sinks and latest rows; with `rerotate` at the positions of their places."""
        del handed
        layer, _ = take_rows(prompt, self.stay(prompt, rows), capacity)
        state = self.start(layer, rows, queries, plan, key)
        if plan.rope is not None:
            assert layer.positions is not None
            places = jnp.where(layer.degree > 0, jnp.arange(capacity) - layer.positions, 0)[:, 0]
            layer = replace(layer, keys=_turned(layer.keys, places, plan.rope))
        return layer, state, None

    def step_group(
        self, group: LayerCache, state: Any, new: NewTokens
    ) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
        """Take the oldest row's slot, then attend, token after token."""
        return one_by_one(self._step, group, state, new)

    def _step(self, group: LayerCache, state: Any, new: NewTokens) -> tuple[Array, LayerCache, State]:
        if self.rerotate:
            new, group = self._move(new, group, state)
        real = new.real[:, 0]
        full = group.length >= state["budget"][:, None]
        slots = jnp.where(full, self.oldest(group), group.length)
        k, v = jnp.swapaxes(new.k, 1, 2), jnp.swapaxes(new.v, 1, 2)
        at = jnp.broadcast_to(new.positions[:, None], (*slots.shape, 1))
        row = LayerCache(k, v, jnp.ones((*slots.shape, 1), jnp.float32), jnp.ones_like(slots), at)
        group = put_row(group, slots, row, real)
        group = replace(group, length=jnp.where(real[:, None] & ~full, group.length + 1, group.length))
        return attend_cache(group, new.q)[0], group, state

    def _move(self, new: NewTokens, group: LayerCache, state: Any) -> tuple[NewTokens, LayerCache]:
        """Into the frame of the rows as they were first moved: there only the sinks have to follow the ring.

        They are turned from what they were, not from what they became: errors must not add up.
        """
        assert new.rope is not None
        dropped = jnp.maximum(new.positions[:, 0] + 1 - state["budget"], 0) - state["moved"]
        turned = _turned(state["sinks"], jnp.repeat(dropped[:, None], self.sinks, axis=1), new.rope)
        held = group.keys[:, :, : self.sinks]
        turned = jnp.where((new.real[:, 0] & (dropped > 0))[:, None, None, None], turned, held)
        keys = jax.lax.dynamic_update_slice_in_dim(group.keys, turned, 0, axis=2)
        return moved_back(new, state), replace(group, keys=keys)


def moved_back(new: NewTokens, state: Any) -> NewTokens:
    """The tokens at positions as much smaller as the cached rows were moved."""
    assert new.rope is not None
    back = jnp.broadcast_to(-state["moved"][:, None], new.positions.shape)
    return replace(new, q=rotate(new.q, back, new.rope), k=rotate(new.k, back, new.rope))


def _turned(keys: Float[Array, "B K C D"], by: Int[Array, "B C"], rope: Rope) -> Float[Array, "B K C D"]:
    """Keys moved by so many positions: rotations add up."""
    return jnp.swapaxes(rotate(jnp.swapaxes(keys, 1, 2), by, rope), 1, 2)
