"""GravityKV: chunked soft matching that merges what changes attention least (docs/methods.md)."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import LayerCache
from clusterkv_jax.checks import check_fields, is_number
from clusterkv_jax.methods.clustering import Clustering
from clusterkv_jax.soft_matching import EdgeFeatures


@dataclass(frozen=True)
class GravityKV(Clustering):
    """Merge `merge_ratio` of the middle rows per round; an edge counts by keys, values and degrees.

    score(a, b) = -|k_a - k_b|^2 / (2 mean |k|^2) + value_weight cos(v_a, v_b) + gravity log2(n_a n_b)

    The distance of keys bounds the change of every logit, which their cosine does not; merging unlike values destroys
    what attention reads; and heavy centroids attract, so that what is common collects in few of them and rare rows stay
    single.
    """

    budget: Budget
    sinks: int = 16
    recent: int = 64
    chunk: int = 256
    merge_ratio: float = 0.3
    value_weight: float = 1.0
    gravity: float = 0.05
    interval: int = 128

    merge_of: ClassVar[str] = "middle"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("merge_ratio", is_number(self.merge_ratio) and 0 <= self.merge_ratio <= 1, "between 0 and 1"),
            ("value_weight", is_number(self.value_weight) and self.value_weight >= 0, "a number of at least 0"),
            ("gravity", is_number(self.gravity), "a number"),
        )

    @property
    def ratios(self) -> tuple[float, ...]:
        """The same ratio in every round."""
        return (self.merge_ratio,)

    @property
    def features(self) -> EdgeFeatures:
        """Keys, values and weights, as `edge_features` puts them."""
        return self.edge_features

    def edge_features(
        self, slots: LayerCache, middle: Bool[Array, "B K C"]
    ) -> tuple[Float[Array, "B K C E"], Float[Array, "B K C"]]:
        """The score as a product: features [k / sqrt(mu), sqrt(value_weight) v / |v|] and a bias per row.

        mu is the mean of |k|^2 over the middle rows.
        """
        keys, values = (jnp.where(middle[..., None], x.astype(jnp.float32), 0.0) for x in (slots.keys, slots.values))
        square = jnp.sum(keys**2, axis=-1)
        count = jnp.sum(middle, axis=-1, keepdims=True).astype(jnp.float32)
        mean = jnp.sum(square, axis=-1, keepdims=True) / jnp.maximum(count, 1.0)
        mean = jnp.where(mean > 0, mean, 1.0)
        norm = jnp.sqrt(jnp.sum(values**2, axis=-1, keepdims=True))
        values = values * (self.value_weight**0.5 / jnp.where(norm > 0, norm, 1.0))
        features = jnp.concatenate([keys * jax.lax.rsqrt(mean)[..., None], values], axis=-1)
        bias = self.gravity * jnp.log2(jnp.maximum(slots.degree, 1.0)) - square / (2 * mean)
        return features, bias
