"""Quest: recall whole pages of successive rows (Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context
LLM Inference").
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.cache.layers import LayerCache, StepInputs
from clusterkv_jax.kernels.index_scores import index_scores
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.select_rows import select_rows
from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.families.recall import Index, Recall, unless_over
from clusterkv_jax.runtime.errors import check_fields, is_count
from clusterkv_jax.runtime.sharding import over_heads


@dataclass(frozen=True)
class Quest(Recall):
    """Attend to the pages of `page` rows whose keys could score best with the query: B // `page` of them, at least
    `min_pages`, the newest always among them.

    A page's score is sum_d max(q_d min_d, q_d max_d) over the smallest and largest entries of its keys. The first
    `dense_layers` attend to everything.

    Attributes:
        budget: rows that a query reads in a step.
        page: rows of a page.
        min_pages: fewest pages that a query reads.
        dense_layers: first layers, which attend to everything.
    """

    page: int = 16
    min_pages: int = 3
    dense_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("page", is_count(self.page, 1), "a whole number of at least 1"),
            ("min_pages", is_count(self.min_pages, 1), "a whole number of at least 1"),
        )

    @override
    def most_recalled(self, rows: int) -> int:
        """At least those of the fewest pages."""
        return max(rows, self.min_pages * self.page)

    @override
    def unindexed(self, tokens: int) -> int:
        """The newest page, which is read whatever its score."""
        del tokens
        return self.page

    @override
    def unchosen(self, index: Index) -> Int[Array, " B"]:
        """Where the newest page begins."""
        return (index["indexed"] - 1) // self.page * self.page

    @override
    def build(self, prompt: LayerCache, rows: Rows, reserve: int, **options: Any) -> Index:
        """The bounds of every page: the largest and the smallest entries of the keys there are."""
        pages = -(-(prompt.capacity + reserve) // self.page)
        spare = [(0, 0), (0, 0), (0, pages * self.page - prompt.capacity), (0, 0)]
        real = ordinals(prompt.capacity, 3)[..., None] < prompt.length[..., None, None]
        most = float(jnp.finfo(prompt.keys.dtype).max)

        def bound(fill: float, over: Callable[..., Array]) -> Array:
            keys = jnp.where(real, prompt.keys, jnp.asarray(fill, prompt.keys.dtype))
            keys = jnp.pad(keys, spare, constant_values=fill)
            return over(keys.reshape(*keys.shape[:2], pages, self.page, -1), axis=3)

        return {"bounds": jnp.concatenate([bound(-most, jnp.max), bound(most, jnp.min)], axis=-1)}

    @override
    def follow(self, index: Index, group: LayerCache, token: StepInputs) -> Index:
        """The token's key widens the bounds of its page."""
        old, key = index["bounds"], jnp.swapaxes(token.k, 1, 2)
        newest = token.positions // self.page
        high, low = jnp.split(jnp.take_along_axis(old, newest[:, None, :, None], axis=2, mode="clip"), 2, axis=-1)
        wider = jnp.concatenate([jnp.maximum(high, key), jnp.minimum(low, key)], axis=-1)
        at = jnp.where(token.real, newest, old.shape[2])
        put = jax.vmap(jax.vmap(lambda x, part, at: x.at[at].set(part, mode="drop"), in_axes=(0, 0, None)))
        return index | {"bounds": put(old, wider, at), "indexed": group.length[:, 0]}

    @override
    def choose(
        self, index: Index, q: Float[Array, "B K G D"], real: Bool[Array, " B"] | None = None
    ) -> Int[Array, "B K G R"]:
        """The best of the pages before the newest."""
        bounds, count, end = index["bounds"], index["recalled"].shape[-1], self.unchosen(index)
        start = jnp.arange(bounds.shape[2], dtype=jnp.int32) * self.page
        sizes = jnp.where(start[None] < end[:, None], self.page, 0)
        others = (jnp.maximum(index["budget"] // self.page, self.min_pages) - 1) * self.page
        room = jnp.where(index["indexed"] <= index["budget"], end, others)

        def best(q: Array, bounds: Array, sizes: Array, starts: Array, room: Array) -> Array:
            return select_rows(page_scores(q, bounds), sizes, starts, None, room, count=count)

        sizes, starts = (jnp.broadcast_to(x, bounds.shape[:3]) for x in (sizes[:, None], start))
        return unless_over(real, over_heads(best, q, bounds, sizes, starts, room), index)

    @override
    def attended(self, index: Index, q: Float[Array, "B K G D"]) -> Int[Array, "B K G R"]:
        """The newest page, then the best of those before it."""
        chosen, newest = self.choose(index, q), self.unchosen(index)[:, None] + ordinals(self.page, 2)
        newest = jnp.where(newest < index["indexed"][:, None], newest, -1)[:, None, None]
        rows = jnp.concatenate([jnp.broadcast_to(newest, (*chosen.shape[:3], self.page)), chosen], axis=-1)
        # The newest page may be short: what is chosen moves up to it. Both together are no more than the budget.
        order = jnp.argsort(rows < 0, axis=-1, stable=True)[..., : chosen.shape[-1]]
        return jnp.take_along_axis(rows, order, axis=-1)

    @override
    def dim(self, index: Index) -> int:
        """Half of the bounds, which are of two kinds."""
        return index["bounds"].shape[-1] // 2


def page_scores(q: Float[Array, "B K G D"], bounds: Float[Array, "B K P E"]) -> Float[Array, "B K G P"]:
    """sum_d max(q_d min_d, q_d max_d): what q > 0 finds in the largest entries and q < 0 in the smallest."""
    return index_scores(jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1), bounds)
