"""KeyDiff: keep the keys that differ most from the others (Park et al., "KeyDiff: Key Similarity-Based KV Cache
Eviction for Long-Context LLM Inference in Resource-Constrained Environments").
"""

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.learned import keydiff
from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.families.eviction import Scoped


@dataclass(frozen=True)
class KeyDiff(Scoped):
    """Keep the B rows whose keys are least like the mean direction of their head's keys; none is protected.

    scope "layer": rows compete over all heads of a layer, which share its memory by pages.

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
        return keydiff(cache.keys, lengths=cache.length)
