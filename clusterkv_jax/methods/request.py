"""What is known of a request before its prompt is read, and what follows from it for a layer: groups, slots, budgets.

All of it is arithmetic on the host, in double precision where a budget is a ratio, as the papers' int() is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from clusterkv_jax.budget import MOST_ROWS, concrete, look_up
from clusterkv_jax.kernels.dispatch import platform
from clusterkv_jax.models.config import ModelConfig, Rope

if TYPE_CHECKING:
    from clusterkv_jax.methods.base import Method, Schedule

DEGREE_BYTES = 4


@dataclass(frozen=True, eq=False)
class Request:
    """Everything that a plan may depend on; `request_of_model` and `request_of_tensors` make one.

    Attributes:
        lengths: the prompt lengths that may occur: those of a bucket, or the actual ones.
        num_layers: of the model.
        num_kv_heads: of each layer.
        max_new_tokens: what budgets of base "prompt+new" count.
        reserve: tokens that will be appended after the prompt, question and answer.
        step_tokens: the most of them that are appended at once.
        row_bytes: of one row of one head: a key, a value and a degree.
        rope: the model's rotations, None where it has none.
    """

    lengths: np.ndarray
    num_layers: int
    num_kv_heads: int
    max_new_tokens: int = 0
    reserve: int = 0
    step_tokens: int = 1
    row_bytes: int = 0
    rope: Rope | None = None

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row in all layers and heads."""
        return self.row_bytes * self.num_layers * self.num_kv_heads


@dataclass(frozen=True)
class GroupPlan:
    """The static facts of one group of a layer's KV heads, which have equal budgets.

    Attributes:
        heads: the KV heads of the group.
        capacity: C, slots of each head; of heads that share pages, the mean.
        most_rows: the largest budget that may occur, of a prompt and what is appended to it at most.
        keep_all: whether the group keeps every row, so that its method never sees it.
        reserve: tokens that will be appended after the prompt.
        step_tokens: the most of them that are appended at once.
        rope: the model's rotations.
    """

    heads: tuple[int, ...]
    capacity: int
    most_rows: int = MOST_ROWS
    keep_all: bool = False
    reserve: int = 0
    step_tokens: int = 1
    rope: Rope | None = None


@dataclass(frozen=True)
class LayerPlan:
    """The groups of one layer, and what its method must be shown of it; layers of equal plans share a program."""

    groups: tuple[GroupPlan, ...]
    needs: frozenset[str] = frozenset()

    @property
    def selects(self) -> bool:
        """Whether the layer selects its rows itself; otherwise it takes over what an earlier layer selected."""
        return "selection" not in self.needs

    @property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """The KV heads of each group."""
        return tuple(group.heads for group in self.groups)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Slots of each group."""
        return tuple(group.capacity for group in self.groups)


def request_of_model(config: ModelConfig, dtype: Any, lengths: np.ndarray, **counts: int) -> Request:
    """The request of prompts of these lengths to a model whose parameters have this type.

    `counts` are `max_new_tokens`, `reserve` and `step_tokens`.
    """
    row_bytes = 2 * config.head_dim * jnp.dtype(dtype).itemsize + DEGREE_BYTES
    return Request(lengths, config.num_layers, config.num_kv_heads, row_bytes=row_bytes, rope=config.rope, **counts)


def request_of_tensors(keys: Any, values: Any, lengths: np.ndarray, num_layers: int, max_new_tokens: int) -> Request:
    """The request of bare keys and values [B,K,N,D]; their rotations are those of the default RoPE."""
    dim = keys.shape[-1]
    row_bytes = dim * (keys.dtype.itemsize + values.dtype.itemsize) + DEGREE_BYTES
    return Request(
        lengths, num_layers, keys.shape[1], max_new_tokens, max_new_tokens, row_bytes=row_bytes, rope=Rope(1e4, dim)
    )


def plan_layer(method: "Method", layer: int, request: Request) -> LayerPlan:
    """The groups of a layer: heads of equal budgets stand together, the largest budget first.

    Nothing here depends on how many tokens will be generated but on the reserve for them, so that one program serves
    any number.
    """
    lengths = np.asarray(request.lengths)
    most = stages(method.budget_rows(lengths, layer, replace(request, max_new_tokens=request.reserve)))
    least = stages(method.budget_rows(lengths, layer, replace(request, max_new_tokens=0)))[..., 0]
    groups = []
    for heads in _equal_heads(most):
        rows = np.maximum(most[:, heads[0]], method.protected.fewest)
        covered = np.all(least[:, heads[0]] >= lengths) and method.schedule.kind == "append" and method.forgets
        slots = capacity(method, lengths, rows, request)
        groups.append(
            GroupPlan(
                heads,
                aligned(int(np.max(slots))),
                most_rows=int(np.max(np.minimum(rows[:, -1], lengths + request.reserve))),
                keep_all=bool(covered) or bool(np.min(rows) >= MOST_ROWS),
                reserve=request.reserve,
                step_tokens=request.step_tokens,
                rope=request.rope,
            )
        )
    return LayerPlan(tuple(groups), method.needs(layer))


def capacity(method: "Method", lengths: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
    """The most rows that a head comes to hold, by prompt length; `rows` are its budgets [lengths, stages]."""
    everything = lengths + request.reserve
    if not method.forgets:
        return everything
    after_prompt, schedule = rows[:, 0], method.schedule
    over = (lengths > after_prompt) & (lengths >= after_prompt + schedule.slack)
    held = np.where(over, after_prompt, lengths)
    return np.minimum(_most_held(schedule, held, rows[:, -1], request), everything)


def _most_held(schedule: "Schedule", held: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
    """The most rows of a head that holds `held` after the prompt, and returns to `rows` by this schedule."""
    appended = held + request.reserve
    if schedule.kind == "interval" and request.reserve:
        # A step begins with less than B + interval rows, or with what the prompt left.
        appended = np.maximum(held, rows + schedule.interval - 1) + request.step_tokens
    elif schedule.kind == "token":  # one slot more for the token whose step decides what goes
        appended = np.minimum(appended, np.maximum(held, rows) + 1)
    elif schedule.kind == "ring":
        appended = np.minimum(appended, np.maximum(held, rows))
    return appended + schedule.rounding


def check_budgets(
    method: "Method", lengths: np.ndarray, request: Request, budget_rows: Callable[..., np.ndarray]
) -> None:
    """Raise ValueError if a prompt that is or will be compressed has no room beside its protected rows, by these
    budgets: `budget_rows(lengths, layer, request)`.
    """
    schedule, protected = method.schedule, method.protected
    for layer in range(request.num_layers):
        rows = budget_rows(lengths, layer, request)
        returns = np.zeros(rows.shape, bool)
        if schedule.kind != "append" and method.forgets:
            beyond = schedule.interval if schedule.kind == "interval" else 1
            returns = lengths[:, None] + request.reserve >= rows + beyond
        impossible = ((rows < lengths[:, None]) | returns) & (rows < protected.fewest)
        if impossible.any():
            at, head = np.argwhere(impossible)[0]
            raise ValueError(
                f"{type(method).__name__}: a prompt of {lengths[at]} tokens has a budget of {rows[at, head]} rows, "
                f"which must be more than {protected}."
            )


def rows_of_request(
    method: "Method", plan: LayerPlan, lengths: Int[Array | np.ndarray, " B"], layer: int, request: Request
) -> Int[Array, "B groups stages"]:
    """B of each prompt and group of the layer's heads, as device numbers that the host computes."""
    known = concrete(lengths)
    at = np.arange(int(np.max(request.lengths)) + 1) if known is None else known
    first = [heads[0] for heads in plan.heads]
    rows = np.minimum(stages(method.budget_rows(at, layer, request))[:, first], MOST_ROWS)
    if known is not None:
        return jnp.asarray(rows, jnp.int32)
    # Lengths that are traced cannot be checked: every head keeps at least what it must.
    return look_up(np.maximum(rows, method.protected.fewest), lengths)


def stages(rows: np.ndarray) -> np.ndarray:
    """Budgets [lengths, K] or [lengths, K, stages] as the latter: after the prompt, and while decoding."""
    return rows if rows.ndim == 3 else rows[..., None]


def aligned(slots: int) -> int:
    """`slots`, on a TPU rounded up to its tile of 16 rows: of another size, XLA would lay the cache out by batch rows
    and copy all of it into and out of the decode loop.
    """
    return -(-slots // 16) * 16 if platform() == "tpu" else slots


def all_heads(rows: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """Budgets [lengths, ...] as those of every head [lengths, K, ...]: a view, since a table of all lengths is long."""
    return np.broadcast_to(rows[:, None], (len(rows), num_kv_heads, *rows.shape[1:]))


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
