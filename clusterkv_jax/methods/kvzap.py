"""KVzap: keep the rows that a repetition of the context would look at, as a surrogate predicts (Jegou and Jeblick,
"KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", 2601.07891).
"""

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.methods.base import Input, Rows, State
from clusterkv_jax.methods.families.scored import Scored, recent_of_mean, scores_of, scores_with_recent
from clusterkv_jax.runtime.errors import check_fields, is_number


@dataclass(frozen=True)
class KVzap(Scored):
    """Keep the first `sinks` rows, the last `recent`, and those between them of the highest predicted scores.

    The model needs a surrogate, which `clusterkv calibrate` fits; heads get the shares that were measured with it.
    Where `recent_share` of the mean budget is more than `recent`, so many rows stay at the end of every head.
    With scope "layer" tokens are appended while decoding.

    Attributes:
        budget: rows per KV head, sinks and recent rows included; the mean of a layer with `scope="layer"`.
        sinks: first rows, which always stay.
        recent: last rows, which always stay.
        recent_share: part of the mean budget of all heads that are last rows in each, where it is more than `recent`.
        scope: "head": rows compete in their head; "layer": over all heads of a layer.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever, as it must with
            `scope="layer"`.
    """

    sinks: int = 4
    recent: int = 8
    recent_share: float = 0.0
    scope: Literal["head", "layer"] = "head"
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        part = is_number(self.recent_share) and 0 <= self.recent_share < 1
        check_fields(self, ("recent_share", part, "at least 0 and below 1"))

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"scores"})

    @override
    def init_state(self, rows: Rows) -> State:
        """Scores, and beside them the share that tells a head's budget from the mean."""
        state = super().init_state(rows)
        if not (state and self.recent_share):
            return state
        assert rows.budget_share is not None
        return {**state, "share": rows.budget_share}

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        """The scores, with the rows that `recent_share` adds above all others."""
        scores = scores_of(rows)
        if not self.recent_share:
            return scores
        share = rows.state.get("share", rows.budget_share)
        assert share is not None
        cache: Any = rows.cache
        recent = recent_of_mean(self.recent_share, rows.budget, share, rows.budget - self.sinks - 1)
        return scores_with_recent(scores, cache.length, recent)
