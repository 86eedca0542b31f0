"""CentroidKV: chunked soft matching after the prompt and every `interval` tokens (Algorithm 1 and section 5)."""

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from clusterkv_jax.methods.families.clustering import Clustering
from clusterkv_jax.runtime.errors import check_fields, is_number


@dataclass(frozen=True)
class CentroidKV(Clustering):
    """Merge `merge_ratio` of the edges per round until the budget B = int(R n) is met; B >= n, or a ratio of 0, keeps
    everything.

    `merge_of` is what the ratio is taken of: the "edges", one for each A row, which is the published reading and its
    name there, "A"; or all rows of the "middle".

    Attributes:
        budget: rows per KV head, sinks and recent rows included.
        sinks: first rows, never merged.
        recent: last rows, never merged.
        chunk: rows of a chunk, an even number.
        merge_ratio: share of the edges that a round merges.
        merge_of: what the share is taken of: "edges" (the paper's "A", one for each A row), or all rows of the
            "middle".
        interval: generated tokens between two clusterings.
        degree_power: a centroid of n rows counts as n to this power: 1 is the paper's log degree, 0 one row.
    """

    merge_ratio: float = 0.8
    merge_of: Literal["edges"] | Literal["A", "middle"] = "A"
    interval: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self, ("merge_ratio", is_number(self.merge_ratio) and 0 <= self.merge_ratio <= 1, "between 0 and 1")
        )

    @property
    @override
    def ratios(self) -> tuple[float, ...]:
        return (self.merge_ratio,)
