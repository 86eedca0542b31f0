"""KVzap: keep the rows that a repetition of the context would look at, as a surrogate predicts (Jegou and Jeblick,
"KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", 2601.07891).
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.methods.base import Input
from clusterkv_jax.methods.families.scored import Scored, recent_rows, scores_with_recent
from clusterkv_jax.runtime.errors import check_fields, is_count


@dataclass(frozen=True)
class KVzap(Scored):
    """Keep the first `sinks` rows, the last `recent`, and those between them of the highest predicted scores.

    The model needs a surrogate, which `clusterkv calibrate` fits; heads get the shares that were measured with it.
    Where an eighth of a head's budget is more than `recent`, so many rows stay at the end, but at most `max_recent`.
    With scope "layer" tokens are appended while decoding.

    Attributes:
        budget: rows per KV head, sinks and recent rows included; the mean of a layer with `scope="layer"`.
        sinks: first rows, which always stay.
        recent: last rows, which always stay.
        max_recent: most last rows that stay where an eighth of a head's budget is more than `recent`.
        scope: "head": rows compete in their head; "layer": over all heads of a layer.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever, as it must with
            `scope="layer"`.
    """

    sinks: int = 4
    recent: int = 8
    max_recent: int = 0
    scope: Literal["head", "layer"] = "head"
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("max_recent", is_count(self.max_recent), "a whole number of at least 0"))

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"scores"})

    @override
    def choose(
        self, scores: Float[Array, "B #K C"], length: Int[Array, "B K"], budget: Int[Array, " B"], capacity: int
    ) -> Bool[Array, "B #K C"]:
        """As every eviction does, with the rows that `max_recent` adds above all others."""
        recent = recent_rows(budget, self.recent, self.max_recent)
        return super().choose(scores_with_recent(scores, length, recent), length, budget, capacity)
