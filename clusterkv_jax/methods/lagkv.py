"""LagKV: keep what stands out in its partition, on the scale of the next one (Liang et al., "LagKV: Lag-Relative
Information of the KV Cache Tells Which Tokens Are Important").
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.learned import lagkv
from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.families.eviction import Scoped
from clusterkv_jax.methods.schedule import Protected
from clusterkv_jax.runtime.errors import check_fields, is_count


@dataclass(frozen=True)
class LagKV(Scoped):
    """Keep the first `sinks` rows, and of partitions of `lag` rows behind them those that stand out most.

    The last whole partition and what follows it go before all others; so do the latest rows of a prompt of fewer than
    sinks + 2 lag. Of equal scores the latest row stays. `cross_scoring` lets partitions compete, instead of each losing
    the same share.

    Attributes:
        budget: rows per KV head, sinks included; the mean of a layer with `scope="layer"`.
        sinks: first rows, which always stay.
        lag: rows of a partition.
        cross_scoring: whether rows of different partitions compete by their numbers, not by their ranks.
        scope: "head": rows compete in their head; "layer": over all heads of a layer.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever.
    """

    sinks: int = 4
    lag: int = 128
    cross_scoring: bool = False
    scope: Literal["head", "layer"] = "head"
    decode_interval: int | None = None

    # Ranks tie in all partitions, and all that follows these.
    latest_wins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("sinks", is_count(self.sinks), "a whole number"),
            ("lag", is_count(self.lag, 1), "a whole number of at least 1"),
            ("cross_scoring", isinstance(self.cross_scoring, bool), "True or False"),
        )

    @property
    @override
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks)

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        cache: Any = rows.cache
        settings: Any = {"sinks": self.sinks, "lag": self.lag, "cross_scoring": self.cross_scoring}
        return lagkv(cache.keys, cache.values, lengths=cache.length, **settings)
