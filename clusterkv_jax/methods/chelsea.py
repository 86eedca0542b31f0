"""Chelsea: chunked soft matching with a decaying ratio, and outlier heads that keep all their tokens (section 5)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from clusterkv_jax.budget import MOST_ROWS, Base, Budget
from clusterkv_jax.errors import check_fields, is_count, is_number
from clusterkv_jax.methods.base import Request
from clusterkv_jax.methods.families.clustering import Clustering


@dataclass(frozen=True)
class Chelsea(Clustering):
    """Merge r = max(r_init - r_decay min(r_steps, i), r_min) of the middle rows in round i of a request's life.

    The budget is B = int(R (n + max new tokens)), and a prompt is clustered only if n >= B + interval.
    `outlier_heads`, pairs (layer, KV head), keep every token; the other heads get B' = (B - p n) / (1 - p), where p
    is the share of outlier heads among all heads of the model, so that the whole cache stays at B rows per head.
    """

    budget: Budget
    sinks: int = 16
    recent: int = 64
    chunk: int = 256
    r_init: float = 0.45
    r_decay: float = 0.05
    r_steps: int = 3
    r_min: float = 0.05
    interval: int = 128
    outlier_heads: tuple[tuple[int, int], ...] = ()

    default_base: ClassVar[Base] = "prompt+new"
    merge_of: ClassVar[str] = "middle"

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = isinstance(self.outlier_heads, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and all(map(is_count, pair)) for pair in self.outlier_heads
        )
        check_fields(
            self,
            ("r_init", is_number(self.r_init) and 0 <= self.r_init <= 1, "between 0 and 1"),
            ("r_decay", is_number(self.r_decay) and 0 <= self.r_decay < 1, "at least 0 and below 1"),
            ("r_steps", is_count(self.r_steps), "a whole number of at least 0"),
            ("r_min", is_number(self.r_min) and 0 <= self.r_min <= 1, "between 0 and 1"),
            ("outlier_heads", pairs, "a tuple of pairs (layer, KV head)"),
            ("outlier_heads", not pairs or len(set(self.outlier_heads)) == len(self.outlier_heads), "without repeats"),
        )

    @property
    def ratios(self) -> tuple[float, ...]:
        """The decaying ratio of each round; the last serves all later ones."""
        return tuple(max(self.r_init - self.r_decay * i, self.r_min) for i in range(self.r_steps + 1))

    @property
    def prefill_slack(self) -> int:
        """A prompt is clustered if n >= B + interval."""
        return self.interval

    def check(self, lengths: Iterable[int], request: Request) -> None:
        """As for all clustering methods; and every outlier head must exist."""
        for where in self.outlier_heads:
            if where[0] >= request.num_layers or where[1] >= request.num_kv_heads:
                raise ValueError(
                    f"Chelsea outlier head {where} does not exist: the model has {request.num_layers} layers "
                    f"of {request.num_kv_heads} KV heads."
                )
        super().check(lengths, request)

    def head_groups(self, layer: int, request: Request) -> tuple[tuple[int, ...], ...]:
        """The outlier heads of this layer first."""
        full = tuple(sorted(head for where, head in self.outlier_heads if where == layer))
        rest = (tuple(h for h in heads if h not in full) for heads in super().head_groups(layer, request))
        return tuple(heads for heads in (full, *rest) if heads)

    def rows(self, lengths: np.ndarray, request: Request, layer: int = 0, head: int = 0) -> np.ndarray:
        """B' of each prompt: what the budget leaves for a head that is no outlier; those keep everything."""
        if (layer, head) in self.outlier_heads:
            return np.full(np.shape(lengths), MOST_ROWS, np.int64)
        budget = super().rows(lengths, request, layer, head)
        heads = request.num_layers * request.num_kv_heads
        outliers = len(self.outlier_heads)
        if not outliers:
            return budget
        # (B - p n) / (1 - p) with p = outliers / heads, in whole numbers; nothing is compressed where B >= n.
        shared = (budget * heads - outliers * np.asarray(lengths)) // (heads - outliers)
        return np.where(budget >= lengths, budget, shared)
