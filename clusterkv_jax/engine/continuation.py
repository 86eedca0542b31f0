"""What an answer leaves: its cache, with the budget of a prompt as long as the conversation has become."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.cache.layers import KVCache, State, occupancy, take_sequences
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine.contexts import PrefillResult
from clusterkv_jax.engine.layout import EngineLayout
from clusterkv_jax.engine.room import room_behind
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.driver import placed_state, with_budget
from clusterkv_jax.methods.plan import budgets_by_head, rows_of_request
from clusterkv_jax.methods.recompression import recompress_late, room_of_sequences
from clusterkv_jax.methods.request import LayerPlan, request_of_model
from clusterkv_jax.runtime.programs import compiler, jit
from clusterkv_jax.runtime.sharding import constrain, fetch

# B of each group of heads, of all layers.
Budgets = tuple[Int[Array | np.ndarray, " groups"] | Int[Array | np.ndarray, "1 K"], ...]


def left_behind(
    model: Model,
    method: Method,
    layout: EngineLayout,
    cache: KVCache,
    length: int,
    max_new_tokens: int,
    *,
    compact: bool = False,
) -> PrefillResult:
    """The cache of one sequence, which has seen `length` tokens, as it goes on under the budget of so many.

    What is beyond that budget goes when its method is due, as while decoding; with `compact` at once. Methods that
    only append, or replace a row by each token, keep the rows that they have. The cache is donated, but with `compact`:
    a context holds it.
    """
    if _is_ever_due(cache):
        budgets = _budgets(model, method, layout, length, max_new_tokens)
        interval = method.schedule.interval
        cache, late = _under(method, cache, budgets, 0 if compact else interval)
        if late.any():
            cache = take_sequences(cache, jnp.asarray([0])) if compact else cache
            cache = recompress_late(method, cache, model.config.ropes, late)
        cache = _under(method, cache, budgets, interval)[0] if compact else cache
    room = room_behind(cache, layout.one, layout.limits.step_tokens)
    logits = jnp.zeros(layout.logits.shape, layout.logits.dtype)
    return PrefillResult(cache, logits, (occupancy(cache), occupancy(cache, windows=True)), room)


def compile_return(model: Model, method: Method, cache: KVCache) -> None:
    """Compile what brings such a cache back to its budget, so that no later answer waits for it."""
    if _is_ever_due(cache):
        recompress_late(method, cache, model.config.ropes, np.zeros(1, bool), compiler())


def _is_ever_due(cache: KVCache) -> bool:
    return any(memory is not None and "due" in memory for state in cache.state for memory in state)


def _budgets(model: Model, method: Method, layout: EngineLayout, length: int, max_new_tokens: int) -> Budgets:
    """While decoding behind a prompt of so many tokens: of each group of heads, or of the heads of the pages."""
    limits, config = layout.limits, model.config
    counts = {"reserve": limits.reserve, "step_tokens": limits.step_tokens, "whole": limits.whole}
    lengths, dtype = np.asarray([length]), number_dtype(model.params)
    request = request_of_model(
        config, dtype, lengths, method.cache_dtype, **counts, max_new_tokens=min(max_new_tokens, limits.reserve)
    )

    def of_layer(number: int, plan: LayerPlan) -> Int[np.ndarray, " groups"] | Int[np.ndarray, "1 K"]:
        rows = np.asarray(rows_of_request(method, plan, lengths, config.global_number(number), request))
        rows = rows[0] if plan.pool is None else np.asarray(budgets_by_head(plan, rows)[0])
        return np.maximum(rows[..., -1], method.protected.fewest).astype(np.int32)

    return tuple(of_layer(number, plan) for number, plan in enumerate(layout.plans))


def _under(method: Method, cache: KVCache, budgets: Budgets, interval: int) -> tuple[KVCache, Bool[np.ndarray, " B"]]:
    """A sequence under other budgets, due `interval` rows beyond them, and whether it is."""
    remembered, late = _of_budgets(method, cache, budgets, np.asarray(interval, np.int32))
    pairs = zip(cache.state, remembered, strict=True)
    state = tuple(tuple(old and old | new for old, new in zip(*layer, strict=True)) for layer in pairs)
    return replace(cache, state=state), fetch(late)


@jit(static_argnames=("method",))
def _of_budgets(
    method: Method, cache: KVCache, budgets: Budgets, interval: Int[Array | np.ndarray, ""]
) -> tuple[tuple[tuple[State, ...], ...], Bool[Array, " B"]]:
    """What is remembered of these budgets alone: rows stay where they are."""
    state = _until(cache.state, budgets, interval)
    room = room_of_sequences(method, replace(cache, state=state))
    assert room is not None
    names = ("budget", "due")
    own = tuple(
        tuple({name: x for name, x in (each or {}).items() if name in names} for each in layer) for layer in state
    )
    return placed_state(method, own), constrain(room <= 0, None)


def _until(
    state: tuple[tuple[State, ...], ...], budgets: Budgets, interval: Int[Array | np.ndarray, ""]
) -> tuple[tuple[State, ...], ...]:
    """What is kept between steps with these budgets, due `interval` rows beyond them."""

    def of_group(memory: State, budget: Any) -> State:
        if memory is None or "due" not in memory:
            return memory
        return with_budget(memory, jnp.broadcast_to(budget, memory["budget"].shape), interval)

    return tuple(
        tuple(of_group(memory, each[i]) for i, memory in enumerate(layer))
        for layer, each in zip(state, map(jnp.asarray, budgets), strict=True)
    )
