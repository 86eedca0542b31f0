"""PyramidKV: SnapKV's scores, with budgets that fall linearly over the layers (Cai et al., "PyramidKV: Dynamic KV Cache
Compression based on Pyramidal Information Funneling").
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.budget import rows_for
from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.families.eviction import Windowed
from clusterkv_jax.methods.request import RequestShape, all_heads
from clusterkv_jax.methods.schedule import Protected
from clusterkv_jax.methods.snapkv import check_pooling, snap_scores
from clusterkv_jax.runtime.errors import check_fields, counted, is_number, is_one_of
from clusterkv_jax.scores import Pooling


@dataclass(frozen=True)
class PyramidKV(Windowed):
    """Layer l keeps max - l (max - min) / (L - 1) rows, so that their mean is the budget b.

    mode "kvpress": the window counts in b; min = b / beta, max = 2 b - min.
    mode "factory": the window comes on top of b - window, and steps between layers are whole.
    Where a prompt is too short for such a pyramid, it is made flatter or all layers keep b.

    Attributes:
        budget: mean number of rows per KV head over the layers; no `shares`.
        window: last queries, whose rows always stay.
        kernel: neighbours that pooling covers, an odd number.
        pooling: "max" or "avg".
        beta: steepness: the smallest layer gets 1 / `beta` of the mean.
        mode: which published schedule.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever.
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"
    beta: float = 20
    mode: Literal["kvpress", "factory"] = "kvpress"
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooling(self)
        check_fields(
            self,
            ("beta", is_number(self.beta) and self.beta >= 1, "a number of at least 1"),
            ("mode", is_one_of(self.mode, "kvpress", "factory"), '"kvpress" or "factory"'),
            ("budget", self.budget.shares is None, "one without shares: the layers' budgets are the method's own"),
        )

    @property
    @override
    def protected(self) -> Protected:
        """The last layers may keep the window alone."""
        return Protected(window=self.window, min_free=0)

    @override
    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        """As for all methods; and the mean budget must be more than the window."""
        for n, b in zip(lengths, self._mean_rows(lengths, request), strict=True):
            if b < n and b <= self.window:
                raise ValueError(
                    f"PyramidKV: a prompt of {counted(n, 'token')} has a budget of {counted(max(0, int(b)), 'row')}, "
                    f"which must be more than window = {self.window}."
                )
        super().check(lengths, request)

    @override
    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        """What this layer keeps of each prompt, the same for all heads."""
        mean = self._mean_rows(lengths, request)
        schedule = _kvpress_rows if self.mode == "kvpress" else _factory_rows
        rows = schedule(lengths, mean, self.window, self.beta, layer, request.num_layers)
        rows = np.where(mean >= lengths, mean, rows).astype(np.int64)
        return all_heads(rows, request.num_kv_heads)

    def _mean_rows(self, lengths: np.ndarray, request: RequestShape) -> np.ndarray:
        """b of each prompt: a fraction of a row counts in the published schedule, where the budget is a ratio."""
        budget = self.budget
        whole = rows_for(budget, lengths, request.max_new_tokens, bytes_per_row=request.bytes_per_row)
        if budget.ratio is None or budget.ratio >= 1 or self.mode == "factory":
            return whole
        new = request.max_new_tokens if budget.base == "prompt+new" else 0
        return budget.ratio * (np.asarray(lengths, np.float64) + new)

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        return snap_scores(rows, self.window, self.kernel, self.pooling, False)


def _kvpress_rows(n: np.ndarray, b: np.ndarray, window: int, beta: float, layer: int, layers: int) -> np.ndarray:
    """The window inside the budget, as kvpress counts."""
    least, most = b / beta, 2 * b - b / beta
    least, most = np.where(most >= n - window, 2 * b - (n - window), least), np.minimum(most, n - window)
    steep = (n >= most) & (most >= least) & (least >= window)
    if layers == 1:
        return np.maximum(1, np.rint(b))
    return np.where(steep, np.rint(most - layer * ((most - least) / (layers - 1))), np.maximum(1, np.rint(b)))


def _factory_rows(n: np.ndarray, b: np.ndarray, window: int, beta: float, layer: int, layers: int) -> np.ndarray:
    """The window on top of the budget, in whole steps, as KVCache-Factory counts."""
    rest = b - window
    least = rest // beta
    most = 2 * rest - least
    least, most = np.where(most >= n - window, 2 * rest - (n - window), least), np.minimum(most, n - window)
    step = (most - least) // max(layers - 1, 1)
    falling = most - layer * step + window
    return np.where((n < 2 * rest) | (layers == 1), b, falling)
