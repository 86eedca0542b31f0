"""InfiniGen: recall single rows by a few columns of their keys, one layer ahead (Lee et al., "InfiniGen: Efficient
Generative Inference of Large Language Models with Dynamic KV Cache Management").
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.budget import MOST_ROWS
from clusterkv_jax.cache.layers import LayerCache, StepInputs
from clusterkv_jax.kernels.index_scores import index_scores
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.base import Input, Rows
from clusterkv_jax.methods.families.recall import Index, Recall, unless_over
from clusterkv_jax.runtime.errors import check_fields, is_number
from clusterkv_jax.runtime.sharding import over_heads


@dataclass(frozen=True)
class InfiniGen(Recall):
    """Attend to the newest row and the B that score best in `partial_ratio` of the columns of skewed queries and keys.

    The scores of a layer are those of the query that it makes of what the layer before it read; the first layer has
    none before it and attends to everything, as the first `dense_layers` do. With `alpha`, as many rows as score
    above the best one less alpha, averaged over the heads, and at most B.

    Attributes:
        budget: rows that a query reads in a step.
        partial_ratio: share of the columns that scores are made of.
        alpha: distance from the best score within which rows are read; None reads B rows.
        dense_layers: first layers, which attend to everything; at least one.
    """

    partial_ratio: float = 0.2
    alpha: float | None = None
    dense_layers: int = 1

    options: ClassVar[tuple[str, ...]] = ("skew",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("partial_ratio", is_number(self.partial_ratio) and 0 < self.partial_ratio <= 1, "above 0 and at most 1"),
            ("alpha", self.alpha is None or (is_number(self.alpha) and self.alpha >= 0), "at least 0 or None"),
        )

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"lookahead"})

    @override
    def is_dense(self, layer: int) -> bool:
        """The first layer, too: nothing is before it."""
        return layer < max(1, self.dense_layers)

    @override
    def unindexed(self, tokens: int) -> int:
        """The newest token: it is chosen for before its key exists."""
        del tokens
        return 1

    @override
    def build(
        self,
        prompt: LayerCache,
        rows: Rows,
        reserve: int,
        *,
        skew: Float[Array, "B K D D"] | None = None,
        **options: Any,
    ) -> Index:
        """The columns that matter, as a projection [B,K,D,P], and the keys in them.

        `skew` is that of the prompt's own queries by default, or of its keys where queries are not known.
        """
        batch, heads = prompt.length.shape
        source = prompt.keys if rows.queries is None else rows.queries
        real = ordinals(prompt.capacity, 4)[..., None] < prompt.length[:, :, None, None, None]
        grouped = source.reshape(batch, heads, -1, *source.shape[2:]).astype(jnp.float32)
        grouped = jnp.where(real, grouped, 0.0)
        skew = skew_of(grouped) if skew is None else skew
        turned = jnp.einsum("bkgnd,bkde->bkgne", grouped, skew, precision=jax.lax.Precision.HIGHEST)
        columns = partial_columns(turned, self.partial_ratio)
        projection = jnp.take_along_axis(skew, columns[:, :, None], axis=-1)
        part = _project(prompt.keys, projection).astype(prompt.keys.dtype)
        return {"projection": projection, "partial": jnp.pad(part, [(0, 0), (0, 0), (0, reserve), (0, 0)])}

    @override
    def follow(self, index: Index, group: LayerCache, token: StepInputs) -> Index:
        """The token's key in the columns that matter; it can be chosen from the next step on."""
        part = _project(jnp.swapaxes(token.k, 1, 2), index["projection"]).astype(token.k.dtype)
        at = jnp.where(token.real, token.positions, index["partial"].shape[2])
        put = jax.vmap(jax.vmap(lambda x, part, at: x.at[at].set(part, mode="drop"), in_axes=(0, 0, None)))
        return index | {"partial": put(index["partial"], part, at), "indexed": group.length[:, 0] - 1}

    @override
    def choose(
        self, index: Index, q: Float[Array, "B K G D"], real: Bool[Array, " B"] | None = None
    ) -> Int[Array, "B K G R"]:
        """The rows of the highest scores, best first."""
        count = index["recalled"].shape[-1]
        scores = over_heads(index_scores, _project(q, index["projection"]), index["partial"])
        indexed = ordinals(scores.shape[-1], 4) < index["indexed"][:, None, None, None]
        scores = jnp.where(indexed, scores, -jnp.inf)
        counts = index["budget"]
        if self.alpha is not None:
            near = jnp.minimum(counts, rows_within(scores, self.alpha))
            counts = jnp.where(counts >= MOST_ROWS, counts, near)  # a prompt within its budget is read whole
        best, rows = jax.lax.top_k(scores, min(count, scores.shape[-1]))
        selection = (ordinals(rows.shape[-1], 4) < counts[:, None, None, None]) & (best > -jnp.inf)
        spare = [(0, 0)] * 3 + [(0, count - rows.shape[-1])]
        result = jnp.pad(jnp.where(selection, rows.astype(jnp.int32), -1), spare, constant_values=-1)
        return unless_over(real, result, index)

    @override
    def dim(self, index: Index) -> int:
        """What the projection takes."""
        return index["projection"].shape[2]


def skew_of(queries: Float[Array, "B K G N D"]) -> Float[Array, "B K D D"]:
    """The orthogonal matrix of each KV head that gathers its queries in few columns: their right singular vectors.

    Queries and keys that are both turned by it have the products they had.
    """
    rows = queries.reshape(*queries.shape[:2], -1, queries.shape[-1]).astype(jnp.float32)
    # Right singular vectors are the eigenvectors of Q'Q, which is D x D however long the text.
    square = jnp.einsum("bknd,bkne->bkde", rows, rows, precision=jax.lax.Precision.HIGHEST)
    return jnp.linalg.eigh(square)[1]


def partial_columns(queries: Float[Array, "B K G N D"], ratio: float) -> Int[Array, "B K P"]:
    """The int(ratio D) columns, at least one, with the largest sums of |q| over a KV head's queries, largest first."""
    size = jnp.sum(jnp.abs(queries.astype(jnp.float32)), axis=(2, 3))
    return jax.lax.top_k(size, max(1, int(ratio * queries.shape[-1])))[1]


def rows_within(scores: Float[Array, "B K G C"], alpha: float) -> Int[Array, " B"]:
    """How many rows score above the head's best one less alpha: the mean over all heads, rounded down."""
    near = scores > jnp.max(scores, axis=-1, keepdims=True) - alpha
    return jnp.sum(near, axis=(1, 2, 3), dtype=jnp.int32) // (scores.shape[1] * scores.shape[2])


def _project(x: Float[Array, "B K N D"], projection: Float[Array, "B K D P"]) -> Float[Array, "B K N P"]:
    """Columns of turned rows, in float32."""
    wide = x.astype(jnp.float32)
    return jnp.einsum("bknd,bkdp->bknp", wide, projection, precision=jax.lax.Precision.HIGHEST)
