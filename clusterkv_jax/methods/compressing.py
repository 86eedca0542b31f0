"""What is left of layers that were read, as programs: the part of prefill that knows the method.

Layers of equal plan share a program. Heads with budgets of their own have one for all layers, and a small one for each
layer that puts them into groups.

A GPU merges rows by many short launches, which take hardly longer for the rows of several layers. There a few layers
in a row are compressed at once, as sequences of one batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.cache import Layer, LayerCache, State
from clusterkv_jax.kernels.dispatch import platform
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.by_head import ByHead, grouped
from clusterkv_jax.methods.chassis import Prompt, compress_heads, compress_layer, placed, placed_state
from clusterkv_jax.methods.plan import budgets_by_head
from clusterkv_jax.methods.request import GroupPlan, LayerPlan
from clusterkv_jax.programs import jit
from clusterkv_jax.sharding import on_one_device

# Layers that are compressed at once at most, and the bytes of their rows: four layers of 32,768 tokens in bf16 of 8 KV
# heads of 128, and their scores.
MOST_LAYERS, MOST_BYTES = 8, 9 * 2**26


@dataclass(frozen=True)
class ReadLayer:
    """A layer that was read and is not compressed yet; `number` is its own, for methods that draw."""

    number: int
    plan: LayerPlan
    prompt: Prompt
    budgets: Int[Array | np.ndarray, "B groups stages"]


def awaits(read: Sequence[ReadLayer], following: LayerPlan, layers: int) -> bool:
    """Whether these layers, alike ones, are to be compressed together with the next one, of `layers` in all."""
    return _program(read[0].plan) == _program(following) and len(read) < layers_at_once(read[0], layers)


def layers_at_once(read: ReadLayer, layers: int) -> int:
    """How many of such layers are compressed at once on the device that is compiled for, of `layers` in all."""
    if platform() != "gpu" or not on_one_device():
        return 1
    return most_at_once(read.plan, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read.prompt)), layers)


def most_at_once(plan: LayerPlan, size: int, layers: int) -> int:
    """The same on one GPU, of layers whose rows have `size` bytes: a number that divides that of all of them."""
    if "layers" not in plan.needs or all(group.keep_all for group in plan.groups):
        return 1
    return max(n for n in range(1, MOST_LAYERS + 1) if layers % n == 0 and n * size <= max(size, MOST_BYTES))


def compress(
    run: Callable[..., Any],
    method: Method,
    read: Sequence[ReadLayer],
    key: Key[Array, ""],
    layers: int,
    selection: Any = None,
) -> tuple[list[tuple[Layer, Any]], Any]:
    """Each layer's cache and the memory of its groups, and what the last layer selected.

    `run(program, *args)` calls the programs. Layers that are fewer than `layers_at_once` go one by one, by a program
    that serves any number.
    """
    if 1 < len(read) == layers_at_once(read[0], layers):
        return _together(run, method, read), None
    done = []
    for one in read:
        layer, memory, selection = _alone(run, method, one, key, selection)
        done.append((layer, memory))
    return done, selection


def _alone(
    run: Callable[..., Any], method: Method, read: ReadLayer, key: Key[Array, ""], selection: Any
) -> tuple[Layer, Any, Any]:
    plan, number = read.plan, np.asarray(read.number, np.int32)
    if plan.by_head is None:
        before = None if plan.selects else selection
        layer, memory, here = run(_compress_layer, method, plan, read.prompt, read.budgets, key, number, before)
        return layer, memory, here if plan.selects and plan.window is None else selection
    budgets, shares = budgets_by_head(plan, read.budgets)
    heads = run(_compress_heads, method, plan.by_head, plan.needs, read.prompt, budgets, shares, key, number)
    return *run(_group_heads, method, plan, *heads), selection


def _together(run: Callable[..., Any], method: Method, read: Sequence[ReadLayer]) -> list[tuple[Layer, Any]]:
    plan, prompts = read[0].plan, tuple(one.prompt for one in read)
    if plan.by_head is None:
        return run(_compress_layers, method, plan, prompts, tuple(one.budgets for one in read))
    budgets, shares = zip(*(budgets_by_head(one.plan, one.budgets) for one in read), strict=True)
    heads = run(_compress_heads_of_layers, method, plan.by_head, plan.needs, prompts, budgets, shares)
    return [run(_group_heads, method, one.plan, *mine) for one, mine in zip(read, heads, strict=True)]


def _program(plan: LayerPlan) -> Any:
    """What layers of one program have in common."""
    return plan if plan.by_head is None else (plan.by_head, plan.needs)


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


@jit(static_argnames=("method", "plan"))
def _compress_layers(
    method: Method,
    plan: LayerPlan,
    prompts: tuple[Prompt, ...],
    budgets: tuple[Int[Array | np.ndarray, "B groups stages"], ...],
) -> list[tuple[Layer, tuple[State, ...]]]:
    layer, state, _ = compress_layer(method, _batched(prompts), jnp.concatenate(budgets), plan, None)
    return _apart((layer, state), len(prompts))


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
    return compress_heads(method, plan, needs, prompt, budgets, shares[None], jax.random.fold_in(key, number))


@jit(static_argnames=("method", "plan", "needs"))
def _compress_heads_of_layers(
    method: Method,
    plan: GroupPlan,
    needs: frozenset[str],
    prompts: tuple[Prompt, ...],
    budgets: tuple[Int[Array | np.ndarray, "B K stages"], ...],
    shares: tuple[Float[Array | np.ndarray, " K"], ...],
) -> list[tuple[LayerCache, ByHead]]:
    shares_of_each = jnp.repeat(jnp.stack(shares), len(budgets[0]), axis=0)
    heads = compress_heads(method, plan, needs, _batched(prompts), jnp.concatenate(budgets), shares_of_each, None)
    return _apart(heads, len(prompts))


@jit(static_argnames=("method", "plan"))
def _group_heads(method: Method, plan: LayerPlan, heads: LayerCache, memory: ByHead) -> tuple[Layer, tuple[State, ...]]:
    layer, state = grouped(method, plan, heads, memory)
    return placed(method, layer), placed_state(method, state)


def _batched(prompts: Sequence[Prompt]) -> Prompt:
    """The sequences of one layer after those of another."""
    return jax.tree.map(lambda *each: jnp.concatenate(each), *prompts)


def _apart(tree: Any, layers: int) -> list[Any]:
    """The opposite, for what became of them."""
    return [jax.tree.map(lambda x, i=i: x.reshape(layers, -1, *x.shape[1:])[i], tree) for i in range(layers)]
