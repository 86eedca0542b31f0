"""What all methods that make centroids have: how much a centroid of many rows counts."""

from dataclasses import dataclass
from typing import ClassVar

from clusterkv_jax.methods.base import Method, StorageKind
from clusterkv_jax.runtime.errors import check_fields, is_number


@dataclass(frozen=True, kw_only=True)
class Merging(Method):
    """Base of settings; those of a method come before these where they are given by place.

    A row of degree n attends with the bias `degree_power` log n: 1 is the weight that its n rows had (the papers), 0
    that of one row.
    """

    degree_power: float = 1.0

    storage: ClassVar[StorageKind] = "centroids"

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = is_number(self.degree_power) and 0 <= self.degree_power <= 1
        check_fields(self, ("degree_power", allowed, "between 0 and 1"))
