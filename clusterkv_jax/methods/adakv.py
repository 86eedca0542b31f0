"""AdaKV: a layer's budget goes to the heads whose attention is spread widest (Feng et al., "Ada-KV: Optimizing KV Cache
Eviction by Adaptive Budget Allocation for Efficient LLM Inference").
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax import pages
from clusterkv_jax.budget import look_up
from clusterkv_jax.cache import Group, LayerCache, PagedHeads, State
from clusterkv_jax.errors import check_fields, is_number
from clusterkv_jax.kernels.row_merge import best_edges
from clusterkv_jax.methods.base import LayerPlan, Request
from clusterkv_jax.methods.snapkv import SnapKV, snap_scores


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Keep the last `window` rows of every head and the best-scored rows of all K heads of a layer, K B rows in all.

    Scores are SnapKV's. How many rows a head gets depends on the prompt, so the heads of a layer share its memory by
    `pages`.

    mode "kvpress": the int(safeguard B) best rows of each head are safe, the best of all others fill K B exactly.
    mode "factory": a head with c of the K (B - window) best rows of the layer before the window keeps its
    round((1 - safeguard) c + int(safeguard (B - window))) best ones and the window: K B up to rounding.
    """

    safeguard: float = 0.2
    mode: Literal["kvpress", "factory"] = "kvpress"

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.budget.shares
        by_head = isinstance(shares, tuple) and isinstance(shares[0], tuple)
        check_fields(
            self,
            ("safeguard", is_number(self.safeguard) and 0 <= self.safeguard <= 1, "between 0 and 1"),
            ("mode", self.mode in ("kvpress", "factory"), '"kvpress" or "factory"'),
            ("budget", not by_head, "one without shares per head: those are the method's own"),
        )

    def held(self, group: Group) -> Int[Array, " B"]:
        """The mean over the heads: what counts against the budget is the layer's."""
        return jnp.sum(group.length, axis=1) // group.length.shape[1]

    def plan(self, layer: int, request: Request) -> LayerPlan:
        """Prompts that the budget covers stay as they are, without pages."""
        plan, lengths = super().plan(layer, request), np.asarray(request.lengths)
        covered = np.all(self.rows(lengths, replace(request, max_new_tokens=0), layer) >= lengths)
        return replace(plan, keep_all=(True,)) if covered and self.decode_interval is None else plan

    def hold(self, group: LayerCache, capacity: int) -> PagedHeads:
        """In pages."""
        return pages.paged(group, group.degree > 0, capacity)

    def slots_after(self, kept: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
        """The most rows on the average of the heads."""
        rounded = 1 if self.mode == "factory" else 0
        return super().slots_after(kept, rows, request) + rounded

    def compress_group(
        self,
        prompt: LayerCache,
        queries: Float[Array, "B H N D"] | None,
        rows: Int[Array, " B"],
        capacity: int,
        plan: LayerPlan,
        key: Array | None,
        handed: Any,
    ) -> tuple[PagedHeads, State, None]:
        """Keep what all heads' windows attend to, in pages."""
        layer = pages.paged(prompt, self.chosen(prompt, queries, rows), capacity)
        return layer, self.start(prompt, rows, queries, plan, key), None

    def recompress_group(
        self, group: PagedHeads, state: Any, target: Int[Array, " B"], position: Int[Array, " B"], handed: Any
    ) -> tuple[PagedHeads, State, None]:
        """Share the rows anew, by the last `window` queries. Heads are taken out of the pages one by one, each with
        room for all rows of the layer.
        """
        heads, slots = group.length.shape[1], group.degree[0].size
        positions = position[:, None] - self.window + jnp.arange(self.window)

        def score(each: tuple[Array, Array]) -> Float[Array, "B C"]:
            head, queries = each
            return self.scores(pages.unpaged(group, slots, head[None]), queries, positions)[:, 0]

        by_head = jnp.stack(jnp.split(state["queries"], heads, axis=1))
        scores = jnp.moveaxis(jax.lax.map(score, (jnp.arange(heads), by_head)), 0, 1)
        keep = self.share_out(scores, group.length, target, slots // heads)
        every = jnp.arange(slots) < group.length[..., None]
        return pages.chosen(group, jnp.where((self.held(group) > target)[:, None, None], keep, every)), state, None

    def keep(
        self, layer: LayerCache, queries: Float[Array, "B H W D"], positions: Int[Array, "B W"], rows: Int[Array, " B"]
    ) -> Bool[Array, "B K C"]:
        """The windows, and the best rows of the layer before them."""
        return self.share_out(self.scores(layer, queries, positions), layer.length, rows, layer.capacity)

    def scores(
        self, layer: LayerCache, queries: Float[Array, "B H W D"], positions: Int[Array, "B W"]
    ) -> Float[Array, "B K C"]:
        """SnapKV's."""
        return snap_scores(layer, queries, positions, self.kernel, self.pooling, self.pool_before_group)

    def share_out(
        self, scores: Float[Array, "B K C"], length: Int[Array, "B K"], rows: Int[Array, " B"], most: int
    ) -> Bool[Array, "B K C"]:
        """The rows that stay, by the scores of those before the window; `rows` beyond `most` are all there are."""
        slot, length = jnp.arange(scores.shape[2]), length[..., None]
        before = slot < length - self.window
        scores = jnp.where(before, scores, -jnp.inf)
        rest = rows - self.window
        if self.mode == "kvpress":
            safe = best_edges(scores, _part(self.safeguard, rows, most) - self.window)
            best = _best_of_layer(jnp.where(safe, jnp.inf, scores), rest)
        else:
            count = jnp.sum(_best_of_layer(scores, rest), axis=-1).astype(jnp.float32)
            floor = _part(self.safeguard, rest, most)[:, None].astype(jnp.float32)
            best = best_edges(scores, jnp.round((1 - self.safeguard) * count + floor).astype(jnp.int32))
        return best | (~before & (slot < length))


def _part(share: float, rows: Int[Array, " B"], most: int) -> Int[Array, " B"]:
    """int(share * rows), of at most `most` rows."""
    table = np.floor(share * np.arange(most + 1, dtype=np.float64))
    return look_up(table.astype(np.int64), jnp.clip(rows, 0, most))


def _best_of_layer(scores: Float[Array, "B K C"], rows: Int[Array, " B"]) -> Bool[Array, "B K C"]:
    """The K rows highest scores of all K heads together; of equal ones the first head's first."""
    batch, heads, slots = scores.shape
    return best_edges(scores.reshape(batch, 1, heads * slots), heads * rows).reshape(scores.shape)
