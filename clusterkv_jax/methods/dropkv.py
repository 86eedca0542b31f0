"""DropKV: keep the rows without which the last queries would read something else ("DropKV", OpenReview MqfNzH3TVH)."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.learned.output import drop_scores
from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.families.eviction import Scoped, Windowed, window_of
from clusterkv_jax.runtime.errors import check_fields, is_count


@dataclass(frozen=True)
class DropKV(Scoped, Windowed):
    """Keep the last `window` rows, and of those before them the ones that change the outputs of the last `window`
    queries most when each is dropped alone.

    The scores are the mean squared changes of a group's query heads, averaged over `kernel` rows.

    Attributes:
        budget: rows per KV head, window included; the mean of a layer with `scope="layer"`.
        window: last queries, whose rows always stay.
        kernel: neighbours that a score is the mean of, an odd number.
        scope: "head": rows compete in their head; "layer": over all heads of a layer.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever.
    """

    window: int = 32
    kernel: int = 7
    scope: Literal["head", "layer"] = "head"
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        odd = is_count(self.kernel, 1) and self.kernel % 2 == 1
        check_fields(self, ("kernel", odd, "an odd number of rows"))

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        cache: Any = rows.cache
        return drop_scores(*window_of(rows, self.window), cache, self.kernel, 1e-6)
