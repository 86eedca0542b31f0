"""Chelsea: chunked soft matching with a decaying ratio, and outlier heads that keep all their tokens (section 5)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from typing_extensions import override

from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.methods.budgets import head_rows
from clusterkv_jax.methods.families.clustering import Clustering
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.methods.schedule import Schedule, recompress_every
from clusterkv_jax.runtime.errors import check_fields, counted, is_count, is_number


@dataclass(frozen=True)
class Chelsea(Clustering):
    """Merge r = max(r_init - r_decay min(r_steps, i), r_min) of the middle rows in round i of a request's life.

    The budget is B = int(R (n + max new tokens)), and a prompt is clustered only if n >= B + interval.
    `outlier_heads`, pairs (layer, KV head), keep every token; the other heads get B' = (B - p n) / (1 - p), where p
    is the share of outlier heads among all heads of the model, so that the whole cache stays at B rows per head.

    Attributes:
        budget: rows per KV head, sinks and recent rows included; its base is prompt and new tokens.
        sinks: first rows, never merged.
        recent: last rows, never merged.
        chunk: rows of a chunk, an even number.
        r_init: share of the middle that the first round merges.
        r_decay: what each round takes off that share.
        r_steps: rounds after which the share stays.
        r_min: least share of a round.
        interval: generated tokens between two clusterings.
        outlier_heads: pairs (layer, KV head) that keep every row.
        degree_power: a centroid of n rows counts as n to this power: 1 is the paper's log degree, 0 one row.
    """

    r_init: float = 0.45
    r_decay: float = 0.05
    r_steps: int = 3
    r_min: float = 0.05
    interval: int = 128
    outlier_heads: tuple[tuple[int, int], ...] = ()

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
    @override
    def ratios(self) -> tuple[float, ...]:
        """The decaying ratio of each round; the last serves all later ones."""
        return tuple(max(self.r_init - self.r_decay * i, self.r_min) for i in range(self.r_steps + 1))

    @property
    @override
    def schedule(self) -> Schedule:
        """A prompt is clustered if n >= B + interval."""
        return recompress_every(self.interval, slack=self.interval)

    @override
    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        """As for all methods; and every outlier head must exist."""
        for where in self.outlier_heads:
            if where[0] >= request.num_layers or where[1] >= request.num_kv_heads:
                raise ValueError(
                    f"Chelsea outlier head {where} does not exist: the model has {request.num_layers} layers "
                    f"of {request.num_kv_heads} KV heads."
                )
        for n, b in zip(lengths, self.budget_rows(lengths, 0, request).min(axis=1), strict=True):
            if b < 0:
                raise ValueError(
                    f"Chelsea: a prompt of {counted(n, 'token')} has a budget below what its "
                    f"{len(self.outlier_heads)} outlier heads keep, which is everything."
                )
        super().check(lengths, request)

    @override
    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        """B' of each prompt: what the budget leaves for a head that is no outlier; those keep everything."""
        budget = replace(self.budget, base=self.budget.base or "prompt+new")
        rows = head_rows(budget, lengths, layer, request)
        if not any(self.ratios):
            return super().budget_rows(lengths, layer, request)
        heads, outliers = request.num_layers * request.num_kv_heads, len(self.outlier_heads)
        if outliers:
            # (B - p n) / (1 - p) with p = outliers / heads, in whole numbers; nothing is compressed where B >= n.
            column = lengths[:, None]
            rows = np.where(rows >= column, rows, (rows * heads - outliers * column) // max(1, heads - outliers))
        whole = [head for where, head in self.outlier_heads if where == layer]
        if whole:
            rows = rows.copy()
            rows[:, whole] = MOST_ROWS
        return rows
