"""No compression: the reference for all methods."""

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.methods.base import Compressed, Method, Rows
from clusterkv_jax.methods.request import RequestShape, all_heads


@dataclass(frozen=True)
class Full(Method):
    """Keep every token."""

    @override
    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        return all_heads(np.full(len(lengths), MOST_ROWS, np.int64), request.num_kv_heads)

    @override
    def compress(self, rows: Rows) -> Compressed:
        return Compressed(rows.cache)
