"""From what a caller adds to an order: encoded, and checked against the model, the method and the slots."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from clusterkv_jax import saving
from clusterkv_jax.batch import Batch, make_batch
from clusterkv_jax.cache import KVCache, group_heads, groups, occupancy
from clusterkv_jax.checkpoints import Model
from clusterkv_jax.decoding import check_prompts
from clusterkv_jax.engine.contexts import Context, Reading
from clusterkv_jax.errors import shown
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.request import Request, request_of_model
from clusterkv_jax.sampling import Sampling, check_seed


@dataclass(frozen=True)
class Limits:
    """What a slot has room for: tokens of a sequence, and of what follows its prompt; question tokens of a step."""

    max_tokens: int
    reserve: int
    step_tokens: int


def prompt_batch(model: Model, method: Method, limits: Limits, prompt: Any, question: Any, **sizes: Any) -> Batch:
    """A prompt and its question, encoded. Raises ValueError for what cannot be served."""
    questions = None if question is None else [question]
    batch = make_batch(model, [prompt], questions=questions, **sizes)
    check_lengths(limits, len(batch.texts[0]), batch)
    request = request_of_batch(model, batch)
    check_prompts(model.config, method, request, np.asarray([len(batch.texts[0])], np.int64))
    return batch


def context_batch(model: Model, limits: Limits, context: Context, question: Any, **sizes: Any) -> Batch:
    """A question to a context, encoded; the context's own tokens were checked when it was read."""
    stand_in = list(context.tokens[:1]) or [0]
    questions = None if question is None else [question]
    batch = make_batch(model, [stand_in], questions=questions, **sizes)
    if question is None and context.file is not None:
        raise ValueError(f"The saved cache {context.file} holds no logits; give a question that continues its text.")
    check_lengths(limits, context.length, batch)
    return replace(batch, texts=[list(context.tokens)])


def check_settings(sampling: Any, seed: Any) -> None:
    """Raise ValueError for a sampling or a seed that `generate` would not take."""
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be an object such as Sampling(temperature=0.5) or None, got {shown(sampling)}.")
    check_seed(seed)


def check_lengths(limits: Limits, prompt: int, batch: Batch) -> None:
    """Raise ValueError for a sequence that no slot has room for."""
    question = len(batch.questions[0]) if batch.questions else 0
    after = question + batch.max_new_tokens
    if prompt + after > limits.max_tokens:
        raise ValueError(
            f"A prompt of {prompt} tokens, its question of {question} and {batch.max_new_tokens} new tokens exceed "
            f"the engine's max_tokens = {limits.max_tokens}."
        )
    if after > limits.reserve:
        raise ValueError(
            f"A question of {question} tokens and {batch.max_new_tokens} new tokens exceed the engine's "
            f"reserve = {limits.reserve}."
        )


def request_of_batch(model: Model, batch: Batch) -> Request:
    """The request that `generate` would make of it."""
    counts = {name: getattr(batch, name) for name in ("reserve", "step_tokens", "max_new_tokens")}
    lengths = np.arange(1, batch.width + 1)
    return request_of_model(model.config, model.params["embed"].dtype, lengths, **counts)


def is_file(prompt: Any) -> bool:
    """Whether a prompt is the path of a saved cache; a text is never one."""
    return isinstance(prompt, os.PathLike)


def read_file(path: Any, model: Model, method: Method, one: KVCache, limits: Limits) -> tuple[Path, int, Reading]:
    """A saved cache, as long as its text, for slots of these shapes. Raises ValueError if it does not fit them."""
    path = Path(path)
    cache = saving.load(path, model.config, method)
    length = int(np.asarray(cache.position)[0])
    if cache.position.shape[0] != 1:
        raise ValueError(f"The saved cache {path} must hold one sequence, got {cache.position.shape[0]}.")
    if length >= limits.max_tokens:
        raise ValueError(f"The saved cache {path} of {length} tokens exceeds max_tokens = {limits.max_tokens}.")
    if not _fits(cache, one, limits):
        raise ValueError(
            f"The saved cache {path} does not fit the engine's slots: it was made for more tokens than theirs, or with "
            "a reserve for which nothing is compressed later; save one with Engine.save."
        )
    return path, length, Reading(cache, None, occupancy(cache))


def _fits(cache: KVCache, one: KVCache, limits: Limits) -> bool:
    """Whether a cache has a slot's arrays, none of them larger, and room in it for all that may follow."""
    if jax.tree.structure(cache) != jax.tree.structure(one):
        return False
    for x, slot in zip(jax.tree.leaves(cache), jax.tree.leaves(one), strict=True):
        if x.dtype != slot.dtype or x.ndim != slot.ndim or any(a > b for a, b in zip(x.shape, slot.shape, strict=True)):
            return False
    return all(
        _has_room(group, memory, slot, limits)
        for layer, state, slots in zip(cache.layers, cache.state, one.layers, strict=True)
        for group, memory, slot in zip(groups(layer), state, groups(slots), strict=True)
        if group_heads(layer) == group_heads(slots)
    )


def _has_room(group: Any, memory: Any, slot: Any, limits: Limits) -> bool:
    """Whether a slot's group has room for the rows that a sequence comes to hold."""
    held = int(np.asarray(group.length).mean(axis=1).max())
    heads = group.length.shape[1]
    in_pages = slot.degree.shape[1] != heads
    if in_pages and group.degree.shape != slot.degree.shape:
        return False
    room = slot.degree[0].size // heads if in_pages else slot.degree.shape[2]
    if memory is None or "indexed" in memory:
        return held + limits.reserve <= room
    if "due" in memory:
        return max(held, int(np.asarray(memory["due"]).max()) - 1) + limits.step_tokens <= room
    if "budget" in memory:
        return max(held, int(np.asarray(memory["budget"]).max())) + 1 <= room
    return held + limits.reserve <= room
