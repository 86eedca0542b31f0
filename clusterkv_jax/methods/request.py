"""What a method is told of a request before its prompt is read, and of a layer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from clusterkv_jax.budget import MOST_ROWS, concrete, look_up
from clusterkv_jax.models.config import Rope

if TYPE_CHECKING:
    from clusterkv_jax.methods.base import Method


@dataclass(frozen=True)
class LayerPlan:
    """The static facts of one layer: per group of its KV heads, the slots and whether the group keeps everything.

    Layers of equal plans share one compiled program. `scores` says whether a method whose layers may share their
    decisions makes this layer's own; `rope` are the model's rotations, for methods that move keys; `rounds` are those
    that compressing takes, where they are known; `recalled` the most rows that a step attends to, for methods that keep
    more than that; `unindexed` the most that their index does not know yet, where those are kept apart.
    """

    heads: tuple[tuple[int, ...], ...]
    capacities: tuple[int, ...]
    keep_all: tuple[bool, ...]
    scores: bool = True
    rope: Rope | None = None
    rounds: int | None = None
    recalled: int = 0
    unindexed: int = 0


@dataclass(frozen=True, eq=False)
class Request:
    """What is known of a request before its prompt is read: everything a plan may depend on.

    `lengths` are the prompt lengths that may occur (those of a bucket, or the actual ones), `reserve` the tokens that
    will be appended after the prompt (question and generated), at most `step_tokens` of them at once;
    `max_new_tokens` is what budgets of base "prompt+new" count. `row_bytes` are those of one row of one head.
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
    def longest(self) -> int:
        """The longest prompt that may occur."""
        return int(np.max(self.lengths))


def request_rows(
    method: "Method", lengths: Int[Array, " B"] | np.ndarray, layer: int, request: Request
) -> Int[Array, "B groups"]:
    """B of each prompt and group of the layer's heads, as device numbers that were computed on the host."""
    known = concrete(lengths)
    at = np.arange(request.longest + 1) if known is None else known
    table = [method.rows(at, request, layer, heads[0]) for heads in method.head_groups(layer, request)]
    rows = np.minimum(np.stack(table, axis=1), MOST_ROWS)  # beyond any cache, with room to add an interval
    if known is not None:
        return jnp.asarray(rows, jnp.int32)
    # Lengths that are traced cannot be checked: every head keeps at least what it must.
    return look_up(np.maximum(rows, method.fewest_rows), lengths)
