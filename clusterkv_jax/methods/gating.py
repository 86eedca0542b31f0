"""Prompts that are compressed while they are read: which methods can, and how rows return to a budget that grows.

    slots of a head    | rows kept so far | the newest `window` rows | a chunk |

What leaves the window stays, goes or is merged by the method's own rule: a chunk of the prompt enters as a question
does, and rows return to their budget as they do while decoding, with the window among the protected rows. The budget is
that of the text so far, so a share of it grows, and a number of rows does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from clusterkv_jax.blocks.config import Rope
from clusterkv_jax.blocks.rope import rotate
from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.cache.kinds import is_compressible, numbered, with_groups
from clusterkv_jax.cache.layers import (
    KVCache,
    Layer,
    LayerCache,
    PagedHeads,
    State,
    groups,
    pad_slots,
    resize,
)
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.base import Method, Rows
from clusterkv_jax.methods.driver import placed, placed_state, scheduled, with_budget
from clusterkv_jax.methods.families.eviction import Eviction
from clusterkv_jax.methods.heads_as_batch import OF_SLOTS, moved_to_pages, remembered
from clusterkv_jax.methods.plan import aligned, budgets_by_head, few_sizes, pool_of, rows_of_request
from clusterkv_jax.methods.recompression import recompress_alone, recompress_layer
from clusterkv_jax.methods.request import GroupPlan, LayerPlan, RequestShape
from clusterkv_jax.methods.schedule import Protected, Schedule, recompress_every
from clusterkv_jax.methods.sharing import slots_shardable
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.sharding import slot_ways


@dataclass(frozen=True)
class _Latest(Eviction):
    """StreamingLLM while a prompt is read: the first rows and the latest, without a ring."""

    sinks: int
    recent: int
    interval: int

    @property
    @override
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks, recent=self.recent)

    @property
    @override
    def schedule(self) -> Schedule:
        return recompress_every(self.interval)

    @override
    def score(self, rows: Rows) -> Float[Array, "B 1 C"]:
        batch, _, slots = rows.cache.degree.shape
        return jnp.broadcast_to(ordinals(slots, 3).astype(jnp.float32), (batch, 1, slots))


def while_reading(method: Method, window: int, chunk: int) -> Method:
    """The method as it compresses while a prompt is read: by the same rule, with the newest `window` rows protected.

    Raises ValueError for a method that cannot say what a row is worth before it has seen what follows.
    """
    if method.schedule.kind == "ring":  # it keeps the latest rows
        return _Latest(method.budget, sinks=method.protected.first, recent=window, interval=chunk)
    names = {field.name for field in fields(method)}  # pyright: ignore[reportArgumentType]
    interval = next((name for name in ("interval", "decode_interval") if name in names), None)
    alone = method.inputs(0) <= {"scores", "layers"} and method.forgets and method.storage != "pages"
    if not alone or interval is None or "recent" not in names:
        raise ValueError(
            f"{type(method).__name__} needs later queries, or all rows at once, to say what a row is worth, so it "
            "cannot drop rows while it reads; gated reading takes CentroidKV, GravityKV, Chelsea, OrbitKV, KVzap, "
            "StreamingLLM and auto."
        )
    settings: dict[str, Any] = {"recent": max(window, method.protected.last), interval: chunk}
    return replace(method, **settings)


def rows_beside(method: Method, reader: Method) -> int:
    """Rows that a head holds beside its budget while a prompt is read."""
    return reader.protected.last - method.protected.last


# --- on the host: slots and budgets ---


def plan_reading(
    plans: Sequence[LayerPlan], reader: Method, beside: int, window: int, chunk: int
) -> tuple[LayerPlan, ...]:
    """The layers' plans while they are read: slots for a budget at the end, for `beside` rows more, and a chunk."""
    reading = [plan if plan.window else _longer(plan, reader, beside, window, chunk) for plan in plans]
    sizes = few_sizes(sorted(plan.pool.count for plan in reading if plan.pool))
    return tuple((plan.pool and replace(plan, pool=pool_of(plan.groups, sizes))) or plan for plan in reading)


def _longer(plan: LayerPlan, reader: Method, beside: int, window: int, chunk: int) -> LayerPlan:
    def longer(group: GroupPlan) -> GroupPlan:
        rows = max(group.capacity, min(group.most_rows, MOST_ROWS) + beside + chunk, window)
        ways = slot_ways(len(group.heads)) if slots_shardable(reader) else 1
        return replace(group, capacity=aligned(rows, ways), **known)

    # With a reserve beyond its interval a group remembers from the start when it is due, as after each chunk.
    known: Any = {"fewest_rows": MOST_ROWS, "exact": False, "reserve": chunk + 1}
    groups = tuple(map(longer, plan.groups))
    by_head, pool = plan.by_head and longer(plan.by_head), plan.pool and pool_of(groups, ())
    # Nothing is dropped of the first tokens, so layers need not wait for each other.
    inputs = reader.inputs(0) - {"layers"}
    return replace(plan, groups=groups, inputs=inputs, by_head=by_head, pool=pool)


def budgets_after(
    config: ModelConfig,
    method: Method,
    plans: tuple[LayerPlan, ...],
    request: RequestShape,
    seen: Int[np.ndarray, " B"],
) -> tuple[Int[np.ndarray, "B groups stages"], ...]:
    """Rows that each group of heads may hold of prompts of so many tokens, layer by layer."""
    numbers = [config.global_number(layer) for layer in range(config.num_layers)]
    parts = [rows_of_request(method, plan, seen, number, request) for plan, number in zip(plans, numbers, strict=True)]
    return tuple(np.asarray(part) for part in parts)


def budgets_so_far(
    method: Method,
    now: tuple[Int[np.ndarray, "B groups stages"], ...],
    at_end: tuple[Int[np.ndarray, "B groups stages"], ...],
    lengths: Int[np.ndarray, " B"],
    beside: int,
) -> tuple[Int[np.ndarray, "B groups"], ...]:
    """Rows that a head may hold in the middle of a prompt of `lengths`, by what it may `now` and `at_end`.

    A prompt that is no longer than its budget is kept whole.
    """
    fewest = method.protected.fewest

    def one(now: Int[np.ndarray, "B groups"], end: Int[np.ndarray, "B groups"]) -> Int[np.ndarray, "B groups"]:
        rows = np.where(end >= lengths[:, None], end, np.maximum(now, fewest))
        return (rows + beside).astype(np.int32)

    return tuple(one(part[..., 0], end[..., 0]) for part, end in zip(now, at_end, strict=True))


# --- under jit: back to the budget ---


def of_layer(
    plan: LayerPlan, rows: Int[np.ndarray, "B groups"]
) -> tuple[LayerPlan, Int[np.ndarray, "B _"], Float[np.ndarray, " K"] | None]:
    """A layer's plan and budgets as `back_to_budget` takes them, and the shares of heads that stand in pages: layers
    whose heads have other budgets are one program then.
    """
    if plan.by_head is None:
        return plan, rows, None
    of_heads, shares = budgets_by_head(plan, rows)
    return replace(plan, groups=(), pool=None), np.asarray(of_heads), shares


@jit(static_argnames=("method", "plan", "rope"))
def back_to_budget(
    method: Method,
    plan: LayerPlan,
    layer: Layer,
    state: tuple[State | None, ...],
    budgets: Int[Array | np.ndarray, "B _"],
    shares: Float[Array | np.ndarray, " K"] | None,
    position: Int[Array, " B"],
    rope: Rope | None,
) -> tuple[Layer, tuple[State | None, ...]]:
    """Bring every sequence to its budgets, in slots that are as many; those that hold no more stay as they are.

    Rows get new memory: moved where they lie, they would take a GPU a launch for each part of them.
    """
    if not is_compressible(layer):
        return layer, state
    if plan.by_head is not None:
        assert shares is not None
        of_heads, pages = jnp.asarray(budgets), cast("Any", layer)
        now = remembered(method, plan.by_head, pages, state[0] or {}, of_heads, jnp.asarray(shares), position)
        layer, state = recompress_alone(method, pages, (with_budget(now, of_heads, 1),), position, rope)
        return placed(method, layer), placed_state(method, state)
    state = tuple(
        _with_budget(method, of_group, group, group_state, jnp.asarray(budgets)[:, i], position)
        for i, (of_group, group, group_state) in enumerate(zip(plan.groups, groups(layer), state, strict=True))
    )
    layer, state, _ = recompress_layer(method, layer, state, position, rope, None, in_place=False)
    return placed(method, layer), placed_state(method, state)


def _with_budget(
    method: Method,
    plan: GroupPlan,
    group: Any,
    state: State | None,
    budget: Int[Array, " B"],
    position: Int[Array, " B"],
) -> State | None:
    if state is None:
        return None
    share = jnp.full(position.shape, plan.budget_share)
    rows = Rows(group, budget, position, state, budget_share=share, plan=plan)
    return with_budget(state | method.init_state(rows), budget, 1)


@jit(static_argnames=("ropes",), donate_argnames=("cache",))
def renumber(cache: KVCache, ropes: tuple[Rope | None, ...]) -> KVCache:
    """The rows of every head at positions one behind the other, as if nothing had stood between them.

    The newest rows of all heads of a sequence stand at the same positions, and its next token behind them.
    """
    lengths = [group.length for layer in cache.layers for group in groups(layer)]
    position = jnp.max(jnp.concatenate(lengths, axis=1), axis=1)
    layers = []
    for layer, rope in zip(cache.layers, ropes, strict=True):
        parts = [_renumbered(group, position, rope) for group in groups(layer)]
        layers.append(with_groups(layer, parts))
    return replace(cache, layers=tuple(layers), position=position)


def _renumbered(
    group: LayerCache | PagedHeads, position: Int[Array, " B"], rope: Rope | None
) -> LayerCache | PagedHeads:
    assert group.positions is not None
    batch, heads, slots, dim = group.keys.shape  # pages take the place of heads
    there = numbered(group, (position[:, None] - group.length)[..., None])
    positions = jnp.where(group.degree > 0, there, group.positions)
    if rope is None:
        return replace(group, positions=positions)
    alone = group.keys.reshape(batch * heads, slots, 1, dim)
    keys = rotate(alone, (positions - group.positions).reshape(batch * heads, slots), rope)  # rotations add up
    return replace(group, keys=keys.reshape(group.keys.shape), positions=positions)


@jit(static_argnames=("method", "plan"))
def settle(
    method: Method,
    plan: LayerPlan,
    layer: Layer,
    state: tuple[State | None, ...],
    budgets: Int[Array | np.ndarray, "B groups stages"],
) -> tuple[Layer, tuple[State | None, ...]]:
    """A layer that is read and at its budget, in the slots that it has while decoding, with what is remembered then."""
    if not is_compressible(layer):
        return layer, state
    caches = [resize(group, of_group.capacity) for group, of_group in zip(groups(layer), plan.groups, strict=True)]
    kept = [
        _remembered(method, of_group, group_state, jnp.asarray(budgets[:, i]))
        for i, (of_group, group_state) in enumerate(zip(plan.groups, state, strict=True))
    ]
    layer = with_groups(layer, caches)
    return placed(method, layer), placed_state(method, tuple(kept))


@jit(static_argnames=("method", "plan", "count", "page"))
def settle_pages(
    method: Method,
    plan: GroupPlan,
    count: int,
    page: int,
    layer: PagedHeads,
    state: tuple[State | None, ...],
    budgets: Int[Array | np.ndarray, "B K stages"],
    first: Int[Array | np.ndarray, " K"],
) -> tuple[PagedHeads, tuple[State | None, ...]]:
    """`settle` of heads in `count` pages, each from its `first` on: layers of other budgets are one program."""
    own = None if state[0] is None else _own(method, state[0])
    layer, (group_state,) = moved_to_pages(layer, (own,), first, count, page)
    group_state = None if own is None else scheduled(method, group_state or {}, plan, jnp.asarray(budgets))
    return placed(method, layer), placed_state(method, (group_state,))


def _remembered(method: Method, plan: GroupPlan, state: State | None, budgets: Int[Array, "B stages"]) -> State | None:
    own = None if state is None else _own(method, state)
    if own is None:
        return None
    own = {name: pad_slots(x, plan.capacity) if name in OF_SLOTS else x for name, x in own.items()}
    return scheduled(method, own, plan, budgets)


def _own(method: Method, state: State) -> State | None:
    """What the method itself remembers; None where tokens are only appended from now on."""
    if method.schedule.kind == "append":
        return None
    return {name: x for name, x in state.items() if name not in ("budget", "due")}
