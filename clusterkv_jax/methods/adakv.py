"""AdaKV: a layer's budget goes to the heads whose attention is spread widest (Feng et al., "Ada-KV: Optimizing KV Cache
Eviction by Adaptive Budget Allocation for Efficient LLM Inference").
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.methods.base import StorageKind
from clusterkv_jax.methods.families.eviction import (
    best_of_layer,
    best_rows,
    best_rows_of_layer,
    protected_rows,
    share_of,
    unprotected,
)
from clusterkv_jax.methods.schedule import Schedule, recompress_every
from clusterkv_jax.methods.snapkv import SnapKV
from clusterkv_jax.runtime.errors import check_fields, is_number, is_one_of


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Keep the last `window` rows of every head and the best-scored rows of all K heads of a layer, K B rows in all.

    Scores are SnapKV's. How many rows a head gets depends on the prompt, so the heads of a layer share its memory by
    `pages`.

    mode "kvpress": the int(safeguard B) best rows of each head are safe, the best of all others fill K B exactly.
    mode "factory": a head with c of the K (B - window) best rows of the layer before the window keeps its
    round((1 - safeguard) c + int(safeguard (B - window))) best ones and the window: K B up to rounding.

    Attributes:
        budget: mean number of rows per KV head of a layer; no `shares` per head.
        window: last queries, whose rows always stay.
        kernel: neighbours that pooling covers, an odd number.
        pooling: "max" or "avg".
        pool_before_group: pool each query head's scores before the mean over the group.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever.
        safeguard: share of B that each head keeps whatever the others need.
        mode: which published rule.
    """

    safeguard: float = 0.2
    mode: Literal["kvpress", "factory"] = "kvpress"

    storage: ClassVar[StorageKind] = "pages"

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.budget.shares
        by_head = isinstance(shares, tuple) and isinstance(shares[0], tuple)
        check_fields(
            self,
            ("safeguard", is_number(self.safeguard) and 0 <= self.safeguard <= 1, "between 0 and 1"),
            ("mode", is_one_of(self.mode, "kvpress", "factory"), '"kvpress" or "factory"'),
            ("budget", not by_head, "one without shares per head: those are the method's own"),
        )

    @property
    @override
    def schedule(self) -> Schedule:
        return recompress_every(self.decode_interval, rounding=1 if is_one_of(self.mode, "factory") else 0)

    @override
    def choose(
        self, scores: Float[Array, "B K C"], length: Int[Array, "B K"], budget: Int[Array, " B"], capacity: int
    ) -> Bool[Array, "B K C"]:
        """The windows, and the best rows of the layer before them; a budget beyond `capacity` is all there are."""
        if self.mode == "kvpress":
            return best_of_layer(scores, length, budget, self.protected, capacity, self.safeguard)
        before = unprotected(scores, length, self.protected)
        scores, rest = jnp.where(before, scores, -jnp.inf), budget - self.window
        count = jnp.sum(best_rows_of_layer(scores, rest), axis=-1).astype(jnp.float32)
        floor = share_of(self.safeguard, rest, capacity)[:, None].astype(jnp.float32)
        best = best_rows(scores, jnp.round((1 - self.safeguard) * count + floor).astype(jnp.int32))
        return best | protected_rows(before, length)
