"""What a method is told of a request before its prompt is read, and of a layer."""

from dataclasses import dataclass

import numpy as np

from clusterkv_jax.models.config import Rope


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
