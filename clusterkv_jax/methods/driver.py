"""How a layer is taken through a method: the same for all methods, so none overrides it.

    compress_layer   a prompt's keys and values -> a cache of one group of heads, or several, and the states of these
    compress_heads   the same of heads with budgets of their own, before they stand in pages (`heads_as_batch`)
    step_layer       new tokens enter every group and attend; the way back to the budget is in `recompression`

A group's state is None where its tokens are only ever appended. Otherwise it is what the method makes of it, and of a
method with a schedule `budget`, B of each sequence, and `due`, the rows at which the group is compressed again.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.cache.attention import MOST_QUERIES, join_heads, query_heads
from clusterkv_jax.cache.chunk_attention import attend_chunk
from clusterkv_jax.cache.kinds import (
    first_pages,
    is_compressible,
    is_part,
    splits_slots,
    store,
    with_groups,
)
from clusterkv_jax.cache.layers import (
    Group,
    HeadGroups,
    Layer,
    LayerCache,
    State,
    StepInputs,
    from_tokens,
    group_heads,
    groups,
    resize,
    select_heads,
)
from clusterkv_jax.cache.sliding_window import ring, step_window
from clusterkv_jax.methods import heads_as_batch
from clusterkv_jax.methods.base import Compressed, Method, Rows, compacted
from clusterkv_jax.methods.plan import budgets_by_head
from clusterkv_jax.methods.request import GroupPlan, LayerPlan
from clusterkv_jax.methods.sharing import slots_shardable
from clusterkv_jax.methods.steps import append_and_attend, append_with_scores
from clusterkv_jax.runtime.sharding import constrain, constrain_cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerPrompt:
    """What a layer makes of prompts of unequal length, padded on the right; `hidden` is what enters its attention,
    `scores` what each row is worth, `squares` are those of keys and values.
    """

    queries: Float[Array, "B H N D"] | None
    keys: Float[Array, "B K N D"]
    values: Float[Array, "B K N D"]
    lengths: Int[Array, " B"]
    hidden: Float[Array, "B N M"] | None = None
    scores: Float[Array, "B K N"] | None = None
    squares: tuple[Float[Array, "B K N"], Float[Array, "B K N"]] | None = None


@jax.named_scope("compress")
def compress_layer(
    method: Method,
    prompt: LayerPrompt,
    budgets: Int[Array | np.ndarray, "B groups stages"],
    plan: LayerPlan,
    key: Array | None,
    selection: tuple[Any, ...] | None = None,
) -> tuple[Layer, tuple[State | None, ...], tuple[Any, ...]]:
    """A layer's cache after its prompt.

    Args:
        method: static.
        prompt: of the layer.
        budgets: B of each prompt and group of heads, after the prompt and while decoding.
        plan: static.
        key: PRNG key of the layer.
        selection: what an earlier layer selected, by group; None where the layer selects for itself.

    Returns:
        the layer, the state of each group of heads, and what each group selected.

    Raises:
        ValueError: if the method needs queries, hidden states or scores and there are none.
    """
    if plan.window is not None:
        return ring(prompt.keys, prompt.values, prompt.lengths, plan.window, plan.capacities[0]), (None,), ()
    if plan.by_head is not None:
        of_heads, shares = budgets_by_head(plan, budgets)
        heads = compress_heads(method, plan.by_head, plan.inputs, prompt, of_heads, shares[None], key)
        assert plan.pool is not None
        first, slots = np.asarray(plan.pool.first, np.int32), plan.pool.slots
        pages_of_heads = heads_as_batch.to_pages(method, plan.by_head, *heads, first, slots)
        paged, state = heads_as_batch.cut(*pages_of_heads, plan.pool.count)
        return replace(paged, head_slots=plan.pool.head_slots), state, (None,)
    whole = from_tokens(prompt.keys, prompt.values, prompt.lengths)
    parts: list[Compressed] = []
    for i, group in enumerate(plan.groups):
        cache = whole if len(plan.groups) == 1 else select_heads(whole, group.heads)
        part = Compressed(cache)
        if not group.keep_all:
            before = None if selection is None else selection[i]
            _check_inputs(method, prompt, plan.inputs)
            part = compacted(compress_group(method, cache, prompt, jnp.asarray(budgets[:, i]), group, key, before))
        parts.append(replace(part, cache=stored(method, part.cache, group)))
    caches: Any = tuple(part.cache for part in parts)
    state = tuple(part.state for part in parts)
    layer = caches[0] if len(caches) == 1 else HeadGroups(caches, plan.heads)
    return layer, state, tuple(part.selection for part in parts)


@jax.named_scope("compress")
def compress_heads(
    method: Method,
    plan: GroupPlan,
    inputs: frozenset[str],
    prompt: LayerPrompt,
    budgets: Int[Array | np.ndarray, "B K stages"],
    shares: Float[Array | np.ndarray, "#B K"],
    key: Array | None,
) -> tuple[LayerCache, heads_as_batch.ByHead]:
    """Every KV head of a layer after its prompt, each compressed as a sequence of its own, and its state.

    `plan` and `inputs` are static, the others as in `compress_layer`; `shares` are those of the heads, in all sequences
    or in each.
    """
    _check_inputs(method, prompt, inputs)
    batch, heads = prompt.keys.shape[:2]
    prompt = heads_alone(prompt)
    cache = from_tokens(prompt.keys, prompt.values, prompt.lengths)
    budgets = jnp.asarray(budgets).reshape(batch * heads, -1)
    share = jnp.broadcast_to(jnp.asarray(shares), (batch, heads)).reshape(-1)
    part = compacted(compress_group(method, cache, prompt, budgets, plan, key, None, share))
    rows: Any = part.cache
    return heads_as_batch.together(resize(rows, plan.capacity), part.state, heads)


def heads_alone(prompt: LayerPrompt) -> LayerPrompt:
    """Every KV head as a sequence of its own."""
    heads = prompt.keys.shape[1]
    every = prompt.queries, prompt.keys, prompt.values, prompt.scores, prompt.squares
    queries, keys, values, scores, squares = jax.tree.map(partial(heads_as_batch.alone, kv_heads=heads), every)
    return LayerPrompt(queries, keys, values, jnp.repeat(prompt.lengths, heads), scores=scores, squares=squares)


def compress_group(
    method: Method,
    cache: Group,
    prompt: LayerPrompt,
    budgets: Int[Array, "B stages"],
    plan: GroupPlan,
    key: Array | None,
    selection: Any,
    share: Float[Array, " B"] | None = None,
) -> Compressed:
    """One group of heads: what `Method.compress` leaves, and what is remembered until it is due again."""
    queries = prompt.queries
    if queries is not None:
        queries = query_heads(queries, plan.heads, prompt.keys.shape[1], axis=1)
    scores = None if prompt.scores is None else prompt.scores[:, jnp.asarray(plan.heads)]
    hidden = None if prompt.hidden is None else constrain(prompt.hidden, "batch", None, None)
    # A head's rows come together: left to the partitioner, each step of a method would have its own collectives.
    cache, queries, scores = constrain_cache((cache, queries, scores))
    share = jnp.full(prompt.lengths.shape, plan.budget_share) if share is None else share
    squares = prompt.squares if len(plan.heads) == prompt.keys.shape[1] else None  # else those of other heads too
    seen = {"queries": queries, "hidden": hidden, "scores": scores, "squares": squares}
    rows = Rows(
        cache, budgets[:, 0], prompt.lengths, {}, **seen, key=key, selection=selection, budget_share=share, plan=plan
    )
    rows = replace(rows, state=method.init_state(rows))
    result = method.compress(rows)
    state = rows.state if result.state is None else result.state
    state = scheduled(method, state, plan, budgets)
    return replace(result, state=state)


def scheduled(method: Method, state: State, plan: GroupPlan, budgets: Int[Array, "B *heads stages"]) -> State | None:
    """What is remembered of a group, its budget while decoding and the rows at which it is due among it, or None; of
    heads in pages for each of them.
    """
    schedule = method.schedule
    if schedule.kind != "append":
        state = {"budget": budgets[..., -1]} | state
    # What can never be due need not be compiled: the last token of the reserve has none behind it. A prompt may hold
    # more than its budget while decoding, by the slack of its method or as another stage leaves it.
    longest = plan.reserve + schedule.slack
    if schedule.kind == "interval" and method.forgets and (budgets.shape[-1] > 1 or longest > schedule.interval):
        state = state | {"due": budgets[..., -1] + schedule.interval}
    return state or None


def with_budget(state: State, budget: Int[Array, "B *heads"], interval: Int[Array | np.ndarray, ""] | int) -> State:
    """What is remembered of a group under another budget: it is due `interval` rows beyond it."""
    return state | {"budget": budget, "due": budget + interval}


def stored(method: Method, group: Group, plan: GroupPlan) -> Group:
    """A group in the slots and the type that the method stores it in."""
    return store(group, plan.capacity, method.cache_dtype, less_mean=not plan.soft_capped)


def _check_inputs(method: Method, prompt: LayerPrompt, inputs: frozenset[str]) -> None:
    """Raise ValueError for what the method needs of the layer and does not get."""
    name = type(method).__name__
    if "queries" in inputs and prompt.queries is None:
        raise ValueError(f"{name} chooses rows by attention: queries must be [B,H,N,D], got None.")
    if "hidden" in inputs and prompt.hidden is None:
        raise ValueError(f"{name} scores rows by the layer's input: hidden must be [B,N,M], got None.")
    if inputs & {"scores", "repetition"} and prompt.scores is None:
        raise ValueError(f"{name} keeps the rows of the highest scores: scores must be [B,K,N], got None.")


@jax.named_scope("attention/step")
def step_layer(
    method: Method, layer: Layer, state: tuple[State | None, ...], tokens: StepInputs
) -> tuple[Float[Array, "B T H D"], Layer, tuple[State | None, ...]]:
    """New tokens enter every group of the layer and attend to it."""
    if not is_compressible(layer):
        return *step_window(layer, tokens), state
    tokens = replace(tokens, degree_power=float(method.degree_power))
    if heads_as_batch.can_fuse_step(method, layer, state, tokens.q.shape[1]):
        return heads_as_batch.step(layer, state, tokens)
    if tokens.q.shape[1] > MOST_QUERIES and type(method).step is Method.step:
        return _step_chunk(method, layer, state, tokens)
    parts = []
    for group, heads, group_state in zip(groups(layer), group_heads(layer), state, strict=True):
        mine = tokens if len(state) == 1 else _of_heads(tokens, heads)
        if group_state is None:
            parts.append(append_and_attend(group, None, mine, apart=slots_shardable(method)))
        else:
            parts.append(method.step(group, group_state, mine))
    attended, longer, states = zip(*parts, strict=True)
    out = attended[0] if len(state) == 1 else join_heads(attended, group_heads(layer))
    return out, with_groups(layer, longer), states


def _step_chunk(
    method: Method, layer: Layer, state: tuple[State | None, ...], tokens: StepInputs
) -> tuple[Float[Array, "B T H D"], Layer, tuple[State | None, ...]]:
    """A chunk of a prompt, whose tokens are appended: all heads attend at once, whatever groups they stand in."""
    parts = []
    for group, heads, group_state in zip(groups(layer), group_heads(layer), state, strict=True):
        mine = tokens if len(state) == 1 else _of_heads(tokens, heads)
        parts.append(append_with_scores(group, group_state, mine, apart=slots_shardable(method)))
    longer, states = zip(*parts, strict=True)
    # The rows of before, read where the new ones stand behind them: XLA might copy what is read as it was.
    pairs = zip(groups(layer), longer, strict=True)
    before = with_groups(layer, [replace(old, keys=new.keys, values=new.values) for old, new in pairs])
    return attend_chunk(before, tokens, plain=method.storage == "tokens"), with_groups(layer, longer), states


def placed(method: Method, layers: Any) -> Any:
    """Layers on the devices of the ambient mesh; their slots too, where the steps of method or window allow it."""

    def place(part):
        return constrain_cache(part, apart=shards_slots(method, part), paged=first_pages(part) is not None)

    return jax.tree.map(place, layers, is_leaf=is_part)


def placed_state(method: Method, state: Any) -> Any:
    """What a method keeps beside the rows, on the devices of the ambient mesh."""

    def place(path, x):
        return constrain_cache(x, apart=shards_slots(method, x, path))

    return jax.tree_util.tree_map_with_path(place, state)


def shards_slots(method: Method, part: Any, path: tuple[Any, ...] = ()) -> bool:
    """Whether devices may share the slots of a head of a layer, or of one of its groups; or what a method keeps under
    this path of its state: scores stand with their rows.
    """
    beside = path[-1:] in [(jax.tree_util.DictKey(name),) for name in heads_as_batch.OF_SLOTS]
    return splits_slots(part, slots_shardable(method)) or (beside and slots_shardable(method))


def _of_heads(tokens: StepInputs, heads: tuple[int, ...]) -> StepInputs:
    """What enters some of the KV heads."""
    index, kv_heads = jnp.asarray(heads), tokens.k.shape[2]
    q, lookup = (None if x is None else query_heads(x, heads, kv_heads, axis=2) for x in (tokens.q, tokens.lookup))
    scores = None if tokens.scores is None else tokens.scores[:, :, index]
    sinks = None if tokens.sink_logits is None else query_heads(tokens.sink_logits, heads, kv_heads, axis=0)
    new = {"q": q, "k": tokens.k[:, :, index], "v": tokens.v[:, :, index]}
    return replace(tokens, **new, lookup=lookup, scores=scores, sink_logits=sinks)
