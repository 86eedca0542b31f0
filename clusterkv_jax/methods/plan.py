"""From a request and a method to the plan of a layer: groups of heads, their slots, their budgets.

All of it is arithmetic on the host, in double precision where a budget is a ratio, as the papers' int() is.
"""

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.budget import MOST_ROWS, Budget, look_up, share_table
from clusterkv_jax.learned import repetition
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.request import GroupPlan, LayerPlan, PagePlan, RequestShape, request_of_model
from clusterkv_jax.methods.schedule import Schedule
from clusterkv_jax.methods.sharing import is_by_head, slots_shardable
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.runtime.checks import concrete
from clusterkv_jax.runtime.dispatch import traits
from clusterkv_jax.runtime.sharding import ambient_mesh, slot_ways, ways

Plans = Callable[[int], LayerPlan]
# Pages beyond those that rows need, so that layers have pools of few sizes: a share of all pages.
MORE_PAGES = 0.05


def plans_of_width(
    config: ModelConfig, method: Method, dtype: Any, width: int, **counts: int
) -> tuple[RequestShape, Plans]:
    """The request of prompts of any length up to `width`, and the plan of each of the model's layers.

    They are made once for equal arguments: in a table of 32,768 lengths the plan of a layer takes milliseconds, for
    which the device would wait. `counts` as in `request_of_model`.
    """
    return _plans_of_width(config, method, dtype, width, tuple(counts.items()), (traits(), ambient_mesh()))


@lru_cache(maxsize=16)
def _plans_of_width(
    config: ModelConfig, method: Method, dtype: Any, width: int, counts: tuple[tuple[str, int], ...], where: Any
) -> tuple[RequestShape, Plans]:
    del where  # plans are of the devices that are compiled for
    request = request_of_model(config, dtype, np.arange(1, width + 1), method.cache_dtype, **dict(counts))
    return request, cache(lambda layer: plan_of_layer(config, method, layer, request))


def plan_of_layer(config: ModelConfig, method: Method, layer: int, request: RequestShape) -> LayerPlan:
    """The plan of a model's layer: the method's, or that of its window."""
    number = config.global_number(layer)
    if number is None:
        assert config.window is not None
        return plan_window(config.window, request)
    rope = config.ropes[layer]
    return plan_layer(method, number, request if rope == request.rope else replace(request, rope=rope))


def inputs_of_layer(config: ModelConfig, method: Method, layer: int) -> frozenset[str]:
    """What a method must be shown of a model's layer; nothing of one with a window."""
    number = config.global_number(layer)
    return frozenset() if number is None else method.inputs(number)


def repeats(config: ModelConfig, method: Method) -> bool:
    """Whether the model has to repeat its prompts for the method."""
    return bool(config.global_layers) and "repetition" in method.inputs(0)


def plan_window(window: int, request: RequestShape) -> LayerPlan:
    """Of a layer whose tokens see the last `window` alone; slots for fewer where a request is shorter."""
    heads = tuple(range(request.num_kv_heads))
    longest = int(np.max(request.lengths)) + request.reserve
    slots = min(window, aligned(longest, slot_ways(len(heads))))
    return LayerPlan((GroupPlan(heads, slots, keep_all=True, reserve=request.reserve),), window=window)


def plan_layer(method: Method, layer: int, request: RequestShape) -> LayerPlan:
    """The groups of a layer that sees every token: heads of equal budgets stand together, the largest budget first.

    `layer` is its number among those. Nothing here depends on how many tokens will be generated but on the reserve for
    them, so that one program serves any number.
    """
    lengths = np.asarray(request.lengths)
    most = stages(rows_of(method, lengths, layer, replace(request, max_new_tokens=request.reserve)))
    least = stages(rows_of(method, lengths, layer, replace(request, max_new_tokens=0)))[..., 0]
    budget = _budget_of(method)
    table = None if budget is None else share_table(budget, request.num_layers, request.num_kv_heads)[layer]
    groups = []
    for heads in _equal_heads(most):
        rows = np.maximum(most[:, heads[0]], method.protected.fewest)
        covered = np.all(least[:, heads[0]] >= lengths) and method.schedule.kind == "append" and method.forgets
        slots = capacity(method, lengths, rows, request)
        possible = np.minimum(rows[:, -1], lengths + request.reserve)
        most_rows = int(np.max(possible))
        fewest_rows = int(possible[np.argmax(lengths)]) if request.whole else most_rows
        groups.append(
            GroupPlan(
                heads,
                aligned(int(np.max(slots)), slot_ways(len(heads)) if slots_shardable(method) else 1),
                most_rows=most_rows,
                fewest_rows=fewest_rows,
                keep_all=bool(covered) or bool(np.min(rows) >= MOST_ROWS),
                reserve=request.reserve,
                step_tokens=request.step_tokens,
                rope=request.rope,
                soft_capped=request.soft_capped,
                budget_share=1.0 if table is None else float(table[heads[0]]),
            )
        )
    unequal = len(groups) > 1 or (budget is not None and has_unequal_heads(budget))
    whole = all(group.keep_all for group in groups)
    if whole or not unequal or not is_by_head(method, request.num_layers):
        return LayerPlan(tuple(groups), method.inputs(layer))
    by_head, pool = plan_heads(method, request), pool_of(groups, _pool_sizes(method, request))
    assert all(group.capacity <= by_head.capacity for group in groups)  # else rows would be lost on their way to pages
    return LayerPlan(tuple(groups), method.inputs(layer), by_head=by_head, pool=pool)


def pool_of(groups: Sequence[GroupPlan], sizes: Sequence[int]) -> PagePlan:
    """Pages for all slots of these heads: as many as the first of these ascending sizes that suffices."""
    of_head = {head: group.capacity for group in groups for head in group.heads}
    first = head_pages([of_head[head] for head in sorted(of_head)])
    count = next((size for size in sizes if size >= first[-1]), first[-1])
    count += -count % ways("pages")
    head_slots = tuple((group.heads, group.capacity) for group in groups)
    return PagePlan(tuple(first[:-1]), count, traits().page_slots, head_slots)


@lru_cache(maxsize=8)
def plan_heads(method: Method, request: RequestShape) -> GroupPlan:
    """The plan of any head of any layer, which is compressed as a sequence of its own. Made once for a request."""
    longest = int(np.max(request.lengths))
    most, fewest = (_budgets_of_longest(method, request, new) for new in (request.reserve, 0))
    everything = longest + request.reserve
    most_rows = min(int(most.max()), everything)
    held = min(longest, int(most[..., 0].max()) + method.schedule.slack + method.schedule.rounding)
    held = max(held, min(request.whole, longest))
    later = np.asarray([most[..., -1].max()])
    slots = min(int(_most_held(method.schedule, np.asarray([held]), later, request)[0]), everything)
    if request.whole:
        whole = min(request.whole, longest) + request.reserve
        most_rows, slots = max(most_rows, whole), max(slots, whole)
    return GroupPlan(
        (0,),
        aligned(slots, slot_ways(1)),
        most_rows=most_rows,
        fewest_rows=max(int(fewest[..., 0].min()), method.protected.fewest),
        reserve=request.reserve,
        step_tokens=request.step_tokens,
        rope=request.rope,
        soft_capped=request.soft_capped,
    )


def _budgets_of_longest(method: Method, request: RequestShape, new: int) -> Int[np.ndarray, "L K stages"]:
    """B of each head of each layer, of the longest prompt."""
    known, longest = replace(request, max_new_tokens=new), np.max(request.lengths, keepdims=True)
    return np.stack([stages(rows_of(method, longest, layer, known))[0] for layer in range(request.num_layers)])


def head_pages(slots: Sequence[int]) -> list[int]:
    """The first page of each head, which has so many slots; and what is behind all pages."""
    return [0, *itertools.accumulate(-(-each // traits().page_slots) for each in slots)]


@lru_cache(maxsize=8)
def _pool_sizes(method: Method, request: RequestShape) -> tuple[int, ...]:
    """Pages that layers have, ascending: of few numbers, each of which is a program of its own, and in sum hardly more
    than the rows of the longest prompt need.
    """
    most = _budgets_of_longest(method, request, request.reserve)
    longest = np.max(request.lengths, keepdims=True)
    slots = [[int(capacity(method, longest, rows[None], request)[0]) for rows in layer] for layer in most]
    return few_sizes(sorted(head_pages(layer)[-1] for layer in slots))


def few_sizes(inputs: Sequence[int], more: float = MORE_PAGES) -> tuple[int, ...]:
    """The fewest sizes, ascending, that hold each of these ascending needs with at most this share more in sum."""
    total, known = sum(inputs), {0: (0, ())}  # sizes of the first needs, by how many those are: what they take in sum
    while (best := known.get(len(inputs))) is None or best[0] > (1 + more) * total:
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (taken, sizes) in known.items():
            for end in range(start + 1, len(inputs) + 1):
                option = taken + (end - start) * inputs[end - 1], (*sizes, inputs[end - 1])
                longer[end] = min(option, longer.get(end, option))
        known = longer
    return best[1]


def has_unequal_heads(budget: Budget) -> bool:
    """Whether heads of some layer have different shares: then all layers go one way, and share its programs."""
    shares = budget.shares
    return isinstance(shares, tuple) and any(isinstance(layer, tuple) and len(set(layer)) > 1 for layer in shares)


def _budget_of(method: Any) -> Budget | None:
    """The budget that a prompt is compressed to; None of methods that keep everything."""
    inner = getattr(method, "method", getattr(method, "prefill", None))
    return getattr(method, "budget", None) if inner is None else _budget_of(inner)


def capacity(method: Method, lengths: np.ndarray, rows: np.ndarray, request: RequestShape) -> np.ndarray:
    """The most rows that a head comes to hold, by prompt length; `rows` are its budgets [lengths, stages]."""
    everything = lengths + request.reserve
    if not method.forgets:
        return everything
    after_prompt, schedule = rows[:, 0], method.schedule
    over = (lengths > after_prompt) & (lengths >= after_prompt + schedule.slack)
    after = np.where(over, after_prompt, lengths)
    return np.minimum(_most_held(schedule, after, rows[:, -1], request), everything)


def _most_held(schedule: Schedule, after: np.ndarray, rows: np.ndarray, request: RequestShape) -> np.ndarray:
    """The most rows of a head that holds `held` after the prompt, and returns to `rows` by this schedule."""
    appended = after + request.reserve
    if schedule.kind == "interval" and request.reserve:
        # A step begins with less than B + interval rows, or with what the prompt left.
        appended = np.maximum(after, rows + schedule.interval - 1) + request.step_tokens
    elif schedule.kind == "token":  # one slot more for the token whose step decides what goes
        appended = np.minimum(appended, np.maximum(after, rows) + 1)
    elif schedule.kind == "ring":
        appended = np.minimum(appended, np.maximum(after, rows))
    return appended + schedule.rounding


def rows_of_request(
    method: Method, plan: LayerPlan, lengths: Int[Array | np.ndarray, " B"], layer: int | None, request: RequestShape
) -> Int[Array | np.ndarray, "B groups stages"]:
    """B of each prompt and group of the layer's heads, which the host computes where it knows the lengths.

    `layer` is its number among those that see every token. Without one it has a window and no budget, which is 0.
    """
    if layer is None:
        return np.zeros((lengths.shape[0], 1, 1), np.int32)
    numbers = concrete(lengths)
    at = np.arange(int(np.max(request.lengths)) + 1) if numbers is None else numbers
    first = [heads[0] for heads in plan.heads]
    rows = np.minimum(stages(rows_of(method, at, layer, request))[:, first], MOST_ROWS)
    if numbers is not None:
        return rows.astype(np.int32)
    # Lengths that are traced cannot be checked: every head keeps at least what it must.
    return look_up(np.maximum(rows, method.protected.fewest), lengths)


def planned_layer(
    config: ModelConfig,
    method: Method,
    request: RequestShape,
    lengths: Int[Array | np.ndarray, " B"],
    plans: Plans,
    layer: int,
) -> tuple[LayerPlan, Int[Array | np.ndarray, "B groups stages"]]:
    """The plan of a model's layer, one of `plans`, and the budgets of these prompts.

    Its groups are `exact` where the host knows all that the device would have to be asked: prompts as long as the
    longest, each with the budget that its program expects, or of heads that are compressed together no less.
    """
    plan = plans(layer)
    budgets = rows_of_request(method, plan, lengths, config.global_number(layer), request)
    numbers = concrete(lengths)
    if numbers is None or np.any(numbers != np.max(request.lengths)):
        return plan, budgets
    if plan.by_head is not None:
        enough = bool(np.all(budgets[..., 0] >= plan.by_head.fewest_rows))
        return replace(plan, by_head=replace(plan.by_head, exact=enough)), budgets
    exact = np.all(budgets[:, :, 0] == [group.most_rows for group in plan.groups], axis=0).tolist()
    groups = (replace(group, exact=known) for group, known in zip(plan.groups, exact, strict=True))
    return replace(plan, groups=tuple(groups)), budgets


def rows_of(method: Method, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
    """`budget_rows`, which prompts that are kept whole never reach."""
    rows = method.budget_rows(lengths, layer, request)
    if not request.whole:
        return rows
    short = np.asarray(lengths) <= request.whole
    return np.where(short.reshape(-1, *[1] * (rows.ndim - 1)), MOST_ROWS, rows)


def longest_short(config: ModelConfig, method: Method, dtype: Any, **counts: int) -> int:
    """The most tokens of a prompt that is too short for its budget; 0 if the longest one has an impossible budget too.

    `counts` as in `request_of_model`.
    """
    request = request_of_model(config, dtype, np.asarray([1]), method.cache_dtype, **(counts | {"max_new_tokens": 0}))

    def is_possible(tokens: int) -> bool:
        with contextlib.suppress(ValueError):
            method.check(np.asarray([tokens], np.int64), request)
            return True
        return False

    if not config.global_layers or not is_possible(config.max_positions):
        return 0
    return bisect_left(range(1, config.max_positions), True, key=is_possible)


def budgets_by_head(
    plan: LayerPlan, budgets: Int[Array | np.ndarray, "B groups *stages"]
) -> tuple[Int[Array | np.ndarray, "B K *stages"], Float[np.ndarray, " K"]]:
    """What each KV head of the layer may keep of each prompt, and its share of the budget."""
    group = np.argsort([head for heads in plan.heads for head in heads])
    of_head = np.repeat(np.arange(len(plan.groups)), [len(heads) for heads in plan.heads])[group]
    return budgets[:, of_head], np.asarray([plan.groups[i].budget_share for i in of_head], np.float32)


def stages(rows: np.ndarray) -> np.ndarray:
    """Budgets [lengths, K] or [lengths, K, stages] as the latter: after the prompt, and while decoding."""
    return rows if rows.ndim == 3 else rows[..., None]


def aligned(slots: int, devices: int = 1) -> int:
    """`slots`, rounded up so that each of the devices that share them has as many.

    On a TPU each has whole tiles of 16 rows: of another size, XLA would lay the cache out by sequences and copy all of
    it into and out of the decode loop.
    """
    unit = devices * traits().slot_tile
    return -(-slots // unit) * unit


def _equal_heads(rows: np.ndarray) -> list[tuple[int, ...]]:
    """Heads by equal columns of budgets [lengths, K, stages], the largest first."""
    if rows.strides[1] == 0:  # what `all_heads` makes
        return [tuple(range(rows.shape[1]))]
    groups: list[list[int]] = []
    for head in range(rows.shape[1]):
        same = next((heads for heads in groups if np.array_equal(rows[:, heads[0]], rows[:, head])), None)
        if same is None:
            groups.append([head])
        else:
            same.append(head)
    return sorted(map(tuple, groups), key=lambda heads: -int(rows[:, heads[0]].max()))


# --- what cannot be ---


def check_prompts(config: ModelConfig, method: Method, request: RequestShape, lengths: np.ndarray) -> None:
    """Raise ValueError for prompts of these lengths that the method cannot read; none are those not known yet."""
    if config.global_layers:  # else there is nothing to compress
        method.check(lengths[lengths > request.whole], request)
    if repeats(config, method):
        _check_repetition(method, config, int(np.max(lengths if lengths.size else request.lengths)))


def is_endless(method: Any, positions: int) -> bool:
    """Whether a method moves its rows together with every token and holds no more of them than there are positions:
    none then grows with the text.
    """
    ring = method.storage == "moved" and method.schedule.kind == "ring"
    return ring and (method.budget.tokens or positions + 1) <= positions


def _check_repetition(method: Method, config: ModelConfig, longest: int) -> None:
    """Raise ValueError if the method has no words that the model knows, or the model no positions for what is fed."""
    how, name = repetition_of(method), type(method).__name__
    if how.words is None:
        raise ValueError(
            f"{name} has the model repeat its prompts and needs an instruction for that: use generate with a model "
            "that has a tokenizer, or give it instruction=learned.instruction(tokenizer)."
        )
    ids = sorted({id for part in (*how.words, *(how.frame or ())) for id in part})
    if ids and ids[-1] >= config.vocab_size:
        raise ValueError(f"{name} instruction holds id {ids[-1]}; allowed are 0 to {config.vocab_size - 1}.")
    fed = repetition.most_fed(how, longest)
    if longest + fed > config.max_positions:
        raise ValueError(
            f"{name} feeds up to {fed} tokens after a prompt of {longest}, more than the model's "
            f"{config.max_positions} positions; a smaller chunk feeds fewer."
        )


def repetition_of(method: Any) -> repetition.Repetition:
    """How a method that needs "repetition" has a prompt repeated."""
    return method.repetition
