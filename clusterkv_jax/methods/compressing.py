"""What is left of a layer that was read, as programs: the part of prefill that knows the method.

Layers of equal plan share a program. Heads with budgets of their own have one for all layers, and a small one for each
layer that puts them into groups.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.cache import Layer, LayerCache, State
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.by_head import ByHead, grouped
from clusterkv_jax.methods.chassis import Prompt, compress_heads, compress_layer, placed, placed_state
from clusterkv_jax.methods.plan import budgets_by_head
from clusterkv_jax.methods.request import GroupPlan, LayerPlan
from clusterkv_jax.programs import jit


def compress(
    run: Callable[..., Any],
    method: Method,
    plan: LayerPlan,
    prompt: Prompt,
    budgets: Int[Array | np.ndarray, "B groups stages"],
    key: Key[Array, ""],
    number: Int[Array | np.ndarray, ""],
    selection: Any,
) -> tuple[Layer, Any, Any]:
    """The layer's cache, the memory of its groups, and what they selected; `run(program, *args)` calls the programs.

    `number` is the layer's own, for methods that draw.
    """
    if plan.by_head is None:
        return run(_compress_layer, method, plan, prompt, budgets, key, number, selection)
    of_heads = budgets_by_head(plan, budgets)
    heads = run(_compress_heads, method, plan.by_head, plan.needs, prompt, *of_heads, key, number)
    return *run(_group_heads, method, plan, *heads), None


@jit(static_argnames=("method", "plan"))
def _compress_layer(
    method: Method,
    plan: LayerPlan,
    prompt: Prompt,
    budgets: Int[Array | np.ndarray, "B groups stages"],
    key: Key[Array, ""],
    number: Int[Array | np.ndarray, ""],
    selection: Any,
) -> tuple[Layer, tuple[State, ...], Any]:
    draw = jax.random.fold_in(key, number)
    layer, state, selection = compress_layer(method, prompt, budgets, plan, draw, selection)
    return placed(method, layer), placed_state(method, state), selection


@jit(static_argnames=("method", "plan", "needs"))
def _compress_heads(
    method: Method,
    plan: GroupPlan,
    needs: frozenset[str],
    prompt: Prompt,
    budgets: Int[Array | np.ndarray, "B K stages"],
    shares: Float[Array | np.ndarray, " K"],
    key: Key[Array, ""],
    number: Int[Array | np.ndarray, ""],
) -> tuple[LayerCache, ByHead]:
    return compress_heads(method, plan, needs, prompt, budgets, shares, jax.random.fold_in(key, number))


@jit(static_argnames=("method", "plan"))
def _group_heads(method: Method, plan: LayerPlan, heads: LayerCache, memory: ByHead) -> tuple[Layer, tuple[State, ...]]:
    layer, state = grouped(method, plan, heads, memory)
    return placed(method, layer), placed_state(method, state)
