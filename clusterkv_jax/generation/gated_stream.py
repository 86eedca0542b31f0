"""A text that comes bit by bit and need not end, read gated under a fixed number of rows.

What has been read can be kept at any moment: its cache is then as if the text ended there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.cache.layers import KVCache
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.decoding import prefill
from clusterkv_jax.generation.batch import QUESTION_STEP, Gate, bucket
from clusterkv_jax.generation.gated_reading import (
    GatedPlan,
    GatedState,
    gated_plan,
    read_chunk,
    read_window,
    rows_after,
    settled,
)
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.gating import budgets_so_far
from clusterkv_jax.methods.plan import check_prompts
from clusterkv_jax.runtime.errors import counted
from clusterkv_jax.runtime.prng import seed_key
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import on_mesh

# As long as texts come to be.
ENDLESS = 2**30


@dataclass(frozen=True)
class Stream:
    """A text of which a beginning has been read.

    Attributes:
        model: that reads it.
        plan: how it is read.
        tokens: how many have been read.
        state: what is left of them; None before the window is full.
        start: the tokens of a window that is not full yet.
    """

    model: Model
    plan: GatedPlan
    tokens: int = 0
    state: GatedState | None = None
    start: tuple[int, ...] = ()

    @property
    def wanted(self) -> int:
        """Tokens that are read next, all at once unless the text ends before."""
        return self.plan.gate.window if self.state is None else self.plan.gate.chunk


@own_settings()
def open_stream(model: Model, method: Method, gate: Gate, *, reserve: int, seed: int = 0) -> Stream:
    """A text that begins, to be read by a method whose rows are fixed in number.

    Args:
        model: from `load`.
        method: what is kept, with all that the model knows of it.
        gate: window and chunk, and whether rows are renumbered where the model's positions end.
        reserve: most tokens of a question and its answer.
        seed: of methods that draw.

    Raises:
        ValueError: for a budget that grows with the text, and a method that cannot read gated.
    """
    config, dtype = model.config, number_dtype(model.params)
    sizes: Any = {"reserve": reserve, "step_tokens": min(QUESTION_STEP, bucket(reserve, 16)), "max_new_tokens": reserve}
    with on_mesh(model.mesh, config.num_kv_heads):
        plan = gated_plan(
            config, method, dtype, config.max_positions, gate, **sizes, whole=0, key=seed_key(seed), call=_run
        )
        numbers = range(len(config.global_layers))
        long = np.asarray([ENDLESS // 2, ENDLESS])
        if any(np.any(np.diff(method.budget_rows(long, number, plan.request), axis=0)) for number in numbers):
            raise ValueError(
                f"A text without an end needs a fixed number of rows, such as Budget(tokens=1024), got {method.budget}."
            )
        check_prompts(config, method, plan.request, long)
    return Stream(model, plan)


@own_settings()
def read_on(stream: Stream, tokens: Sequence[int]) -> Stream:
    """The stream with its next tokens, `wanted` of them, or fewer where the text ends. It takes over what was read.

    Raises ValueError where the model's positions end and rows are not renumbered.
    """
    plan, seen = stream.plan, stream.tokens + len(tokens)
    if not plan.gate.renumber and seen + plan.request.reserve > plan.config.max_positions:
        raise ValueError(
            f"After {counted(stream.tokens, 'token')} the text exceeds the model's {plan.config.max_positions:,} "
            "positions; renumber=True (--renumber) reads on."
        )
    if stream.state is None and len(tokens) < plan.gate.window:
        return replace(stream, tokens=seen, start=tuple(tokens))
    part, counts = np.zeros((1, stream.wanted), np.int32), np.asarray([len(tokens)], np.int32)
    part[0, : len(tokens)] = tokens
    params = stream.model.params
    with on_mesh(stream.model.mesh, plan.config.num_kv_heads):
        if stream.state is None:
            return replace(stream, tokens=seen, state=read_window(params, plan, part, counts))
        rows = None
        if stream.tokens > plan.gate.window:
            before = np.asarray([stream.tokens])
            now = rows_after(plan, plan.request, before)
            rows = budgets_so_far(plan.method, now, now, before, plan.beside)
        state = read_chunk(params, plan, stream.state, part, counts, rows)
        return replace(stream, tokens=seen, state=state)


@own_settings()
def kept(stream: Stream) -> KVCache:
    """The cache as if the text ended here; the stream can be read on.

    Raises ValueError where nothing has been read.
    """
    if not stream.tokens:
        raise ValueError("The text is empty; it needs at least one token.")
    plan, model = stream.plan, stream.model
    with on_mesh(model.mesh, plan.config.num_kv_heads):
        if stream.state is None:
            prompt, lengths = np.asarray([stream.start], np.int32), np.asarray([stream.tokens], np.int32)
            width = min(bucket(stream.tokens, 64), plan.config.max_positions)
            prompt = np.pad(prompt, ((0, 0), (0, width - stream.tokens)))
            sizes: Any = {name: getattr(plan.request, name) for name in ("reserve", "step_tokens", "max_new_tokens")}
            sizes |= {"plans": plan.plans, "key": plan.key}
            return prefill(model.params, plan.config, plan.method, prompt, lengths, **sizes)[0]
        rows = rows_after(plan, plan.request, np.asarray([stream.tokens]))
        return settled(plan, stream.state._replace(layers=[*stream.state.layers], states=[*stream.state.states]), rows)


def _run(program: Callable[..., Any], *args: Any) -> Any:
    return program(*args)
