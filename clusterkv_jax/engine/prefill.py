"""Prefill: a prompt read with the model, or a saved cache from its file, into what a slot takes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from clusterkv_jax import saving
from clusterkv_jax.cache.kinds import with_groups
from clusterkv_jax.cache.layers import KVCache, group_heads, groups, occupancy
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.decoding import prefill
from clusterkv_jax.engine.contexts import Context, ContextStore, PrefillResult
from clusterkv_jax.engine.layout import EngineLayout
from clusterkv_jax.engine.requests import (
    Request,
    answer_tokens,
    check_chat,
    context_batch,
    prompt_batch,
    request_of_batch,
    rows_alike,
)
from clusterkv_jax.engine.room import fits, room_behind
from clusterkv_jax.generation.batch import Batch, padded
from clusterkv_jax.generation.gated_reading import gated_prefill
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.heads_as_batch import repaged
from clusterkv_jax.methods.request import LayerPlan
from clusterkv_jax.runtime.errors import is_count, shown
from clusterkv_jax.runtime.prng import seed_key
from clusterkv_jax.text.prompts import as_chat, encode_all
from clusterkv_jax.text.tokenizer import Tokens


@dataclass(frozen=True, eq=False)
class SavedContext:
    """A saved cache in memory: its file, how many tokens it has read, its fingerprint, what a slot takes of it, and its
    tokens where an answer has left it.
    """

    path: Path
    length: int
    fingerprint: str
    result: PrefillResult = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)


class Prefiller:
    """Reads prompts and contexts: what the store holds of them, or else with the model.

    While it reads, it pauses now and then, with the request that is read or None.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        layout: EngineLayout,
        store: ContextStore,
        pause: Callable[[Request | None], None],
    ) -> None:
        self._pause = pause
        self.model, self.method, self.layout, self._contexts = model, method, layout, store
        self._held: tuple[Request, PrefillResult] | None = None
        self._since_pause = 0  # tokens of layers that were read

    def batch(self, prompt: Any, question: Any, **sizes: Any) -> Batch:
        """A request, encoded; `sizes` as in `make_batch`. Raises ValueError for what cannot be served."""
        sizes["prefill_chunk"] = self.layout.prefill_chunk
        if isinstance(prompt, Context):
            batch = context_batch(self.model, self.layout.limits, prompt, question, **sizes)
            if not rows_alike(self.model, self.method, prompt, batch.max_new_tokens):
                self.batch(list(prompt.tokens), None, max_new_tokens=batch.max_new_tokens)
            return batch
        return prompt_batch(self.model, self.method, self.layout.limits, prompt, question, **sizes)

    def read(self, number: int, text: Any, seed: int, max_new_tokens: int | None, **texts: Any) -> Context:
        """A new context in the store: of a text, token ids, or a saved cache, which may be in memory; `texts` as in
        `Engine.add`.
        """
        limits = self.layout.limits
        chat = as_chat(texts.pop("chat", False), texts.pop("system", None), texts.pop("chat_template_kwargs", None))
        check_chat(self.model, self.method, chat)
        if chat is not None and not isinstance(text, str):
            raise ValueError(f"prompt 0 must be a text to be part of a chat, got {shown(text)}.")
        if is_file(text) or isinstance(text, SavedContext):
            saved = text if isinstance(text, SavedContext) else self.saved(text)
            length, result = saved.length, saved.result
            new = answer_tokens(limits, length) if max_new_tokens is None else max_new_tokens
            sizes = length, saved.path, saved.fingerprint, seed, new
            context = Context(number, saved.tokens, *sizes, self._contexts, answered=bool(saved.tokens))
        else:
            in_chat = None if chat is None else partial(self._in_chat, text, chat=chat, **texts)
            # The template before a question is the same for every one.
            question = None if chat is None else ["x"]
            tokens = encode_all(self.model, [text], question, chat=chat, **texts)[0][0]
            new = answer_tokens(limits, len(tokens)) if max_new_tokens is None else max_new_tokens
            batch = self.batch(tokens, None, max_new_tokens=new)
            context = Context(number, tuple(tokens), len(tokens), None, None, seed, new, self._contexts, in_chat)
            result = self._read(batch, seed)
        self._contexts.add(context, result)
        return context

    def _in_chat(self, text: str, question: str, **texts: Any) -> Tokens:
        """Ids of a question about a text."""
        _, questions = encode_all(self.model, [text], [question], **texts)
        assert questions is not None
        return questions[0]

    def of_context(self, context: Context, question: int, max_new_tokens: int) -> tuple[PrefillResult, int]:
        """What was read of a context, and how many of its tokens are not read again.

        All are where it has no room for what follows, and for a request whose new tokens make another budget.
        """
        alike = rows_alike(self.model, self.method, context, max_new_tokens)
        if alike:
            result, cached = self.held(context)
            if question + max_new_tokens <= result.room:
                return result, cached
        result = self._read(self.batch(list(context.tokens), None, max_new_tokens=max_new_tokens), context.seed)
        if alike:
            self._contexts.put(context.number, result)
        return result, 0

    def held(self, context: Context) -> tuple[PrefillResult, int]:
        """What was read of a context, wherever it is, and how many of its tokens that are; read again if it is gone."""
        if (result := self._contexts.get(context.number)) is not None:
            return result, context.length
        result, cached = self._saved_again(context), context.length
        if result is None:
            batch = self.batch(list(context.tokens), None, max_new_tokens=context.max_new_tokens)
            result, cached = self._read(batch, context.seed), 0
        self._contexts.put(context.number, result)
        return result, cached

    def saved(self, path: Any) -> SavedContext:
        """A saved cache, in memory. Raises ValueError if it does not fit the slots."""
        return read_file(path, self.model, self.method, self.layout)

    def _saved_again(self, context: Context) -> PrefillResult | None:
        """The saved cache that a context is; None for one that its tokens must be read for."""
        if context.file is None:
            return None
        try:
            saved = self.saved(context.file)
            if saved.fingerprint != context.fingerprint:
                raise ValueError(f"The saved cache {context.file} is another one than this engine has read.")
        except ValueError:
            if not context.tokens:
                raise
            return None
        return saved.result

    def of_prompt(self, request: Request, following: Sequence[Request]) -> PrefillResult:
        """What is read of a prompt; held for the next one in the queue, where that is the same."""
        held, self._held = self._held, None
        if held is None or not request.reads_as(held[0]):
            del held  # there is room for one prompt at a time
            result = self._read(request.batch, request.read_seed, request)
        else:
            result = held[1]
        if any(request.reads_as(other) for other in following):
            self._held = request, result
        return result

    def hold_for(self, following: Sequence[Request]) -> None:
        """Let go of what is held, unless one of these asks the same."""
        if self._held is not None and not any(request.reads_as(self._held[0]) for request in following):
            self._held = None

    def _read(self, batch: Batch, seed: int, request: Request | None = None) -> PrefillResult:
        """Read a prompt. A pause comes whenever what was read, of this prompt and those before it, is as much as
        `layout.prefill_tokens` tokens in all layers; gated after each chunk.
        """
        most = self.model.config.num_layers * self.layout.prefill_tokens

        def on_layer(*_: Any) -> None:
            self._since_pause += batch.width
            if self._since_pause >= most:
                on_chunk()

        def on_chunk(*_: Any) -> None:
            self._since_pause = 0
            self._pause(request)

        return prefill_batch(self.model, self.method, self.layout, batch, seed, on_layer, on_chunk)


def prefill_batch(
    model: Model,
    method: Method,
    layout: EngineLayout,
    batch: Batch,
    seed: int,
    on_layer: Callable[..., None],
    on_chunk: Callable[..., None],
) -> PrefillResult:
    """Prefill of one prompt, with the slots' plans and the budgets that `generate` would give it.

    `on_layer` is called after each layer, and `on_chunk` gated after each chunk.
    """
    request = request_of_batch(model, method, batch)
    tokens, lengths = padded(batch.texts, batch.width), np.asarray([len(batch.texts[0])], np.int32)
    sizes: Any = {name: getattr(request, name) for name in ("max_new_tokens", "reserve", "step_tokens")}
    sizes |= {"whole": batch.whole, "plans": layout.plans, "key": seed_key(seed)}
    if layout.gate is None:
        sizes |= {"prefill_chunk": layout.prefill_chunk, "on_layer": on_layer}
        cache, logits = prefill(model.params, model.config, method, jnp.asarray(tokens), jnp.asarray(lengths), **sizes)
    else:
        sizes |= {"gate": layout.gate, "on_chunk": on_chunk}
        cache, logits = gated_prefill(model.params, model.config, method, tokens, lengths, **sizes)
    return PrefillResult(cache, logits, (occupancy(cache), occupancy(cache, windows=True)))


def is_file(prompt: Any) -> bool:
    """Whether a prompt is the path of a saved cache; a text is never one."""
    return isinstance(prompt, os.PathLike)


def read_file(path: Any, model: Model, method: Method, layout: EngineLayout) -> SavedContext:
    """A saved cache, in memory. Raises ValueError if it does not fit the slots."""
    limits = layout.limits
    cache, mark = saving.read(path, model.config, method)
    length = int(np.asarray(cache.position)[0])
    if cache.position.shape[0] != 1:
        raise ValueError(f"The saved cache {path} must hold one sequence, got {cache.position.shape[0]}.")
    if length >= limits.max_tokens:
        raise ValueError(f"The saved cache {path} of {length} tokens exceeds max_tokens = {limits.max_tokens}.")
    cache = _with_means(_in_pages_of(cache, layout.plans), layout.one)
    tokens = saving.origin(path).get("token_ids", [])
    if tokens != [] and not (isinstance(tokens, list) and len(tokens) == length and all(map(is_count, tokens))):
        raise ValueError(f"The saved cache {path} must hold its {length} tokens as token_ids, got {shown(tokens)}.")
    room = room_behind(cache, layout.one, limits.step_tokens) if fits(cache, layout.one) else 0
    if room < (1 if tokens else limits.reserve):
        raise ValueError(
            f"The saved cache {path} does not fit the engine's slots: it was made for more tokens than theirs, or with "
            "a reserve for which nothing is compressed later; save one with Engine.save."
        )
    logits = jnp.zeros(layout.logits.shape, layout.logits.dtype)
    result = PrefillResult(cache, logits, (occupancy(cache), occupancy(cache, windows=True)), room)
    return SavedContext(Path(path), length, mark, result, tuple(tokens))


def _in_pages_of(cache: KVCache, plans: Sequence[LayerPlan]) -> KVCache:
    """A cache whose heads of unequal budgets stand in the pages that slots have."""
    layers, states = list(cache.layers), list(cache.state)
    for i, (layer, plan) in enumerate(zip(cache.layers, plans, strict=True)):
        if plan.pool is not None:
            layers[i], states[i] = repaged(layer, cache.state[i], plan.pool)
    return replace(cache, layers=tuple(layers), state=tuple(states))


def _with_means(cache: KVCache, one: KVCache) -> KVCache:
    """A cache of codes from before they were stored less a mean of keys: with one of 0, where its slot has one."""
    if [group_heads(layer) for layer in cache.layers] != [group_heads(layer) for layer in one.layers]:
        return cache

    def with_mean(group: Any, slot: Any) -> Any:
        if group.key_mean is not None or slot.key_mean is None:
            return group
        return replace(group, key_mean=jnp.zeros(slot.key_mean.shape, jnp.float32))

    layers = tuple(
        with_groups(layer, list(map(with_mean, groups(layer), groups(slots))))
        for layer, slots in zip(cache.layers, one.layers, strict=True)
    )
    return replace(cache, layers=layers)
