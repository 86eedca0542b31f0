"""What is known of a request before its prompt is read, and the static facts of a layer that follow (`plan`)."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.cache.layers import HeadSlots
from clusterkv_jax.kernels.quantised import CacheDtype
from clusterkv_jax.kernels.quantised import row_bytes as stored_bytes
from clusterkv_jax.models.config import ModelConfig, Rope

DEGREE_BYTES = 4


@dataclass(frozen=True, eq=False)
class RequestShape:
    """Everything that a plan may depend on; `request_of_model` and `request_of_tensors` make one.

    Attributes:
        lengths: the prompt lengths that may occur: those of a bucket, or the actual ones.
        num_layers: those that see every token. Methods and budgets count them alone.
        num_kv_heads: of each layer.
        max_new_tokens: what budgets of base "prompt+new" count.
        reserve: tokens that will be appended after the prompt, question and answer.
        step_tokens: the most of them that are appended at once.
        row_bytes: of one row of one head: a key, a value and a degree.
        rope: the model's rotations, None where it has none.
        whole: prompts of at most so many tokens are kept whole, whatever their budget.
        soft_capped: whether scores are capped: a shift common to all rows then changes their softmax.
    """

    lengths: np.ndarray
    num_layers: int
    num_kv_heads: int
    max_new_tokens: int = 0
    reserve: int = 0
    step_tokens: int = 1
    row_bytes: int = 0
    rope: Rope | None = None
    whole: int = 0
    soft_capped: bool = False

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
        most_rows: the largest budget that may occur, of a prompt and what is appended to it at most. Lists of
            clustering become no shorter than that.
        fewest_rows: the smallest budget of the longest prompt, by which rounds of clustering are counted.
        keep_all: whether the group keeps every row, so that its method never sees it.
        reserve: tokens that will be appended after the prompt.
        step_tokens: the most of them that are appended at once.
        rope: the model's rotations.
        share: the group's part of the budget in units of the mean over all layers and heads.
        soft_capped: as in `RequestShape`.
        exact: whether every prompt is known to be the longest, with a budget of `most_rows`.
    """

    heads: tuple[int, ...]
    capacity: int
    most_rows: int = MOST_ROWS
    fewest_rows: int = MOST_ROWS
    keep_all: bool = False
    reserve: int = 0
    step_tokens: int = 1
    rope: Rope | None = None
    budget_share: float = 1.0
    soft_capped: bool = False
    exact: bool = False


@dataclass(frozen=True)
class PagePlan:
    """Where the heads of a layer stand in pages.

    Attributes:
        first: the first page of each head.
        count: pages of the layer.
        slots: of a page.
        head_slots: heads of equal budgets, and the slots that each of them asks for.
    """

    first: tuple[int, ...]
    count: int
    slots: int
    head_slots: HeadSlots


@dataclass(frozen=True)
class LayerPlan:
    """The groups of one layer, and what its method must be shown of it; layers of equal plans share a program.

    A layer with a `window` has one group, which no method sees.

    With `by_head` the heads of several groups are compressed in one program, each as a sequence of its own, and stand
    in the pages of `pool`; it is the same for all layers of a request. Else a group has a program.
    """

    groups: tuple[GroupPlan, ...]
    inputs: frozenset[str] = frozenset()
    window: int | None = None
    by_head: GroupPlan | None = None
    pool: PagePlan | None = None

    @property
    def selects(self) -> bool:
        """Whether the layer selects its rows itself; otherwise it takes over what an earlier layer selected."""
        return "selection" not in self.inputs

    @property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """The KV heads of each group."""
        return tuple(group.heads for group in self.groups)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Slots of each group."""
        return tuple(group.capacity for group in self.groups)


def row_bytes(dim: int, *dtypes: Any, stored: CacheDtype | None = None) -> int:
    """Bytes of one row of one head, a key, a value and a degree, of these two types or `stored` in another."""
    widths = [dim * jnp.dtype(dtype).itemsize if stored is None else stored_bytes(stored, dim) for dtype in dtypes]
    return sum(widths) + DEGREE_BYTES


def request_of_model(
    config: ModelConfig, dtype: Any, lengths: np.ndarray, stored: CacheDtype | None = None, **counts: Any
) -> RequestShape:
    """The request of prompts of these lengths to a model whose parameters have this type; rows may be `stored` in
    another.

    `counts` are `max_new_tokens`, `reserve`, `step_tokens` and `whole`.
    """
    row = row_bytes(config.head_dim, dtype, dtype, stored=stored)
    known: Any = {"row_bytes": row, "rope": config.rope, "soft_capped": config.soft_cap is not None}
    return RequestShape(lengths, len(config.global_layers), config.num_kv_heads, **known, **counts)


def request_of_tensors(
    keys: Any,
    values: Any,
    lengths: np.ndarray,
    num_layers: int,
    max_new_tokens: int,
    *,
    stored: CacheDtype | None = None,
) -> RequestShape:
    """The request of bare keys and values [B,K,N,D]; their rotations are those of the default RoPE."""
    dim = keys.shape[-1]
    row = row_bytes(dim, keys.dtype, values.dtype, stored=stored)
    return RequestShape(
        lengths, num_layers, keys.shape[1], max_new_tokens, max_new_tokens, row_bytes=row, rope=Rope(1e4, dim)
    )


def all_heads(rows: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """Budgets [lengths, ...] as those of every head [lengths, K, ...]: a view, since a table of all lengths is long."""
    return np.broadcast_to(rows[:, None], (len(rows), num_kv_heads, *rows.shape[1:]))
