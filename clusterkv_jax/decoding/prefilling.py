"""Prefill: a host loop over two programs.

    prefill       embed -> [ read a layer: attention over the prompt, MLP -> compress its rows ] x L -> logits

All layers and methods share the one that reads a layer, layers of equal plan the one that compresses
(`methods.prefill_compression`); only one layer's full KV is alive beside the compressed ones, on a GPU that of a few
layers while it is small.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.cache.host_store import commit
from clusterkv_jax.cache.layers import KVCache, Layer
from clusterkv_jax.decoding.appending import surrogate_of
from clusterkv_jax.learned import repetition
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.driver import LayerPrompt
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
from clusterkv_jax.runtime.checks import check_array, check_counts, check_ids, check_key, check_lengths
from clusterkv_jax.runtime.errors import out_of_memory_explained, shown
from clusterkv_jax.runtime.prng import own_key
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import constrain, constrain_cache


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
    check_key(key)
    numbers = _known_lengths(config, tokens, lengths)
    reserve = max_new_tokens if reserve is None else reserve
    check_counts(0, max_new_tokens=max_new_tokens, reserve=reserve, whole=whole)
    check_counts(1, step_tokens=step_tokens, prefill_chunk=1 if prefill_chunk is None else prefill_chunk)
    (batch, width), in_host_memory = tokens.shape, method.storage == "host"
    counts = {"reserve": reserve, "step_tokens": step_tokens, "max_new_tokens": max_new_tokens, "whole": whole}
    request, own_plans = plans_of_width(config, method, number_dtype(params), width, **counts)
    check_prompts(config, method, request, np.empty(0, np.int64) if numbers is None else numbers.astype(np.int64))
    known = (lengths if numbers is None else numbers), (own_plans if plans is None else plans.__getitem__)
    planned = cache(partial(planned_layer, config, method, request, *known))
    # A copy, since a cache is donated; of numbers on the host the program itself makes one.
    copied = jnp.array if numbers is None or isinstance(lengths, jax.Array) else np.array
    position = copied(lengths, np.int32)

    with out_of_memory_explained(f"reading {batch} x {width:,} tokens", uses_host=in_host_memory):
        hidden, position = call(prompt_forward.embed, params, config, tokens, position)
        if in_host_memory:
            hidden, position = commit((hidden, position))
        if repeats(config, method):
            args = params, config, repetition_of(method), tokens, prefill_chunk, hidden, position
            read, logits = _read_and_repeat(*args, on_layer, call)
            layers, state = _compress_read(method, planned, read, key, call)
        else:
            args = params, config, method, planned, prefill_chunk, hidden, position
            hidden, layers, state = _read_and_compress(*args, key, on_layer, call)
            logits = call(prompt_forward.last_logits, params, config, hidden, position)
        return KVCache(layers, state, position), logits


def _known_lengths(config: ModelConfig, tokens: Any, lengths: Any) -> np.ndarray | None:
    """The lengths of prompts as numbers, None where they are traced. Raises ValueError as `prefill` does."""
    check_array("tokens", tokens, "B,N", jnp.integer)
    batch, width = tokens.shape
    if width > config.max_positions:
        raise ValueError(f"A prompt of {width} tokens exceeds the model's {config.max_positions} positions.")
    numbers = check_lengths(lengths, batch, width)
    if numbers is not None:
        check_ids(tokens, config.vocab_size, numbers)
    return numbers


def _read_and_compress(
    params: Params,
    config: ModelConfig,
    method: Method,
    planned: Callable[[int], tuple[LayerPlan, Any]],
    chunk: int | None,
    hidden: Float[Any, "B N M"],
    lengths: Int[Any, " B"],
    key: Key[Array, ""] | None,
    on_layer: Callable[[int, Array], None] | None,
    call: Callable[..., Any],
) -> tuple[Float[Any, "B N M"], tuple[Layer, ...], tuple[Any, ...]]:
    """Layer after layer, or a few read into a workspace and compressed at once: the last one's hidden states, the
    layers' caches and the states of their groups.
    """
    done, waiting, selection, workspace, draws = [], [], None, None, None
    for number, weights in enumerate(params["layers"]):
        plan, budgets = planned(number)
        following = planned(number + 1)[0] if number + 1 < config.num_layers else None
        if "scores" in plan.inputs:
            surrogate_of(weights, method)
        layer, parts = config.of_layer(number), _parts(method, plan)
        if not waiting:
            shapes = prompt_shapes(layer, parts, hidden)
            workspace = workspace_for(call, workspace, plan, following, shapes, layers_in_a_row(config))
        hidden, prompt = call(_read_layer, weights, layer, parts, chunk, hidden, lengths, workspace)
        if workspace is not None:
            workspace, prompt = prompt, None
        if on_layer is not None:
            on_layer(number, hidden)
        waiting.append(ReadLayer(number, plan, prompt, budgets))
        # While the device reads: it clusters in step with the host, and would wait.
        if not defers(waiting, workspace, following):
            draws = own_key(key) if draws is None else draws
            compressed, selection, workspace = compress(call, method, waiting, draws, selection, workspace)
            done.extend(compressed)
            waiting.clear()
        prompt = None  # a layer's rows go as soon as it is compressed
    layers, state = zip(*done, strict=True)
    return hidden, layers, state


def _compress_read(
    method: Method,
    planned: Callable[[int], tuple[LayerPlan, Any]],
    read: list[LayerPrompt],
    key: Key[Array, ""] | None,
    call: Callable[..., Any],
) -> tuple[tuple[Layer, ...], tuple[Any, ...]]:
    """The layers that have been read, each compressed by itself, after which its rows go."""
    done, selection, draws = [], None, own_key(key)
    for number in range(len(read)):
        plan, budgets = planned(number)
        layer = [ReadLayer(number, plan, read.pop(0), budgets)]
        compressed, selection, _ = compress(call, method, layer, draws, selection, None)
        layer.clear()
        done.extend(compressed)
    layers, state = zip(*done, strict=True)
    return layers, state


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
