"""What is decided before the first request: room of a slot, plans of the layers, shapes of the cache, bytes."""

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.cache.layers import KVCache
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine.memory import MemoryPlan, check_memory, device_limit, memory_plan, tree_bytes
from clusterkv_jax.engine.slot_programs import slot_plans, template
from clusterkv_jax.generation.batch import QUESTION_STEP, Gate, bucket
from clusterkv_jax.generation.gated_reading import reading_bytes
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.plan import check_prompts, longest_short
from clusterkv_jax.methods.request import LayerPlan, request_of_model
from clusterkv_jax.runtime.checks import check_counts, check_flag
from clusterkv_jax.runtime.errors import shown

# Where nobody says how many bytes contexts may take on the device: those of so many slots at least, and half of what
# all else leaves there. To move them to the host takes as long as many steps.
DEVICE_CONTEXTS = 2


@dataclass(frozen=True)
class Limits:
    """What a slot has room for: tokens of a sequence, and of what follows its prompt; question tokens of a step.

    `whole` is the most tokens of a prompt that is kept whole.
    """

    max_tokens: int
    reserve: int
    step_tokens: int
    whole: int = 0


@dataclass(frozen=True, eq=False)
class EngineLayout:
    """The static side of an engine.

    Attributes:
        slots: sequences that are decoded together.
        limits: of a slot.
        rows: of a slot, for each head, where nothing is compressed.
        plans: of the layers, for prompts of every length.
        one: shapes of the cache of one slot.
        logits: shape of its logits.
        context_bytes: for contexts on the device.
        memory: the plan of the device's memory.
        prefill_chunk: as in `generate`.
        prefill_tokens: of prompts that are read between two calls of the decode program.
        gate: how prompts are compressed while they are read; None reads them whole.
    """

    slots: int
    limits: Limits
    rows: int
    plans: tuple[LayerPlan, ...] = field(repr=False)
    one: KVCache = field(repr=False)
    logits: Any
    context_bytes: int
    memory: MemoryPlan
    prefill_chunk: int | None
    prefill_tokens: int
    gate: Gate | None = None


def check_arguments(method: Any, max_tokens: Any, folder: Any, counts: dict[str, Any], sums: dict[str, Any]) -> None:
    """Raise ValueError for an engine that cannot be: `counts` are at least 1, `sums` numbers of bytes."""
    if not hasattr(type(method), "budget_rows"):
        raise ValueError(f"method must be an object such as Full(), got {shown(method)}.")
    check_counts(1, **counts)
    check_counts(2, max_tokens=max_tokens)
    check_counts(0, 2**62, **sums)
    if folder is not None and not os.path.isdir(folder):
        raise ValueError(f"context_folder must be a folder that exists, got {shown(folder)}.")


def make_layout(
    model: Model,
    method: Method,
    slots: int,
    max_tokens: int,
    reserve: int,
    context_bytes: int | None,
    device_bytes: int | None,
    prefill_chunk: int | None,
    prefill_tokens: int,
    keep_short: bool,
    gate: Gate | None = None,
) -> EngineLayout:
    """The layout of an engine with these arguments. Raises ValueError for what does not fit `device_bytes`."""
    config, params = model.config, model.params
    max_tokens = min(max_tokens, config.max_positions)
    limits = Limits(max_tokens, min(reserve, max_tokens), min(QUESTION_STEP, bucket(min(reserve, max_tokens), 16)))
    width = min(bucket(max_tokens, 64), config.max_positions)
    sizes = {"reserve": limits.reserve, "step_tokens": limits.step_tokens}
    lengths = np.arange(1, width + 1)
    if check_flag(keep_short=keep_short):
        limits = replace(limits, whole=longest_short(config, method, number_dtype(params), **sizes))
    counts = sizes | {"max_new_tokens": limits.reserve, "whole": limits.whole}
    request = request_of_model(config, number_dtype(params), lengths, method.cache_dtype, **counts)
    check_prompts(config, method, replace(request, lengths=lengths[:1]), np.empty(0, np.int64))
    plans = slot_plans(config, method, request)
    one, logits = template(params, config, method, plans, width, **sizes)
    limit = device_limit() if device_bytes is None else device_bytes
    contexts = DEVICE_CONTEXTS * tree_bytes((one, logits)) if context_bytes is None else context_bytes
    reading = prefill_chunk, prefill_tokens, gate
    read_at_once = width if gate is None else min(gate.window, width)
    memory = memory_plan(params, config, (one, logits), slots, read_at_once, contexts)
    if gate is not None:
        held = reading_bytes(config, number_dtype(params), method, plans, gate)
        memory = replace(memory, prompt=memory.prompt + held)
    check_memory(memory, limit, slots)
    if context_bytes is None and limit is not None:
        contexts = max(contexts, (limit - memory.total + contexts) // 2)
        memory = replace(memory, contexts=contexts)
    return EngineLayout(slots, limits, width + limits.reserve, plans, one, logits, contexts, memory, *reading)
