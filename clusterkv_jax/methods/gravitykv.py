"""GravityKV: chunked soft matching that merges what changes attention least (docs/methods/gravitykv.md)."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from clusterkv_jax.methods.families.clustering import Clustering
from clusterkv_jax.runtime.errors import check_fields, is_number
from clusterkv_jax.soft_matching import Edges


@dataclass(frozen=True)
class GravityKV(Clustering):
    """Merge `merge_ratio` of the middle rows per round; an edge counts by keys, values and degrees.

    score(a, b) = -|k_a - k_b|^2 / (2 mean |k|^2) + value_weight cos(v_a, v_b) + gravity log2(n_a n_b)

    The distance of keys bounds the change of every logit, which their cosine does not; merging unlike values destroys
    what attention reads; and heavy centroids attract, so that what is common collects in few of them and rare rows stay
    single.

    Attributes:
        budget: rows per KV head, sinks and recent rows included.
        sinks: first rows, never merged.
        recent: last rows, never merged.
        chunk: rows of a chunk, an even number.
        merge_ratio: share of the middle that a round merges.
        value_weight: weight of the cosine of values.
        gravity: weight of the degrees.
        interval: generated tokens between two clusterings.
        degree_power: a centroid of n rows counts as n to this power: 1 is the log degree of the papers, 0 one row.
    """

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
    @override
    def ratios(self) -> tuple[float, ...]:
        return (self.merge_ratio,)

    @property
    @override
    def edges(self) -> Edges:
        return Edges(self.value_weight, self.gravity)
