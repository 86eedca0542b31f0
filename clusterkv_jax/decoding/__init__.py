"""Prefill, decode step and the jitted decode loop: pure functions over parameters and cache.

    prefill       embed -> [ read a layer: attention over the prompt, MLP -> compress its rows ] x L -> logits
    append_step   T more tokens at their true positions (a question); its caller asks `due` and calls `recompress`
    extend_step   the same, and `recompress` inside the program, under one condition
    decode_step   `extend_step` of one token per sequence
    decode_loop   a loop of decode steps and sampling: no host round trip per token

Prefill is a host loop over two programs. All layers and methods share the one that reads a layer, layers of equal plan
the one that compresses (`methods.prefill_compression`); only one layer's full KV is alive beside the compressed ones,
on a GPU that of a few layers while it is small. Decoding is one program with its layers unrolled, its cache donated,
and one scalar condition around the clustering of all layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from clusterkv_jax.cache.host_store import commit
from clusterkv_jax.cache.layers import KVCache
from clusterkv_jax.decoding.appending import append_step, next_tokens, surrogate_of
from clusterkv_jax.learned import repetition
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.driver import LayerPrompt, due, recompress, steps_until_due
from clusterkv_jax.methods.plan import (
    check_prompts,
    planned_layer,
    plans_of_width,
    repeats,
    repetition_of,
)
from clusterkv_jax.methods.prefill_compression import (
    ReadLayer,
    Workspace,
    compress,
    defers,
    layers_in_a_row,
    prompt_shapes,
    put_into,
    workspace_for,
)
from clusterkv_jax.methods.request import LayerPlan
from clusterkv_jax.models import decoder, prompt_forward
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.runtime.checks import check_array, check_counts, check_ids, check_key, check_lengths, on_host
from clusterkv_jax.runtime.control_flow import cond_in_place, while_with_maintenance
from clusterkv_jax.runtime.errors import out_of_memory_explained, shown
from clusterkv_jax.runtime.prng import own_key
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import constrain, constrain_cache
from clusterkv_jax.sampling import Sampling, next_token

# Most tokens of a call of `decode_loop`. A call costs the host 3 to 5 ms, two tokens' time on a fast device; while it
# runs, the host sees nothing, no interrupt either.
SEGMENT = 512


@own_settings()
def prefill(
    params: Params,
    config: ModelConfig,
    method: Method,
    tokens: Int[Array | np.ndarray, "B N"],
    lengths: Int[Array | np.ndarray, " B"],
    *,
    max_new_tokens: int = 64,
    reserve: int | None = None,
    step_tokens: int = 1,
    prefill_chunk: int | None = None,
    whole: int = 0,
    plans: Sequence[LayerPlan] | None = None,
    key: Key[Array, ""] | None = None,
    on_layer: Callable[[int, Array], None] | None = None,
    call: Callable[..., Any] = lambda program, *args: program(*args),
) -> tuple[KVCache, Float[Any, "B V"]]:
    """Read prompts of unequal length, padded on the right, and compress layer after layer.

    Args:
        params: parameters of the model.
        config: static.
        method: static; what is kept.
        tokens: ids; those at or beyond a sequence's length are padding and never matter.
        lengths: real tokens of each sequence, 1 ... N.
        max_new_tokens: tokens to be generated; counts in budgets of base "prompt+new".
        reserve: tokens that will be appended in all, questions included; `max_new_tokens` by default.
        step_tokens: most tokens appended at once, as `extend_step` does.
        prefill_chunk: projections and MLP of this many tokens of each sequence at a time, to bound activations; as
            many as `tokens_at_once` allows by default. The result is the same.
        whole: prompts of at most so many tokens are kept whole, whatever their budget.
        plans: of the layers, those of a longer request whose slots the cache is to fit; its own by default.
        key: PRNG key of methods that draw; that of seed 0 by default.
        on_layer: called with the number of each finished layer and its hidden states, which the next layer then takes
            over: wait for them, do not keep them. Outside jit only.
        call: runs the programs of which prefill consists; `programs.compile_ahead` compiles them instead.

    Returns:
        the cache, and the logits of each sequence's last prompt token.

    Raises:
        ValueError: if N exceeds the model's positions, a known length is not in 1 ... N, a known id before it is not in
            the vocabulary, a number is negative, or a budget is impossible. Under a jit that traces the lengths they
            and the ids cannot be checked; a head then keeps at least its sinks and recent rows.
        MemoryError: one sentence, if the device's or the host's memory does not suffice.
    """
    if not hasattr(type(method), "budget_rows"):
        raise ValueError(f"method must be an object such as CentroidKV(Budget(ratio=0.25)), got {shown(method)}.")
    check_array("tokens", tokens, "B,N", jnp.integer)
    check_key(key)
    batch, width = tokens.shape
    if width > config.max_positions:
        raise ValueError(f"A prompt of {width} tokens exceeds the model's {config.max_positions} positions.")
    numbers = check_lengths(lengths, batch, width)
    if numbers is not None:
        check_ids(tokens, config.vocab_size, numbers)
    reserve = max_new_tokens if reserve is None else reserve
    check_counts(0, max_new_tokens=max_new_tokens, reserve=reserve, whole=whole)
    check_counts(1, step_tokens=step_tokens, prefill_chunk=1 if prefill_chunk is None else prefill_chunk)
    counts = {"reserve": reserve, "step_tokens": step_tokens, "max_new_tokens": max_new_tokens, "whole": whole}
    request, own_plans = plans_of_width(config, method, params["embed"].dtype, width, **counts)
    check_prompts(config, method, request, np.empty(0, np.int64) if numbers is None else numbers.astype(np.int64))
    in_host_memory = method.storage == "host"
    # A copy, since a cache is donated; of numbers on the host the program itself makes one.
    copied = jnp.array if numbers is None or isinstance(lengths, jax.Array) else np.array
    position = copied(lengths, np.int32)

    with out_of_memory_explained(f"reading {batch} x {width:,} tokens", uses_host=in_host_memory):
        hidden, position = call(prompt_forward.embed, params, config, tokens, position)
        if in_host_memory:
            hidden, position = commit((hidden, position))
        rows, logits = None, None
        if repeats(config, method):
            args = params, config, repetition_of(method), tokens, prefill_chunk, hidden, position
            rows, logits = _read_and_repeat(*args, on_layer, call)

        known = (lengths if numbers is None else numbers), (own_plans if plans is None else plans.__getitem__)
        planned = cache(partial(planned_layer, config, method, request, *known))

        def following(number):
            return planned(number + 1)[0] if number + 1 < config.num_layers else None

        done, waiting, selection, workspace, draws, layers = [], [], None, None, None, layers_in_a_row(config)
        for number, weights in enumerate(params["layers"]):
            plan, budgets = planned(number)
            if rows is None:
                if "scores" in plan.inputs:
                    surrogate_of(weights, method)
                layer, parts = config.of_layer(number), _parts(method, plan)
                if not waiting:
                    shapes = prompt_shapes(layer, parts, hidden)
                    workspace = workspace_for(call, workspace, plan, following(number), shapes, layers)
                hidden, prompt = call(_read_layer, weights, layer, parts, prefill_chunk, hidden, position, workspace)
                if workspace is not None:
                    workspace, prompt = prompt, None
                if on_layer is not None:
                    on_layer(number, hidden)
            else:
                prompt = rows.pop(0)
            waiting.append(ReadLayer(number, plan, prompt, budgets))
            # While the device reads: it clusters in step with the host, and would wait.
            if not defers(waiting, workspace, following(number)):
                draws = own_key(key) if draws is None else draws
                compressed, selection, workspace = compress(call, method, waiting, draws, selection, workspace)
                done.extend(compressed)
                waiting.clear()
            prompt = None  # a layer's rows go as soon as it is compressed
        workspace = None
        logits = call(prompt_forward.last_logits, params, config, hidden, position) if logits is None else logits
        caches, state = zip(*done, strict=True)
        return KVCache(caches, state, position), logits


def _read_and_repeat(
    params: Params,
    config: ModelConfig,
    how: repetition.Repetition,
    tokens: Int[Array | np.ndarray, "B N"],
    chunk: int | None,
    hidden: Float[Any, "B N M"],
    lengths: Int[Any, " B"],
    on_layer: Callable[[int, Array], None] | None,
    call: Callable[..., Any],
) -> tuple[list[LayerPrompt], Float[Any, "B V"]]:
    """What every layer makes of the prompts, with scores after the model has repeated them; and the prompts' logits."""
    read: list[LayerPrompt] = []
    for number, weights in enumerate(params["layers"]):
        hidden, prompt = call(_read_layer, weights, config.of_layer(number), frozenset(), chunk, hidden, lengths, None)
        read.append(prompt)
        if on_layer is not None:
            on_layer(number, hidden)
    logits = call(prompt_forward.last_logits, params, config, hidden, lengths)
    del hidden
    words, prefix = repetition.in_frame(how, tokens, lengths)
    asked = repetition.prompts(words, tokens[:, prefix:], how.chunk)
    options = {"chunk": how.chunk, "sinks": how.sinks, "normalize": how.normalize, "prefix": prefix, "call": call}
    rows = [(prompt.keys, prompt.values) for prompt in read]
    scores = repetition.repeated(params, config, rows, jnp.asarray(tokens), lengths, prompts=asked, **options)
    return [replace(prompt, scores=score) for prompt, score in zip(read, scores, strict=True)], logits


@own_settings()
def decode_step(
    params: Params, config: ModelConfig, method: Method, cache: KVCache, token: Int[Array, " B"]
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Append one token per sequence at its true position, attend, and cluster if due; logits of the next token.

    Pure: jit it with `config` and `method` static and the cache donated. A cache has slots for the `reserve` it was
    made with; a token beyond them turns the logits to NaN rather than be dropped without a sign.

    Raises ValueError if `token` is not one whole number per sequence, or if one that lies on the host is not in the
    vocabulary: neither a traced number nor one on an accelerator is looked at, since steps wait for nothing.
    """
    check_array("token", token, "B", jnp.integer)
    if token.shape != cache.position.shape:
        raise ValueError(f"token must hold one id for each of {cache.position.size} sequences, got {token.shape}.")
    if on_host(token):
        check_ids(token, config.vocab_size)
    return extend_step(params, config, method, cache, token[:, None], jnp.ones(token.shape, jnp.int32))


@own_settings()
def extend_step(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Append the first `counts` of T tokens to each sequence and compress if due; logits after the last of them."""
    tokens, counts = (x.astype(jnp.int32) for x in (tokens, counts))
    cache, logits = append_step(params, config, method, cache, tokens, counts)
    if (late := due(method, cache)) is not None:
        cache = cond_in_place(late, partial(recompress, method, ropes=config.ropes), cache)
    return cache, logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Where a batch stands between decode steps.

    Attributes:
        cache: of all sequences.
        token: the last token of each sequence, not in the cache yet.
        ended: sequences that generate no more.
    """

    cache: KVCache
    token: Int[Array, " B"]
    ended: Bool[Array, " B"]


@jit(static_argnames=("config", "method", "sampling", "eos_ids", "steps"), donate_argnames=("state",), decodes=True)
def decode_loop(
    params: Params,
    config: ModelConfig,
    method: Method,
    state: DecodeState,
    key: Key[Array, "..."],
    first: Int[Array | np.ndarray, ""],
    limit: Int[Array | np.ndarray, ""],
    *,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    steps: int,
) -> tuple[DecodeState, Int[Array, "B steps"], Int[Array, ""]]:
    """Up to `limit` <= `steps` decode steps, fewer if every sequence has ended; one program however many.

    Args:
        params, config, method: as in `decode_step`.
        state: donated.
        key: PRNG key of each request, or one for all.
        first: number of the first token to be drawn, so that segments of a generation draw as an unbroken one does.
        limit: most steps.
        sampling: static.
        eos_ids: static; a sequence ends with one of these.
        steps: static size of the token buffer.

    Returns:
        the state afterwards, the new tokens (-1 where a sequence had ended), and the number of steps. A step's token is
        `NOT_FINITE` where the model's logits are not; such a sequence says nothing more that means anything.
    """
    ends = jnp.asarray(eos_ids, jnp.int32)

    def running(carry):
        step, state, _ = carry
        return (step < limit) & ~jnp.all(state.ended)

    def one(carry):
        step, state, tokens = carry
        choose = partial(next_token, sampling=sampling, key=key, step=first + step)
        cache, token, counts = state.cache, state.token, jnp.ones_like(state.token)
        cache, _, token, ended = next_tokens(params, config, method, cache, token, counts, choose, ends)
        tokens = jax.lax.dynamic_update_slice(tokens, jnp.where(state.ended, -1, token)[:, None], (0, step))
        return step + 1, DecodeState(cache, token, state.ended | ended), tokens

    def room(carry):
        return steps_until_due(method, carry[1].cache)

    def compressed(carry):
        step, state, tokens = carry
        return step, replace(state, cache=recompress(method, state.cache, ropes=config.ropes)), tokens

    tokens = jnp.full((state.token.shape[0], steps), -1, jnp.int32)
    start = jnp.zeros((), jnp.int32), state, tokens
    step, state, tokens = while_with_maintenance(running, one, room, compressed, start)
    # As they are before a first segment: a mesh that splits them would have the same program compiled twice.
    position, token, ended = (constrain(x, None) for x in (state.cache.position, state.token, state.ended))
    return DecodeState(replace(state.cache, position=position), token, ended), tokens, step


append_step_jit = jit(static_argnames=("config", "method"), donate_argnames=("cache",))(append_step)


@jit(static_argnames=("sampling",))
def next_token_jit(
    logits: Float[Array, "B V"], sampling: Sampling, key: Key[Array, "..."], number: Int[Array, ""] | int
) -> Int[Array, " B"]:
    """`next_token`, whole on every device of a mesh, as `decode_loop` gives it back."""
    return constrain(next_token(logits, sampling, key, number), None)


def _parts(method: Method, plan: LayerPlan) -> frozenset[str]:
    """What a method is given of a prompt beside keys and values. What recalls rows takes queries if there are any."""
    takes = not method.forgets and plan.window is None and not all(group.keep_all for group in plan.groups)
    return plan.inputs & {"queries", "hidden", "scores"} | ({"queries"} if takes else set())


@jit(static_argnames=("config", "parts", "chunk"), donate_argnames=("hidden", "workspace"))
def _read_layer(
    weights: Params,
    config: ModelConfig,
    parts: frozenset[str],
    chunk: int | None,
    hidden: Float[Array, "B N M"],
    lengths: Int[Array, " B"],
    workspace: Workspace | None,
) -> tuple[Float[Array, "B N M"], LayerPrompt | Workspace]:
    """One layer over the whole prompt, and these parts of what it makes of it; or the workspace with them in its next
    place, rows beyond the lengths zeroed.
    """

    def on_tokens(x):
        return constrain(x, "batch", "tokens", None)

    entering = on_tokens(decoder.attention_input(weights, config, hidden)) if "hidden" in parts else None
    surrogate = weights["surrogate"] if "scores" in parts else None
    hidden, q, k, v, scores = prompt_forward.over_prompt(weights, config, chunk, hidden, surrogate)
    q, k, v, scores = constrain_cache((q if "queries" in parts else None, k, v, scores))
    if workspace is None:
        return on_tokens(hidden), LayerPrompt(q, k, v, lengths, entering, scores)
    return hidden, put_into(workspace, LayerPrompt(q, k, v, lengths, entering, scores))
