"""What a method is told: of a request before its prompt is read, of a layer, and of the tokens that enter it."""

from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.models.config import Rope

# What a method keeps of a group of heads between steps, by name; None where tokens are only ever appended.
State = dict[str, Array] | None


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewTokens:
    """T tokens that enter a layer: the first `count` of each row are real, the others padding.

    `ahead` are the queries that this layer makes of what the previous layer read, for methods that look one layer
    ahead; None in the first layer and for all others.
    """

    q: Float[Array, "B T H D"]
    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    ahead: Float[Array, "B T H D"] | None = None
    rope: Rope | None = field(default=None, metadata={"static": True})
