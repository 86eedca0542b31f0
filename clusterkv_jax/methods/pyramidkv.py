"""PyramidKV: SnapKV's scores, with budgets that fall linearly over the layers (Cai et al., "PyramidKV: Dynamic KV Cache
Compression based on Pyramidal Information Funneling").
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.budget import Budget, rows_for
from clusterkv_jax.cache import LayerCache
from clusterkv_jax.errors import check_fields, is_number
from clusterkv_jax.methods.base import Request
from clusterkv_jax.methods.families.eviction import Windowed
from clusterkv_jax.methods.snapkv import best_before_window, check_pooling, snap_scores
from clusterkv_jax.scores import Pooling


@dataclass(frozen=True)
class PyramidKV(Windowed):
    """Layer l keeps max - l (max - min) / (L - 1) rows, so that their mean is the budget b.

    mode "kvpress": the window counts in b; min = b / beta, max = 2 b - min.
    mode "factory": the window comes on top of b - window, and steps between layers are whole.
    Where a prompt is too short for such a pyramid, it is made flatter or all layers keep b. `decode_interval` is as in
    `SnapKV`.
    """

    budget: Budget
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
            ("mode", self.mode in ("kvpress", "factory"), '"kvpress" or "factory"'),
            ("budget", self.budget.shares is None, "one without shares: the layers' budgets are the method's own"),
        )

    @property
    def fewest_rows(self) -> int:
        """The last layers may keep the window alone."""
        return self.window

    def check(self, lengths: Iterable[int], request: Request) -> None:
        """As for all methods; and the mean budget must be more than the window."""
        lengths = np.asarray(tuple(lengths))
        for n, b in zip(lengths, self._mean_rows(lengths, request), strict=True):
            if b < n and b <= self.window:
                raise ValueError(
                    f"PyramidKV: a prompt of {n} tokens has a budget of {int(b)} rows, "
                    f"which must be more than window = {self.window}."
                )
        super().check(lengths, request)

    def rows(self, lengths: np.ndarray, request: Request, layer: int = 0, head: int = 0) -> np.ndarray:
        """What this layer keeps of each prompt."""
        del head
        lengths = np.asarray(lengths)
        mean = self._mean_rows(lengths, request)
        schedule = _kvpress_rows if self.mode == "kvpress" else _factory_rows
        rows = schedule(lengths, mean, self.window, self.beta, layer, request.num_layers)
        return np.where(mean >= lengths, mean, rows).astype(np.int64)

    def _mean_rows(self, lengths: np.ndarray, request: Request) -> np.ndarray:
        """b of each prompt: a fraction of a row counts in the published schedule, where the budget is a ratio."""
        budget = self.budget
        heads = request.num_layers * request.num_kv_heads
        whole = rows_for(
            budget, lengths, request.max_new_tokens, self.default_base, bytes_per_row=request.row_bytes * heads
        )
        if budget.ratio is None or budget.ratio >= 1 or self.mode == "factory":
            return whole
        new = request.max_new_tokens if budget.base == "prompt+new" else 0
        return budget.ratio * (np.asarray(lengths, np.float64) + new)

    def keep(
        self, layer: LayerCache, queries: Float[Array, "B H W D"], positions: Int[Array, "B W"], rows: Int[Array, " B"]
    ) -> Bool[Array, "B K C"]:
        """The window and the best rows before it."""
        scores = snap_scores(layer, queries, positions, self.kernel, self.pooling, False)
        return best_before_window(scores, layer, self.window, rows)


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
