"""Tensors of a checkpoint as one array with a dimension more, which no memory holds until it is copied."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Source(Protocol):
    """A tensor in a file: `view()` maps its numbers, `where` is its place in a sentence."""

    @property
    def where(self) -> str:
        """Its name and file in a sentence."""
        ...

    def view(self) -> Any:
        """Its numbers, as an array or as what is sliced like one."""
        ...


@dataclass(frozen=True, eq=False)
class Stack:
    """A part of the stack of these tensors: `index` has a slice for each dimension, the first for the tensors."""

    sources: Sequence[Source]
    index: tuple[slice, ...]

    def __len__(self) -> int:
        return len(self.sources[self.index[0]])

    def __iter__(self) -> Iterator[tuple[np.ndarray, str]]:
        """Each tensor's part and where it lies, mapped when its turn comes."""
        return ((source.view()[self.index[1:]], source.where) for source in self.sources[self.index[0]])

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as an array."""
        first, _ = next(iter(self))
        return len(self), *first.shape

    def __getitem__(self, index: tuple[slice, ...]) -> "Stack":
        """A part of a whole stack."""
        return Stack(self.sources, index or self.index)

    def astype(self, dtype: Any) -> np.ndarray:
        """All of it in memory, as numbers of this type."""
        return np.stack([part.astype(dtype) for part, _ in self])
