"""AdaKV: a layer's budget goes to the heads whose attention is spread widest (Feng et al., "Ada-KV: Optimizing KV Cache
Eviction by Adaptive Budget Allocation for Efficient LLM Inference").
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.budget import look_up
from clusterkv_jax.cache import LayerCache
from clusterkv_jax.checks import check_fields, is_number
from clusterkv_jax.kernels.row_merge import best_edges
from clusterkv_jax.methods.base import Request
from clusterkv_jax.methods.snapkv import SnapKV, snap_scores


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Keep the last `window` rows of every head and the best-scored rows of all K heads of a layer, K B rows in all.

    Scores are SnapKV's. How many rows a head gets depends on the prompt; slots do not: each head has `ceiling` B of
    them, and what it would keep beyond goes to the next best rows of the others. A ceiling of K never binds.

    mode "kvpress": the int(safeguard B) best rows of each head are safe, the best of all others fill K B exactly.
    mode "factory": a head with c of the K (B - window) best rows of the layer before the window keeps its
    round((1 - safeguard) c + int(safeguard (B - window))) best ones and the window: K B up to rounding.
    """

    safeguard: float = 0.2
    ceiling: float = 2.0
    mode: Literal["kvpress", "factory"] = "kvpress"

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.budget.shares
        by_head = isinstance(shares, tuple) and isinstance(shares[0], tuple)
        check_fields(
            self,
            ("safeguard", is_number(self.safeguard) and 0 <= self.safeguard <= 1, "between 0 and 1"),
            ("ceiling", is_number(self.ceiling) and self.ceiling >= 1, "a number of at least 1"),
            ("mode", self.mode in ("kvpress", "factory"), '"kvpress" or "factory"'),
            ("budget", not by_head, "one without shares per head: those are the method's own"),
        )

    def held(self, group: LayerCache) -> Int[Array, " B"]:
        """The mean over the heads: what counts against the budget is the layer's."""
        return jnp.sum(group.length, axis=1) // group.length.shape[1]

    def kept(self, lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The most rows that a head may keep."""
        return np.where(lengths > rows, np.minimum(lengths, _share(self.ceiling, rows)), lengths)

    def slots_after(self, kept: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
        """As for all methods, from the most rows that compressing while decoding may leave a head."""
        return super().slots_after(kept, _share(self.ceiling, rows), request)

    def keep(
        self, layer: LayerCache, queries: Float[Array, "B H W D"], positions: Int[Array, "B W"], rows: Int[Array, " B"]
    ) -> Bool[Array, "B K C"]:
        """The windows, and the best rows of the layer before them."""
        scores = snap_scores(layer, queries, positions, self.kernel, self.pooling, self.pool_before_group)
        slot, length = jnp.arange(layer.capacity), layer.length[..., None]
        before = slot < length - self.window
        scores = jnp.where(before, scores, -jnp.inf)
        possible = jnp.where(best_edges(scores, self._part(self.ceiling, rows, layer) - self.window), scores, -jnp.inf)
        rest = rows - self.window
        if self.mode == "kvpress":
            safe = best_edges(scores, self._part(self.safeguard, rows, layer) - self.window)
            best = _best_of_layer(jnp.where(safe, jnp.inf, possible), rest)
        else:
            count = jnp.sum(_best_of_layer(possible, rest), axis=-1).astype(jnp.float32)
            floor = self._part(self.safeguard, rest, layer)[:, None].astype(jnp.float32)
            best = best_edges(possible, jnp.round((1 - self.safeguard) * count + floor).astype(jnp.int32))
        return best | (~before & (slot < length))

    def _part(self, share: float, rows: Int[Array, " B"], layer: LayerCache) -> Int[Array, " B"]:
        """int(share * rows); more than a layer holds are all it holds."""
        return look_up(_share(share, np.arange(layer.capacity + 1)), jnp.clip(rows, 0, layer.capacity))


def _share(share: float, rows: np.ndarray) -> np.ndarray:
    return np.floor(share * np.asarray(rows, np.float64)).astype(np.int64)


def _best_of_layer(scores: Float[Array, "B K C"], rows: Int[Array, " B"]) -> Bool[Array, "B K C"]:
    """The K rows highest scores of all K heads together; of equal ones the first head's first."""
    batch, heads, slots = scores.shape
    return best_edges(scores.reshape(batch, 1, heads * slots), heads * rows).reshape(scores.shape)
