"""The cache of all slots and the programs over it: one sequence per slot, shapes that never change.

    template         the shapes of one sequence's cache, of the longest request
    insert           a compressed prompt into a slot, at a traced number
    extract          a copy of a slot
    append_question  question tokens into slots
    sample_first     the first token of slots that are new
    decode           decode steps of the slots that are active, until a limit, until too few are, or one is due

A slot without a token in a step neither grows nor is compressed, whatever it holds. No program compresses: the host
does between two of them (`methods.recompression`), and few answers are so long that it has to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.cache.host_store import commit, place
from clusterkv_jax.cache.kinds import in_pages, with_groups
from clusterkv_jax.cache.layers import KVCache, copy_sequences, groups
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.decoding import prefill
from clusterkv_jax.decoding.appending import append_layerwise, next_tokens
from clusterkv_jax.engine.logits import Logprobs, counts_of, logprobs_of
from clusterkv_jax.engine.sampling import SamplingState, draw
from clusterkv_jax.generation.batch import padded
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.driver import placed, placed_state
from clusterkv_jax.methods.families.recall import SHORT_ANSWER
from clusterkv_jax.methods.heads_as_batch import cut
from clusterkv_jax.methods.plan import plan_of_layer
from clusterkv_jax.methods.recompression import recompress_late, room_of_sequences
from clusterkv_jax.methods.request import LayerPlan, RequestShape
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.runtime.control_flow import while_running
from clusterkv_jax.runtime.programs import compiler, jit
from clusterkv_jax.runtime.sharding import constrain, fetch
from clusterkv_jax.sampling import NOT_FINITE
from clusterkv_jax.text.tokenizer import Tokens

NO_QUESTION: tuple[Tokens, int] = ([], 1)
# The narrowest prompt that `generate` reads.
NARROWEST = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Where all sequences stand: the last token of each is not in the cache yet; `logits` are those of its question."""

    cache: KVCache
    token: Int[Array, " B"]
    logits: Float[Array, "B V"]


def slot_plans(config: ModelConfig, method: Method, request: RequestShape) -> tuple[LayerPlan, ...]:
    """The plans of all layers, for prompts of every length that the request names."""
    return tuple(_plan(config, method, layer, request) for layer in range(config.num_layers))


def _plan(config: ModelConfig, method: Method, number: int, request: RequestShape) -> LayerPlan:
    """As for one request. Recall reads a short prompt whole, and its short answer: a step may recall as many rows."""
    plan, layer = plan_of_layer(config, method, number, request), config.global_number(number)
    if method.forgets or layer is None:
        return plan
    short = replace(request, lengths=np.arange(1, NARROWEST + 1), reserve=0)
    whole = bool(np.min(method.budget_rows(short.lengths, layer, short)) >= MOST_ROWS)
    extra = min(SHORT_ANSWER, request.reserve) if whole else 0
    return replace(plan, groups=tuple(replace(group, most_rows=group.most_rows + extra) for group in plan.groups))


def template(
    params: Params,
    config: ModelConfig,
    method: Method,
    plans: Sequence[LayerPlan],
    width: int,
    *,
    reserve: int,
    step_tokens: int,
) -> tuple[KVCache, Any]:
    """Shapes of the cache and logits of one sequence whose prompt has this width."""
    config = replace(config, max_positions=4 * config.max_positions)  # shapes alone: no position is looked at
    tokens, lengths = jax.ShapeDtypeStruct((1, width), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def read(params, tokens, lengths):
        return prefill(
            params,
            config,
            method,
            tokens,
            lengths,
            plans=plans,
            max_new_tokens=1,
            reserve=reserve,
            step_tokens=step_tokens,
        )

    return jax.eval_shape(read, params, tokens, lengths)


def empty(one: KVCache, logits: Any, slots: int, method: Method) -> Slots:
    """Slots that hold nothing, on the devices of the ambient mesh."""

    def made() -> Slots:
        def zeros(x):
            return jnp.zeros((slots, *x.shape[1:]), x.dtype)

        return _laid(method, Slots(*jax.tree.map(zeros, (one, jax.ShapeDtypeStruct((1,), jnp.int32), logits))))

    empty = jit()(made)()
    return replace(empty, cache=placed_on_host(empty.cache, method))


def _laid(method: Method, slots: Slots) -> Slots:
    """Slots on the devices of the ambient mesh, the same ones after each program, so that none is compiled twice."""
    cache = slots.cache
    layers, position = placed(method, cache.layers), constrain(cache.position, "batch")
    cache = KVCache(layers, placed_state(method, cache.state), position)
    return Slots(cache, constrain(slots.token, "batch"), constrain(slots.logits, "batch", None))


def placed_on_host(cache: KVCache, method: Method) -> KVCache:
    """The cache with the rows of a host store in the host's memory."""
    if method.storage != "host":
        return cache
    layers = tuple(
        with_groups(layer, [place(group, memory) for group, memory in zip(groups(layer), state, strict=True)])
        for layer, state in zip(cache.layers, cache.state, strict=True)
    )
    return commit(replace(cache, layers=layers))


@jit(static_argnames=("method",), donate_argnames=("slots",))
def insert(
    method: Method,
    slots: Slots,
    cache: KVCache,
    logits: Float[Array, "1 V"],
    slot: Int[Array | np.ndarray, ""],
) -> Slots:
    """A sequence's cache and logits in a slot; what it has no rows for becomes empty."""

    def put(x: Array, part: Array) -> Array:
        start = (slot, *[jnp.int32(0)] * (x.ndim - 1))
        return jax.lax.dynamic_update_slice(x, _fit(part, x.shape[1:]), start)

    new = jax.tree.map(put, (slots.cache, slots.logits), (cache, logits))
    return _laid(method, Slots(new[0], slots.token, new[1]))


@jit(static_argnames=("method", "for_questions"))
def extract(method: Method, slots: Slots, slot: Int[Array | np.ndarray, ""], for_questions: bool = False) -> Slots:
    """A copy of one slot; `for_questions` with as many pages in each layer, so that layers share programs."""
    one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), slots)
    return _laid(method, replace(one, cache=_in_pools_alike(one.cache)) if for_questions else one)


def _in_pools_alike(cache: KVCache) -> KVCache:
    """A cache whose heads of unequal budgets have as many pages in each layer, empty ones behind those there are."""
    count = max((layer.degree.shape[1] for layer in cache.layers if in_pages(layer)), default=0)
    parts = [
        cut(layer, state, count) if in_pages(layer) else (layer, state)
        for layer, state in zip(cache.layers, cache.state, strict=True)
    ]
    layers, states = zip(*parts, strict=True)
    return replace(cache, layers=layers, state=states)


def append_question(
    model: Model,
    method: Method,
    slots: Slots,
    tokens: Int[Array | np.ndarray, "B T"],
    counts: Int[Array | np.ndarray, " B"],
    call: Callable[..., Any] = lambda program, *args: program(*args),
) -> tuple[Slots, Bool[Any, " B"] | None]:
    """The first `counts` of T question tokens enter each slot; logits are those after the last of them.

    And which slots are then due; None where none ever is.
    """
    args = model.params, model.config, method, slots.cache, tokens, counts
    cache, logits, late = append_layerwise(*args, slots.logits, call=call)
    return Slots(cache, slots.token, logits), late


def compile_questions(model: Model, method: Method, slots: Slots, width: int) -> None:
    """Compile whatever `append_questions` may call, so that no later question waits for it."""
    compile, number = compiler(), np.zeros((), np.int32)

    def feed(slots: Slots) -> None:
        count = slots.token.shape[0]
        append_question(model, method, slots, np.zeros((count, width), np.int32), np.zeros(count, np.int32), compile)

    feed(slots)
    if method.storage != "host" and slots.token.size > 2:  # of two, one is half
        one = compile(extract, method, slots, number, True)
        feed(one)
        compile(insert, method, slots, one.cache, one.logits, number)


def append_questions(
    model: Model, method: Method, slots: Slots, asked: Mapping[int, tuple[Tokens, int]], width: int
) -> Slots:
    """Whole questions enter their slots, each so many tokens at a time; each call of the program has `width`.

    Where half of the slots or more are asked, all of them at once: the weights are read for all. Fewer are asked one by
    one, each in a copy of its slot: tokens of every slot would take as long as many decode steps, and one program that
    cuts a slot out and puts it back copies all of them. Only rows of a host store stay where they are.
    """
    asked = {slot: (question, tokens) for slot, (question, tokens) in asked.items() if question}
    feed = partial(_feed, model, method, width)
    count = slots.token.size
    if 2 * len(asked) >= count:
        return feed(slots, [asked.get(slot, NO_QUESTION) for slot in range(count)])
    for slot, one in asked.items():
        if method.storage == "host":
            slots = feed(slots, [one if other == slot else NO_QUESTION for other in range(count)])
        else:
            number = np.asarray(slot, np.int32)
            here = feed(extract(method, slots, number, True), [one])
            slots = insert(method, slots, here.cache, here.logits, number)
    return slots


def _feed(model: Model, method: Method, width: int, slots: Slots, questions: Sequence[tuple[Tokens, int]]) -> Slots:
    """A question, maybe none, enters each slot, so many tokens at a time."""
    for call in range(max(-(-len(question) // tokens) for question, tokens in questions)):
        texts = [question[call * tokens : (call + 1) * tokens] for question, tokens in questions]
        counts = np.asarray([len(text) for text in texts], np.int32)
        slots, late = append_question(model, method, slots, padded(texts, width), counts)
        slots = recompressed(model, method, slots, None if late is None else fetch(late) & (counts > 0))
    return slots


def recompressed(model: Model, method: Method, slots: Slots, late: Bool[np.ndarray, " B"] | None) -> Slots:
    """Slots after those that are late have been brought back to their budgets."""
    if late is None or not late.any():
        return slots
    return replace(slots, cache=recompress_late(method, slots.cache, model.config.ropes, late))


@jit()
def sample_first(
    logits: Float[Array, "B V"],
    token: Int[Array, " B"],
    sampling: SamplingState,
    new: Bool[Array | np.ndarray, " B"],
) -> tuple[Int[Array, " B"], Logprobs | None]:
    """The tokens of slots, of new ones their first; and log probabilities where one asks."""
    said = _nothing_said(logits, token, sampling, 1)
    token = constrain(jnp.where(new, draw(logits, sampling, 0, said.counts), token), "batch")
    return token, None if sampling.logits is None else logprobs_of(logits, token)


@jit(static_argnames=("config", "method", "eos_ids", "steps"), donate_argnames=("slots",), decodes=True)
def decode(
    params: Params,
    config: ModelConfig,
    method: Method,
    slots: Slots,
    sampling: SamplingState,
    active: Bool[Array | np.ndarray, " B"],
    left: Int[Array | np.ndarray, " B"],
    limit: Int[Array | np.ndarray, ""],
    fewest: Int[Array | np.ndarray, ""],
    *,
    eos_ids: tuple[int, ...],
    steps: int,
) -> tuple[Slots, Int[Array, "B steps"], Logprobs | None, Int[Array, ""], Bool[Array, " B"] | None]:
    """Up to `limit` <= `steps` decode steps, while at least `fewest` slots are active and none is due.

    Args:
        params, config, method: as in `decode_step`.
        slots: donated.
        sampling: of the first step.
        active: slots that generate.
        left: tokens that each may still generate.
        limit: most steps.
        fewest: at least 1.
        eos_ids: static; a sequence ends with one of these.
        steps: static size of the token buffer.

    Returns:
        the slots, the new tokens (-1 where a slot was not active), their log probabilities where `sampling.logits` is
        there, the number of steps, and which slots are then due; None, statically, where none ever is.
    """
    ends = jnp.asarray(eos_ids, jnp.int32)

    room = room_of_sequences(method, slots.cache)
    if room is not None:  # a step takes one, and the first slot without any ends the loop
        limit = jnp.minimum(limit, jnp.maximum(jnp.min(jnp.where(active, room, MOST_ROWS)), 1))

    def running(carry):
        step, _, now, _ = carry
        return (step < limit) & (jnp.sum(now, dtype=jnp.int32) >= fewest)

    def one(carry):
        step, (cache, token), now, said = carry

        def choose(logits):
            return jnp.where(now, draw(logits, sampling, step, said.counts), -1)

        counts = now.astype(jnp.int32)
        cache, logits, new, ends_here = next_tokens(params, config, method, cache, token, counts, choose, ends)
        token = jnp.where(now, new, token)
        ended = (ends_here & ~jnp.asarray(sampling.ignore_eos)) | (new == NOT_FINITE)
        return step + 1, (cache, token), now & ~ended & (step + 1 < left), _say(said, logits, new, step)

    said = _nothing_said(slots.logits, slots.token, sampling, steps)
    start = jnp.zeros((), jnp.int32), (slots.cache, slots.token), active, said
    step, (cache, token), _, said = while_running(running, one, start)
    late = _late(method, cache, jnp.asarray(active))
    return _laid(method, Slots(cache, token, slots.logits)), said.tokens, said.logprobs, step, late


def _late(method: Method, cache: KVCache, moved: Bool[Array, " B"]) -> Bool[Array, " B"] | None:
    """Which sequences are due; never one that no token has entered."""
    room = room_of_sequences(method, cache)
    return None if room is None else constrain((room <= 0) & moved, None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Said:
    """What B slots say in a call: tokens; how often each has said each token, and log probabilities, or None."""

    tokens: Int[Array, "B steps"]
    counts: Int[Array, "B V"] | None
    logprobs: Logprobs | None


def _nothing_said(logits: Float[Array, "B V"], token: Int[Array, " B"], sampling: SamplingState, steps: int) -> _Said:
    count, vocab_size = logits.shape
    tokens = jnp.full((count, steps), -1, jnp.int32)
    if sampling.logits is None:
        return _Said(tokens, None, None)
    some = jax.eval_shape(logprobs_of, logits, token)
    room = jax.tree.map(lambda x: jnp.zeros((count, steps, *x.shape[1:]), x.dtype), some)
    return _Said(tokens, counts_of(sampling.logits, vocab_size), room)


def _say(said: _Said, logits: Float[Array, "B V"], new: Int[Array, " B"], step: Int[Array, ""]) -> _Said:
    """With the tokens of a step; -1 is none."""
    tokens = jax.lax.dynamic_update_slice(said.tokens, new[:, None], (0, step))
    if said.counts is None:
        return replace(said, tokens=tokens)
    counts = said.counts.at[jnp.arange(new.size), jnp.maximum(new, 0)].add((new >= 0).astype(jnp.int32))

    def put(room: Array, x: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(room, x[:, None], step, 1)

    return _Said(tokens, counts, jax.tree.map(put, said.logprobs, logprobs_of(logits, new)))


def _fit(part: Array, shape: tuple[int, ...]) -> Array:
    """An array [1, ...] as [1, *shape]: zeros behind what is shorter, what is longer cut."""
    if part.shape[1:] == shape:
        return part
    part = part[(slice(None), *(slice(size) for size in shape))]
    return jnp.pad(part, [(0, 0), *((0, size - now) for size, now in zip(shape, part.shape[1:], strict=True))])


def statistics_of_slot(cache: KVCache, slot: int) -> KVCache:
    """What statistics look at, of one slot: rows of keys and values stay where they are."""
    number = jnp.asarray([slot], jnp.int32)

    def none(x):
        return jnp.zeros((1, *x.shape[1:2], 0, *x.shape[3:]), x.dtype)

    parts = []
    for layer, state in zip(cache.layers, cache.state, strict=True):
        for group, memory in zip(groups(layer), state, strict=True):
            parts.append((group.length, {k: x for k, x in (memory or {}).items() if k in ("recalled", "counts")}))
    fetched = iter(copy_sequences(parts, number))
    layers, states = [], []
    for layer, state in zip(cache.layers, cache.state, strict=True):
        small, memories = [], []
        for group, memory in zip(groups(layer), state, strict=True):
            length, some = next(fetched)
            rest = jax.tree.map(lambda x: none(x) if x.ndim > 2 else x, group)
            small.append(replace(rest, length=length))
            memories.append(None if memory is None else jax.tree.map(none, memory) | some)
        layers.append(with_groups(layer, small))
        states.append(tuple(memories))
    return KVCache(tuple(layers), tuple(states), cache.position[number])
