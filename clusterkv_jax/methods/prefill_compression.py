"""What is left of layers that were read, as programs: the part of prefill that knows the method.

Layers of equal plan share a program. Heads with budgets of their own have two for all layers: one compresses them, one
puts them into pages. A small one for each number of pages cuts off what a layer does not need.

A GPU merges rows by many short launches, which take hardly longer for the rows of several layers. There a few layers
in a row are compressed at once, as sequences of one batch. They are read into one workspace, where their rows are
merged; what is left of each is copied out, and the next layers are read into the same memory. Methods that move rows to
the front themselves, as those that fit them do, copy them first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.cache.layers import Layer, LayerCache, PagedHeads, State, from_real_tokens, resize
from clusterkv_jax.kernels.gather_rows import gather_rows
from clusterkv_jax.kernels.place_rows import place_rows
from clusterkv_jax.methods.base import Compressed, Method
from clusterkv_jax.methods.driver import (
    LayerPrompt,
    compress_group,
    compress_heads,
    compress_layer,
    heads_alone,
    placed,
    placed_state,
    stored,
)
from clusterkv_jax.methods.heads_as_batch import ByHead, cut, to_pages, together
from clusterkv_jax.methods.plan import budgets_by_head
from clusterkv_jax.methods.request import GroupPlan, LayerPlan
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.runtime.dispatch import traits
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.sharding import on_one_device

# Layers that are compressed at once at most, and the bytes of their rows: eight layers of 32,768 tokens in bf16 of 8 KV
# heads of 128, their scores and squares.
MOST_LAYERS, MOST_BYTES = 16, 9 * 2**27


@dataclass(frozen=True)
class ReadLayer:
    """A layer that was read and is not compressed yet; `number` is its own, for methods that draw.

    Without a prompt of its own it lies in a workspace, behind the layers that were read before it.
    """

    number: int
    plan: LayerPlan
    prompt: LayerPrompt | None
    budgets: Int[Array | np.ndarray, "B groups stages"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Workspace:
    """Room for layers that are compressed at once.

    Attributes:
        rows: what each layer's prompt has, stacked along a leading dimension.
        place: of the next layer that is read into it. The device counts: it would wait for a number from the host.
    """

    rows: LayerPrompt
    place: Int[Array | np.ndarray, ""]

    def __len__(self) -> int:
        return len(self.rows.lengths)


def prompt_shapes(config: ModelConfig, parts: frozenset[str], hidden: Float[Any, "B N M"]) -> LayerPrompt:
    """What a workspace holds of a layer with this configuration, which makes it of such hidden states."""
    batch, width, size = hidden.shape

    def shape(*of: int, dtype: Any = hidden.dtype, part: str | None = None) -> Any:
        return jax.ShapeDtypeStruct((batch, *of), dtype) if part is None or part in parts else None

    rows = shape(config.num_kv_heads, width, config.head_dim)
    number = shape(config.num_kv_heads, width, dtype=jnp.float32)
    return LayerPrompt(
        queries=shape(config.num_heads, width, config.head_dim, part="queries"),
        keys=rows,
        values=rows,
        lengths=shape(dtype=jnp.int32),
        hidden=shape(width, size, part="hidden"),
        scores=number if "scores" in parts else None,
        squares=(number, number),
    )


def layers_in_a_row(config: ModelConfig) -> int:
    """How many layers may wait for each other: those that a method sees, where none with a window is between them."""
    return config.num_layers if len(config.global_layers) == config.num_layers else 1


def workspace_for(
    run: Callable[..., Any],
    held: Workspace | None,
    plan: LayerPlan,
    following: LayerPlan | None,
    prompt: LayerPrompt,
    layers: int,
) -> Workspace | None:
    """Room for as many layers as are compressed at once: what is held, or new. None where this one is compressed alone.

    `prompt` has the shapes of one, and `layers` is the number of those in a row.
    """
    alike = following is not None and _program(plan) == _program(following)
    at_once = layers_at_once(plan, prompt, layers) if alike else 1
    if at_once == 1:
        return None
    if held is not None and len(held) == at_once:
        return held
    leaves, tree = jax.tree.flatten(prompt)
    shapes = tuple(((at_once, *x.shape), str(x.dtype)) for x in leaves)
    watched = bool(jax.config.jax_debug_nans)  # pyright: ignore[reportAttributeAccessIssue]
    rows, place = run(_empty, shapes, watched)
    return Workspace(jax.tree.unflatten(tree, rows), place)


def put_into(workspace: Workspace, prompt: LayerPrompt) -> Workspace:
    """The workspace with a layer's prompt in its next place, rows beyond the lengths zeroed; for use in a jit."""
    held, place = workspace.rows, jnp.asarray(workspace.place)
    assert held.squares is not None

    def put(old, new):
        return jax.lax.dynamic_update_index_in_dim(old, new, place, 0)

    def beside(x):
        return (x.queries, x.lengths, x.hidden, x.scores)

    queries, lengths, hidden, scores = jax.tree.map(put, beside(held), beside(prompt))
    (keys, of_keys), (values, of_values) = (
        place_rows(old, squares, rows, prompt.lengths, place)
        for old, squares, rows in zip((held.keys, held.values), held.squares, (prompt.keys, prompt.values), strict=True)
    )
    rows = LayerPrompt(queries, keys, values, lengths, hidden, scores, (of_keys, of_values))
    return Workspace(rows, (place + 1) % len(workspace))


def defers(read: Sequence[ReadLayer], workspace: Workspace | None, following: LayerPlan | None) -> bool:
    """Whether these layers, alike ones, are to be compressed together with the next one."""
    room = 1 if workspace is None else len(workspace)
    return following is not None and len(read) < room and _program(read[0].plan) == _program(following)


def layers_at_once(plan: LayerPlan, prompt: LayerPrompt, layers: int) -> int:
    """How many layers with prompts of these shapes are compressed at once on the device that is compiled for."""
    if not traits().host_driven or not on_one_device():
        return 1
    return most_at_once(plan, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(prompt)), layers)


def most_at_once(plan: LayerPlan, size: int, layers: int) -> int:
    """The same on one GPU, of layers whose rows have `size` bytes: a number that divides that of all of them."""
    apart = len(plan.groups) > 1 and plan.by_head is None
    if "layers" not in plan.inputs or "key" in plan.inputs or apart or all(group.keep_all for group in plan.groups):
        return 1
    return max(n for n in range(1, MOST_LAYERS + 1) if layers % n == 0 and n * size <= max(size, MOST_BYTES))


def compress(
    run: Callable[..., Any],
    method: Method,
    read: Sequence[ReadLayer],
    key: Key[Array, ""],
    selection: Any,
    workspace: Workspace | None,
) -> tuple[list[tuple[Layer, Any]], Any, Workspace | None]:
    """Each layer's cache and the state of its groups, what the last layer selected, and the workspace.

    `run(program, *args)` calls the programs. Layers that do not fill their workspace go one by one, by a program that
    serves any number.
    """
    if workspace is not None and len(read) == len(workspace):
        done, workspace = _batched(run, method, read, workspace)
        return done, None, workspace
    done = []
    for place, one in enumerate(read):
        prompt = run(_taken, workspace, np.asarray(place, np.int32)) if one.prompt is None else one.prompt
        layer, state, selection = _single(run, method, replace(one, prompt=prompt), key, selection)
        done.append((layer, state))
    # The next layer takes the first place again.
    again = None if workspace is None else replace(workspace, place=np.zeros((), np.int32))
    return done, selection, again


def _single(
    run: Callable[..., Any], method: Method, read: ReadLayer, key: Key[Array, ""], selection: Any
) -> tuple[Layer, Any, Any]:
    plan, number = read.plan, np.asarray(read.number, np.int32)
    if plan.by_head is None:
        before = None if plan.selects else selection
        layer, state, here = run(_compress_layer, method, plan, read.prompt, read.budgets, key, number, before)
        return layer, state, here if plan.selects and plan.window is None else selection
    budgets, shares = budgets_by_head(plan, read.budgets)
    heads = run(_compress_heads, method, plan.by_head, plan.inputs, read.prompt, budgets, shares, key, number)
    return *_in_pages(run, method, plan, *heads), selection


def _batched(
    run: Callable[..., Any], method: Method, read: Sequence[ReadLayer], workspace: Workspace
) -> tuple[list[tuple[Layer, Any]], Workspace]:
    plan = read[0].plan
    if plan.by_head is None:
        return run(_compress_layers, method, plan.groups[0], tuple(one.budgets for one in read), workspace)
    budgets, shares = zip(*(budgets_by_head(one.plan, one.budgets) for one in read), strict=True)
    heads, workspace = run(_compress_heads_of_layers, method, plan.by_head, budgets, shares, workspace)
    return [_in_pages(run, method, one.plan, *mine) for one, mine in zip(read, heads, strict=True)], workspace


def _in_pages(
    run: Callable[..., Any], method: Method, plan: LayerPlan, heads: Any, group_state: Any
) -> tuple[Layer, Any]:
    """By a program of all layers, and one that cuts off the pages that a layer does not have."""
    pool = plan.pool
    assert pool is not None
    layer, state = run(
        _page_heads, method, plan.by_head, pool.slots, heads, group_state, np.asarray(pool.first, np.int32)
    )
    layer, state = run(_cut_pages, method, pool.count, layer, state)
    return replace(layer, head_slots=pool.head_slots), state


def _program(plan: LayerPlan) -> Any:
    """What layers of one program have in common."""
    return plan if plan.by_head is None else (plan.by_head, plan.inputs)


@jit(static_argnames=("method", "plan"))
def _compress_layer(
    method: Method,
    plan: LayerPlan,
    prompt: LayerPrompt,
    budgets: Int[Array | np.ndarray, "B groups stages"],
    key: Key[Array, ""],
    number: Int[Array | np.ndarray, ""],
    selection: Any,
) -> tuple[Layer, tuple[State | None, ...], Any]:
    draw = jax.random.fold_in(key, number)
    layer, state, selection = compress_layer(method, prompt, budgets, plan, draw, selection)
    return placed(method, layer), placed_state(method, state), selection


@jit(static_argnames=("method", "plan"), donate_argnames=("workspace",))
def _compress_layers(
    method: Method,
    plan: GroupPlan,
    budgets: tuple[Int[Array | np.ndarray, "B groups stages"], ...],
    workspace: Workspace,
) -> tuple[list[tuple[Layer, tuple[State | None, ...]]], Workspace]:
    """Layers of one group of heads each."""
    rows = _as_sequences(workspace.rows)
    cache = from_real_tokens(rows.keys, rows.values, rows.lengths)
    result = compress_group(method, cache, rows, jnp.concatenate(budgets)[:, 0], plan, None, None)
    parts = _apart(result, len(budgets))
    caches = [stored(method, part.cache, plan) for part in parts]
    layers = [(placed(method, x), placed_state(method, (part.state,))) for x, part in zip(caches, parts, strict=True)]
    return layers, _used(workspace, result)


@jit(static_argnames=("method", "plan", "inputs"))
def _compress_heads(
    method: Method,
    plan: GroupPlan,
    inputs: frozenset[str],
    prompt: LayerPrompt,
    budgets: Int[Array | np.ndarray, "B K stages"],
    shares: Float[Array | np.ndarray, " K"],
    key: Key[Array, ""],
    number: Int[Array | np.ndarray, ""],
) -> tuple[LayerCache, ByHead]:
    return compress_heads(method, plan, inputs, prompt, budgets, shares[None], jax.random.fold_in(key, number))


@jit(static_argnames=("method", "plan"), donate_argnames=("workspace",))
def _compress_heads_of_layers(
    method: Method,
    plan: GroupPlan,
    budgets: tuple[Int[Array | np.ndarray, "B K stages"], ...],
    shares: tuple[Float[Array | np.ndarray, " K"], ...],
    workspace: Workspace,
) -> tuple[list[tuple[LayerCache, ByHead]], Workspace]:
    """Heads as sequences of their own."""
    layers, batch, kv_heads = workspace.rows.keys.shape[:3]
    each = jnp.concatenate(budgets).reshape(layers * batch * kv_heads, -1)
    share = jnp.repeat(jnp.stack(shares), batch, axis=0).reshape(-1)
    rows = heads_alone(_as_sequences(workspace.rows))
    cache = from_real_tokens(rows.keys, rows.values, rows.lengths)
    result = compress_group(method, cache, rows, each, plan, None, None, share)
    parts = [together(resize(part.cache, plan.capacity), part.state, kv_heads) for part in _apart(result, layers)]
    return parts, _used(workspace, result)


@jit(static_argnames=("method", "plan", "page"))
def _page_heads(
    method: Method, plan: GroupPlan, page: int, heads: LayerCache, state: ByHead, first: Int[Array | np.ndarray, " K"]
) -> tuple[PagedHeads, tuple[State | None, ...]]:
    return to_pages(method, plan, heads, state, first, page)


@jit(static_argnames=("method", "count"))
def _cut_pages(
    method: Method, count: int, layer: PagedHeads, state: tuple[State | None, ...]
) -> tuple[PagedHeads, tuple[State | None, ...]]:
    layer, state = cut(layer, state, count)
    return placed(method, layer), placed_state(method, state)


@jit(static_argnames=("shapes", "zeroed"))
def _empty(shapes: tuple[tuple[tuple[int, ...], str], ...], zeroed: bool) -> tuple[list[Array], Int[Array, ""]]:
    # Whatever stands there is overwritten before it is read; who debugs NaNs finds none.
    make = jnp.zeros if zeroed else jax.lax.empty
    return [make(shape, dtype) for shape, dtype in shapes], jnp.zeros((), jnp.int32)


@jit()
def _taken(workspace: Workspace, place: Int[Array | np.ndarray, ""]) -> LayerPrompt:
    """One layer of a workspace."""
    return jax.tree.map(lambda x: x[place], workspace.rows)


def _as_sequences(rows: LayerPrompt) -> LayerPrompt:
    """The sequences of one layer after those of another."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


def _apart(result: Compressed, layers: int) -> list[Any]:
    """The opposite, for what became of them: rows that lie among others are copied from there, those of each layer into
    memory of their own.
    """
    rows: Any = result.cache

    def of_layer(i: int, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(layers, -1, *x.shape[1:])[i], tree)

    parts = []
    for i in range(layers):
        state = of_layer(i, result.state)
        if result.slots is None:
            parts.append(Compressed(of_layer(i, rows), state))
        else:
            parts.append(Compressed(_moved_out(rows, of_layer(i, result.slots), i), state))
    return parts


def _moved_out(cache: LayerCache, slots: Int[Array, "B K slots"], layer: int) -> LayerCache:
    """The rows of these slots of one layer's sequences, read where they lie among those of all layers."""
    batch, heads, _ = slots.shape
    mine, occupied, at = slice(layer * batch, (layer + 1) * batch), slots >= 0, jnp.maximum(slots, 0)
    head = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads, 1) + layer * batch * heads
    among_all = jnp.where(occupied, at + head * cache.capacity, -1).reshape(1, 1, -1)

    def take(x: Array) -> Array:
        if x.ndim == 4:
            return gather_rows(x.reshape(1, 1, -1, x.shape[3]), among_all).reshape(*slots.shape, -1)
        return jnp.where(occupied, jnp.take_along_axis(x[mine], at, axis=2), jnp.zeros((), x.dtype))

    keys, values, degree, positions = jax.tree.map(take, (cache.keys, cache.values, cache.degree, cache.positions))
    return LayerCache(keys, values, degree, cache.length[mine], positions)


def _used(workspace: Workspace, result: Compressed) -> Workspace:
    """The workspace with rows as they were merged in it, which mean nothing: only its memory is used again."""
    if result.slots is None:
        return workspace
    rows: Any = result.cache
    keys, values = (x.reshape(workspace.rows.keys.shape) for x in (rows.keys, rows.values))
    return replace(workspace, rows=replace(workspace.rows, keys=keys, values=values))
