"""Knorm: keep the shortest keys (Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache
Compression").
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.families.eviction import Scoped
from clusterkv_jax.scores import as_ranked


@dataclass(frozen=True)
class Knorm(Scoped):
    """Keep the B rows whose keys have the smallest norm; none is protected.

    Attributes:
        budget: rows per KV head; the mean of a layer with `scope="layer"`.
        scope: "head": rows compete in their head; "layer": over all heads of a layer.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever.
    """

    scope: Literal["head", "layer"] = "head"
    decode_interval: int | None = None

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        cache: Any = rows.cache
        # In the first layer a token's key has one norm wherever the token stands.
        return as_ranked(-jnp.linalg.norm(cache.keys.astype(jnp.float32), axis=-1))
