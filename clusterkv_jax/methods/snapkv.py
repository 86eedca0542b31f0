"""SnapKV: keep what the end of the prompt attends to (Li et al., "SnapKV: LLM Knows What You are Looking for Before
Generation").
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.families.eviction import Windowed, window_of
from clusterkv_jax.runtime.errors import check_fields, is_count, is_one_of
from clusterkv_jax.scores import Pooling, as_ranked, group_mean, pooled, window_scores


@dataclass(frozen=True)
class SnapKV(Windowed):
    """Keep the last `window` rows and the B - window rows before them with the highest pooled attention.

    The scores are the window's mean attention probabilities, averaged over the query heads of a KV head and pooled over
    `kernel` rows; `pool_before_group` pools each query head's first. While decoding the
    last `window` queries choose again, every `decode_interval` rows; without it tokens are appended, as published.

    Attributes:
        budget: rows per KV head, window included.
        window: last queries, whose rows always stay.
        kernel: neighbours that pooling covers, an odd number.
        pooling: "max" or "avg".
        pool_before_group: pool each query head's scores before the mean over the group.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever.
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"
    pool_before_group: bool = False
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooling(self)
        check_fields(self, ("pool_before_group", isinstance(self.pool_before_group, bool), "True or False"))

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        return snap_scores(rows, self.window, self.kernel, self.pooling, self.pool_before_group)


def check_pooling(method: Any) -> None:
    """Raise ValueError for an impossible kernel or pooling."""
    check_fields(
        method,
        ("kernel", is_count(method.kernel, 1) and method.kernel % 2 == 1, "an odd number of rows"),
        ("pooling", is_one_of(method.pooling, "max", "avg"), '"max" or "avg"'),
    )


def snap_scores(
    rows: Rows, window: int, kernel: int, pooling: Pooling, pool_before_group: bool
) -> Float[Array, "B K C"]:
    """Pooled window attention of the rows before the window; what the others hold means nothing."""
    cache: Any = rows.cache
    scores = window_scores(*window_of(rows, window), cache)
    before = cache.length[:, :, None] - window
    if pool_before_group:
        return as_ranked(group_mean(pooled(scores, kernel, pooling, before)))
    return as_ranked(pooled(group_mean(scores), kernel, pooling, before[..., 0]))
