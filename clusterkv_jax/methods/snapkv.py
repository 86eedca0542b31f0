"""SnapKV: keep what the end of the prompt attends to (Li et al., "SnapKV: LLM Knows What You are Looking for Before
Generation").
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import LayerCache
from clusterkv_jax.errors import check_fields, is_count
from clusterkv_jax.kernels.row_merge import best_edges
from clusterkv_jax.methods.families.eviction import Windowed
from clusterkv_jax.scores import Pooling, group_mean, pooled, window_scores


@dataclass(frozen=True)
class SnapKV(Windowed):
    """Keep the last `window` rows and the B - window rows before them with the highest pooled attention.

    The scores are the window's mean attention probabilities, averaged over the query heads of a KV head and pooled over
    `kernel` rows; `pool_before_group` pools each query head's first. `decode_interval` compresses again whenever that
    many rows more than B are held, by the last `window` queries then; None appends, as published.
    """

    budget: Budget
    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"
    pool_before_group: bool = False
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooling(self)
        check_fields(self, ("pool_before_group", isinstance(self.pool_before_group, bool), "True or False"))

    def keep(
        self, layer: LayerCache, queries: Float[Array, "B H W D"], positions: Int[Array, "B W"], rows: Int[Array, " B"]
    ) -> Bool[Array, "B K C"]:
        """The window and the best rows before it."""
        scores = snap_scores(layer, queries, positions, self.kernel, self.pooling, self.pool_before_group)
        return best_before_window(scores, layer, self.window, rows)


def check_pooling(method: Any) -> None:
    """Raise ValueError for an impossible kernel or pooling."""
    check_fields(
        method,
        ("kernel", is_count(method.kernel, 1) and method.kernel % 2 == 1, "an odd number of rows"),
        ("pooling", method.pooling in ("max", "avg"), '"max" or "avg"'),
    )


def snap_scores(
    layer: LayerCache,
    queries: Float[Array, "B H W D"],
    positions: Int[Array, "B W"],
    kernel: int,
    pooling: Pooling,
    pool_before_group: bool,
) -> Float[Array, "B K C"]:
    """Pooled window attention of the rows before the window; what the others hold means nothing."""
    scores = window_scores(queries, positions, layer)
    before = layer.length[:, :, None] - queries.shape[2]
    if pool_before_group:
        return group_mean(pooled(scores, kernel, pooling, before))
    return pooled(group_mean(scores), kernel, pooling, before[..., 0])


def best_before_window(
    scores: Float[Array, "B K C"], layer: LayerCache, window: int, rows: Int[Array, " B"]
) -> Bool[Array, "B K C"]:
    """The last `window` rows and the highest scores before them, `rows` in all; of equal scores the first."""
    slot, length = jnp.arange(layer.capacity), layer.length[..., None]
    before = slot < length - window
    best = best_edges(jnp.where(before, scores, -jnp.inf), rows - window)
    return best | (~before & (slot < length))
