"""Gated reading: prompts are compressed while they are read, so that no layer ever holds more than its budget, a window
of the newest rows, and a chunk.

    chunk c attends to   | rows kept so far | the newest `window` rows | itself |     at its true positions

The first `window` tokens are read whole. One program takes each chunk after them through a layer and one brings the
rows of a layer back to their budget, whatever the length of the prompt.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.cache.kinds import alike, as_it_was
from clusterkv_jax.cache.layers import KVCache, Layer, State
from clusterkv_jax.decoding import prefill
from clusterkv_jax.decoding.appending import append_layerwise, append_to_layer
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.gating import (
    back_to_budget,
    budgets_after,
    budgets_so_far,
    of_layer,
    plan_reading,
    renumber,
    rows_beside,
    settle,
    settle_pages,
    while_reading,
)
from clusterkv_jax.methods.plan import budgets_by_head, check_prompts, plans_of_width
from clusterkv_jax.methods.request import LayerPlan, RequestShape, row_bytes
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.runtime.checks import check_array, check_ids, check_lengths
from clusterkv_jax.runtime.errors import counted
from clusterkv_jax.runtime.settings import own_settings


@dataclass(frozen=True)
class GatedPlan:
    """What is decided before the first token is read.

    Attributes:
        config: of the model.
        method: what is kept in the end.
        gate: window and chunk.
        request: lengths that prompts may have, and what follows them.
        plans: of the layers, once all has been read.
        reader: the method while it reads.
        reading: the plans of the layers until then.
        key: PRNG key of methods that draw.
        call: as in `prefill`.
    """

    config: ModelConfig
    method: Method
    gate: Gate
    request: RequestShape
    plans: tuple[LayerPlan, ...]
    reader: Method
    reading: tuple[LayerPlan, ...]
    key: Key[Array, ""] | None
    call: Callable[..., Any]

    @property
    def beside(self) -> int:
        """Rows that a head holds beside its budget while a prompt is read."""
        return rows_beside(self.method, self.reader)


class GatedState(NamedTuple):
    """Where a reading stands.

    Attributes:
        layers: of the cache, in a list: what takes it over replaces one after the other.
        states: beside them.
        seen: tokens of each prompt.
        logits: after the last token of each prompt so far.
        position: the highest that the next token of any prompt may have.
    """

    layers: list[Layer]
    states: list[tuple[State | None, ...]]
    seen: Int[Array, " B"]
    logits: Float[Any, "B V"]
    position: int

    @property
    def cache(self) -> KVCache:
        """All layers as they are now."""
        return KVCache(tuple(self.layers), tuple(self.states), self.seen)


@own_settings()
def gated_prefill(
    params: Params,
    config: ModelConfig,
    method: Method,
    tokens: Int[np.ndarray, "B N"],
    lengths: Int[np.ndarray, " B"],
    *,
    gate: Gate,
    max_new_tokens: int = 64,
    reserve: int | None = None,
    step_tokens: int = 1,
    whole: int = 0,
    plans: Sequence[LayerPlan] | None = None,
    key: Key[Array, ""] | None = None,
    on_chunk: Callable[[int, KVCache], None] | None = None,
    call: Callable[..., Any] = lambda program, *args: program(*args),
) -> tuple[KVCache, Float[Any, "B V"]]:
    """`prefill` that compresses while it reads; the cache has the same slots, and as many rows.

    Prompts of at most the window's tokens are read whole.

    Args:
        tokens: ids on the host.
        lengths: on the host.
        gate: the newest tokens that stay as they are until the prompt has been read, and tokens that are read at once.
            Where it renumbers, a prompt may have any length: rows get positions one behind the other whenever those of
            the model end, and distances to older rows are no longer true.
        on_chunk: called with the tokens of the longest prompt that have been read and the cache, which the next chunk
            then takes over.

    The others are as in `prefill`.

    Raises:
        ValueError: as `prefill` does, and for a method that needs later queries.
    """
    while_reading(method, gate.window, gate.chunk)
    sizes: Any = {"max_new_tokens": max_new_tokens, "step_tokens": step_tokens, "whole": whole}
    sizes["reserve"] = max_new_tokens if reserve is None else reserve
    tokens, lengths = _on_host(tokens, lengths)
    longest = int(lengths.max())
    if longest <= gate.window:
        return prefill(params, config, method, tokens, lengths, **sizes, plans=plans, key=key, call=call)
    if longest > config.max_positions and not gate.renumber:
        raise ValueError(f"A prompt of {longest} tokens exceeds the model's {config.max_positions} positions.")
    check_ids(tokens, config.vocab_size, lengths)
    dtype, width = number_dtype(params), tokens.shape[1]
    plan = gated_plan(config, method, dtype, width, gate, **sizes, plans=plans, key=key, call=call)
    check_prompts(config, method, plan.request, lengths.astype(np.int64))
    at_end = rows_after(plan, plan.request, lengths)
    state = read_window(params, plan, tokens[:, : gate.window], np.minimum(lengths, gate.window))
    for begin in range(gate.window, longest, gate.chunk):
        rows = None
        if begin > gate.window:
            now = rows_after(plan, replace(plan.request, whole=0), np.minimum(lengths, begin))
            rows = budgets_so_far(method, now, at_end, lengths, plan.beside)
        counts = np.clip(lengths - begin, 0, gate.chunk)
        state = read_chunk(params, plan, state, _chunk(tokens, begin, counts, gate.chunk), counts, rows)
        if on_chunk is not None:
            on_chunk(min(begin + gate.chunk, longest), state.cache)
    return settled(plan, state, at_end), state.logits


# --- what prompts, and texts that come bit by bit, are read by ---


def gated_plan(
    config: ModelConfig,
    method: Method,
    dtype: Any,
    width: int,
    gate: Gate,
    *,
    plans: Sequence[LayerPlan] | None = None,
    key: Key[Array, ""] | None = None,
    call: Callable[..., Any] = lambda program, *args: program(*args),
    **sizes: int,
) -> GatedPlan:
    """How prompts of up to `width` tokens are read; `sizes` as in `prefill`.

    Raises ValueError for a method that cannot, and for rows that cannot be renumbered where they may have to be.
    """
    reader = while_reading(method, gate.window, gate.chunk)
    request, own = plans_of_width(config, method, dtype, width, **sizes)
    plans = tuple(map(own, range(config.num_layers))) if plans is None else tuple(plans)
    reading = plan_reading(plans, reader, rows_beside(method, reader), gate.window, gate.chunk)
    if gate.renumber:
        _check_renumbers(config, method, reading, gate.chunk + request.reserve)
    return GatedPlan(config, method, gate, request, plans, reader, reading, key, call)


def rows_after(
    plan: GatedPlan, request: RequestShape, seen: Int[np.ndarray, " B"]
) -> tuple[Int[np.ndarray, "B groups stages"], ...]:
    """Rows that each group of heads may hold of prompts of so many tokens, layer by layer."""
    return budgets_after(plan.config, plan.method, plan.plans, request, seen)


def read_window(
    params: Params, plan: GatedPlan, tokens: Int[np.ndarray, "B N"], lengths: Int[np.ndarray, " B"]
) -> GatedState:
    """The first tokens, as many as the window has, of which all stay."""
    sizes: Any = {"max_new_tokens": plan.gate.chunk, "step_tokens": plan.gate.chunk, "whole": plan.gate.window}
    known: Any = {"plans": plan.reading, "key": plan.key, "call": plan.call}
    cache, logits = prefill(params, plan.config, plan.reader, tokens, lengths, **sizes, **known)
    return GatedState(list(cache.layers), list(cache.state), cache.position, logits, plan.gate.window)


def read_chunk(
    params: Params,
    plan: GatedPlan,
    state: GatedState,
    tokens: Int[np.ndarray, "B T"],
    counts: Int[np.ndarray, " B"],
    rows: tuple[Int[np.ndarray, "B groups"], ...] | None,
) -> GatedState:
    """The next chunk, of which each prompt has so many tokens, after heads have come back to so many `rows`.

    The lists of the state before are taken over.
    """
    config, call, chunk, position = plan.config, plan.call, plan.gate.chunk, state.position
    if plan.gate.renumber and position + chunk + plan.request.reserve > config.max_positions:
        for i in range(config.num_layers):
            _to_budget(plan, plan.reader, state, rows, i)
        state = _renumbered(plan, state)
        rows, position = None, max(group.capacity for own in plan.reading for group in own.groups)
    # A layer returns to its budget when it is its turn: the host, which is no faster than these short programs, has
    # begun the next one while a device still takes the chunk through the layer before.
    turn: Any = {"rows_of": partial(_to_budget, plan, plan.reader, state, rows), "call": _in_step(call)}
    empty = KVCache((), (), state.seen)
    cache, logits, _ = append_layerwise(params, config, plan.reader, empty, tokens, counts, state.logits, **turn)
    return GatedState(list(cache.layers), list(cache.state), cache.position, logits, position + chunk)


def settled(plan: GatedPlan, state: GatedState, rows: tuple[Int[np.ndarray, "B groups stages"], ...]) -> KVCache:
    """What has been read, with so many rows in the slots that they have while decoding. Lists are taken over."""
    layers, states = state.layers, state.states
    first = tuple(budgets[..., 0] for budgets in rows)
    for i, (own, budgets) in enumerate(zip(plan.plans, rows, strict=True)):
        layers[i], states[i] = _settled_layer(plan, own, *_to_budget(plan, plan.method, state, first, i), budgets)
    return KVCache(tuple(layers), tuple(states), state.seen)


def _settled_layer(
    plan: GatedPlan,
    own: LayerPlan,
    layer: Any,
    state: Any,
    rows: Int[np.ndarray, "B groups stages"],
) -> tuple[Any, Any]:
    if (pool := own.pool) is None:
        return plan.call(settle, plan.method, own, layer, state, rows)
    fixed = plan.method, own.by_head, pool.count, pool.slots
    new = np.asarray(budgets_by_head(own, rows)[0]), np.asarray(pool.first, np.int32)
    layer, state = plan.call(settle_pages, *fixed, alike(layer), state, *new)
    return replace(layer, head_slots=pool.head_slots), state


def _to_budget(
    plan: GatedPlan,
    method: Method,
    state: GatedState,
    rows: tuple[Int[np.ndarray, "B groups"], ...] | None,
    number: int,
) -> tuple[Any, Any]:
    """A layer with so many rows, and its state, which take the place of those before; in plans all are shapes.

    One layer after the other, so that one alone is there twice. Without `rows` it stays as it is.
    """
    layers, states = state.layers, state.states
    if rows is not None:
        own, budgets, shares = of_layer(plan.reading[number], rows[number])
        held = alike(layers[number]), states[number], budgets, shares, state.seen, plan.config.ropes[number]
        after, states[number] = plan.call(back_to_budget, method, own, *held)
        layers[number] = as_it_was(after, layers[number])
    return layers[number], states[number]


def _in_step(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with the host two layers ahead of a device: what a program replaces is free only when it has run."""
    begun: deque[Any] = deque()

    def run(program: Callable[..., Any], *args: Any) -> Any:
        result = call(program, *args)
        if program is append_to_layer:
            begun.append(result[0])  # hidden states, which no later program takes over
            if len(begun) > 2:
                jax.block_until_ready(begun.popleft())
        return result

    return run


def _renumbered(plan: GatedPlan, state: GatedState) -> GatedState:
    """The same with rows at positions one behind the other."""
    cache = plan.call(renumber, state.cache, plan.config.ropes)
    return state._replace(layers=list(cache.layers), states=list(cache.state), seen=cache.position)


def _on_host(tokens: Any, lengths: Any) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Both as int32. Raises ValueError for those that do not fit each other, and for arrays on a device."""
    check_array("tokens", tokens, "B,N", jnp.integer)
    known = check_lengths(lengths, *tokens.shape)
    if known is None or not isinstance(tokens, np.ndarray):
        raise ValueError("Gated reading needs tokens and lengths on the host.")
    return tokens.astype(np.int32), known.astype(np.int32)


def _check_renumbers(config: ModelConfig, method: Method, reading: Sequence[LayerPlan], more: int) -> None:
    """Raise ValueError for rows that cannot be moved, and for more of them than there are positions."""
    rows = max(group.capacity for plan in reading for group in plan.groups)
    if rows + more > config.max_positions:
        raise ValueError(
            f"Rows, window and chunk of {rows + more} tokens exceed the model's {config.max_positions} positions, "
            "so that no renumbering helps; take fewer rows or a smaller window."
        )
    if config.sliding_layers or method.cache_dtype is not None:
        what = "a model with sliding windows" if config.sliding_layers else f"cache_dtype={method.cache_dtype!r}"
        raise ValueError(f"Rows are renumbered where keys can be turned, which they cannot with {what}.")


def check_fills(config: ModelConfig, method: Method, request: RequestShape, lengths: Int[np.ndarray, " B"]) -> None:
    """Raise ValueError where no head of any of these prompts ever has to drop a row."""
    numbers, longest = range(len(config.global_layers)), int(lengths.max())
    if all(np.all(method.budget_rows(lengths, number, request) >= lengths[:, None]) for number in numbers):
        raise ValueError(
            f"{type(method).__name__} keeps all of a prompt of {counted(longest, 'token')} with this budget, which so "
            "never fills; gated reading needs a smaller one, or reading='whole'."
        )


def reading_bytes(config: ModelConfig, dtype: Any, method: Method, plans: Sequence[LayerPlan], gate: Gate) -> int:
    """Bytes of one sequence's cache while it is read: rows, window and chunk of all layers, and the largest twice."""
    reader = while_reading(method, gate.window, gate.chunk)
    held = plan_reading(plans, reader, rows_beside(method, reader), gate.window, gate.chunk)
    slots = [
        own.pool.count * own.pool.slots if own.pool else sum(group.capacity * len(group.heads) for group in own.groups)
        for own in held
    ]
    return (sum(slots) + max(slots)) * row_bytes(config.head_dim, dtype, dtype, stored=method.cache_dtype)


def _chunk(
    tokens: Int[np.ndarray, "B N"], begin: int, counts: Int[np.ndarray, " B"], width: int
) -> Int[np.ndarray, "B T"]:
    """A chunk of full width, with token 0 where a prompt has none left."""
    part = np.zeros((len(tokens), width), np.int32)
    there = tokens[:, begin : begin + width]
    part[:, : there.shape[1]] = there
    return np.where(np.arange(width) < counts[:, None], part, 0)
