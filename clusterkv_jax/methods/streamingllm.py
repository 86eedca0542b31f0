"""StreamingLLM: the first tokens and the latest (Xiao et al., "Efficient Streaming Language Models with Attention
Sinks").
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from clusterkv_jax.blocks.config import Rope
from clusterkv_jax.blocks.rope import rotate
from clusterkv_jax.cache.attention import attend_cache, with_sinks
from clusterkv_jax.cache.layers import LayerCache, StepInputs, take_rows
from clusterkv_jax.cache.slots import set_slot
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import as_stored
from clusterkv_jax.methods.base import Compressed, Rows, State, StorageKind
from clusterkv_jax.methods.families.streaming import Streaming
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.methods.schedule import Schedule
from clusterkv_jax.methods.steps import one_by_one
from clusterkv_jax.runtime.errors import check_fields


@dataclass(frozen=True)
class StreamingLLM(Streaming):
    """Keep the first `sinks` rows and the B - sinks latest, while decoding too.

    Rows keep their true positions. `rerotate` moves them together as the paper does, so that the distance from a query
    to a sink is that of their places in the cache; it needs a model with RoPE.

    Attributes:
        budget: rows per KV head, sinks included.
        sinks: first rows, which always stay.
        rerotate: move rows to the positions of their places in the cache; the model must have RoPE.
    """

    rerotate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("rerotate", isinstance(self.rerotate, bool), "True or False"))

    @property
    @override
    def storage(self) -> StorageKind:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens, with `rerotate` at other positions."""
        return "moved" if self.rerotate else "tokens"

    @property
    @override
    def schedule(self) -> Schedule:
        return Schedule("ring")

    @override
    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        """As for all methods; keys can be moved only where there are rotations."""
        if self.rerotate and request.rope is None:
            raise ValueError("StreamingLLM with rerotate=True needs a model with rotary positions; this one has none.")
        super().check(lengths, request)

    @override
    def compress(self, rows: Rows) -> Compressed:
        """Keep sinks and latest rows; with `rerotate` at the positions of their places."""
        prompt: Any = rows.cache
        layer, _ = take_rows(prompt, self.stay(prompt, rows.budget), rows.plan.capacity)
        if not self.rerotate:
            return Compressed(layer)
        assert layer.positions is not None
        # How far the rows have been moved, and the sinks as they were.
        state = {"moved": rows.position - layer.length[:, 0], "sinks": layer.keys[:, :, : self.sinks]}
        places = jnp.where(layer.degree > 0, ordinals(layer.capacity, 3) - layer.positions, 0)[:, 0]
        return Compressed(replace(layer, keys=_turned(layer.keys, places, rows.plan.rope)), state)

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """Take the oldest row's slot, then attend, token after token."""
        return one_by_one(self._step, group, state, tokens)

    def _step(self, group: LayerCache, state: State, token: StepInputs) -> tuple[Array, LayerCache, State]:
        if self.rerotate:
            token, group = self._move(token, group, state)
        real = token.real[:, 0]
        full = group.length >= state["budget"][:, None]
        slots = jnp.where(full, self.oldest(group), group.length)
        k, v = jnp.swapaxes(token.k, 1, 2), jnp.swapaxes(token.v, 1, 2)
        at = jnp.broadcast_to(token.positions[:, None], (*slots.shape, 1))
        row = LayerCache(k, v, jnp.ones((*slots.shape, 1), jnp.float32), jnp.ones_like(slots), at)
        group = set_slot(group, slots, row, real)
        group = replace(group, length=jnp.where(real[:, None] & ~full, group.length + 1, group.length))
        return (
            with_sinks(attend_cache(group, token.q, token.soft_cap, token.degree_power), token.sink_logits),
            group,
            state,
        )

    def _move(self, token: StepInputs, group: LayerCache, state: State) -> tuple[StepInputs, LayerCache]:
        """Into the frame of the rows as they were first moved: there only the sinks have to follow the ring.

        They are turned from what they were, not from what they became: errors must not add up.
        """
        distance = jnp.maximum(token.positions[:, 0] + 1 - state["budget"], 0) - state["moved"]
        turned = _turned(state["sinks"], jnp.repeat(distance[:, None], self.sinks, axis=1), token.rope)
        moves = token.real[:, 0] & (distance > 0)

        def put(x: Array, new: Array) -> Array:
            new = jnp.where(moves.reshape(-1, *[1] * (x.ndim - 1)), new, x[:, :, : self.sinks])
            return jax.lax.dynamic_update_slice_in_dim(x, new, 0, axis=2)

        keys = jax.tree.map(put, group.keys, as_stored(turned, group.keys, group.key_mean))
        return moved_back(token, state), replace(group, keys=keys)


def moved_back(token: StepInputs, state: State) -> StepInputs:
    """The tokens at positions as much smaller as the cached rows were moved."""
    if token.rope is None:
        return token
    back = jnp.broadcast_to(-state["moved"][:, None], token.positions.shape)
    return replace(token, q=rotate(token.q, back, token.rope), k=rotate(token.k, back, token.rope))


def _turned(keys: Float[Array, "B K C D"], by: Int[Array, "B C"], rope: Rope | None) -> Float[Array, "B K C D"]:
    """Keys moved by so many positions: rotations add up, and without any they have no position."""
    return keys if rope is None else jnp.swapaxes(rotate(jnp.swapaxes(keys, 1, 2), by, rope), 1, 2)
