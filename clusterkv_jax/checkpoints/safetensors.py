"""Parameters in safetensors files. Where these hold codes and scales, the numbers of what is read are computed.

Tensors are mapped. Of a quantised one the part of a device is dequantised, in float32, when it is copied there, so no
tensor but the one in hand is in memory.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from clusterkv_jax.checkpoints.dequantize import POWERS, decode, dequantise
from clusterkv_jax.checkpoints.expert_stacks import Stack
from clusterkv_jax.checkpoints.packed_words import WordsTensor, of_words
from clusterkv_jax.checkpoints.repack import Coded, halves_of, in_groups, with_scales
from clusterkv_jax.kernels.weight_codes import WeightKind
from clusterkv_jax.models.hf_quantization import PackedWords, Quantization
from clusterkv_jax.models.hf_weights import Stored, StoredStack
from clusterkv_jax.storage.digests import whole
from clusterkv_jax.storage.schema import AnyPath
from clusterkv_jax.storage.weight_files import FILE_TYPES, CheckpointError, TensorEntry

_KINDS: dict[str, WeightKind] = {"e4m3": "fp8", "int8": "int8", "offset8": "int8", "offset4": "int4", "e2m1": "mxfp4"}
# Scales of what is no weight: activations and caches are not quantised here.
_UNUSED = re.compile(r"(^|\.)(input|output|q|k|v)_(scale|zero_point)$")


@runtime_checkable
class CodedTensor(Protocol):
    """A tensor whose numbers are computed from what a file holds."""

    @property
    def path(self) -> AnyPath:
        """Its file."""
        ...

    def read(self, rows: Int[np.ndarray, "_"], columns: Int[np.ndarray, "_"]) -> Float[np.ndarray, "_ _"]:
        """The numbers of some of its rows and columns."""
        ...

    def coded(self, rows: Int[np.ndarray, "_"]) -> Coded | None:
        """Some of its rows as codes; None where the layout of `kernels.weight_codes` cannot hold them."""
        ...


@dataclass(frozen=True)
class InFile:
    """A parameter in a checkpoint's files; `view()` maps it, and its numbers are read when they are asked for."""

    place: Stored
    entry: TensorEntry | CodedTensor

    @property
    def where(self) -> str:
        """Its tensor's name and file in a sentence."""
        return f"{self.place.name} in {self.entry.path}"

    def view(self) -> "np.ndarray | Dequantised":
        """Its numbers."""
        if isinstance(self.entry, TensorEntry):
            return self.place.view(self.entry.map())
        return Dequantised(self.place, self.entry)


@dataclass(frozen=True)
class StackInFiles:
    """A parameter that stacks tensors, each in a place of its own; none is read before it is copied."""

    parts: tuple[InFile, ...]

    @property
    def where(self) -> str:
        """Its first tensor's name and file in a sentence."""
        return self.parts[0].where

    def view(self) -> Stack:
        """Its numbers, one tensor after the other."""
        return Stack(self.parts, whole((len(self.parts), *self.parts[0].place.shape)))


def in_files(place: Stored | StoredStack, entries: Mapping[str, TensorEntry | CodedTensor]) -> InFile | StackInFiles:
    """A parameter in the files that these entries are of."""
    if isinstance(place, Stored):
        return InFile(place, entries[place.name])
    return StackInFiles(tuple(InFile(part, entries[part.name]) for part in place.parts))


# --- quantised tensors ---


@dataclass(frozen=True)
class QuantisedTensor:
    """A tensor of codes and one of scales, which stand for a matrix of numbers: the rows of all `experts` together."""

    how: Quantization
    name: str
    matrix: tuple[int, int]
    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    experts: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor that is not quantised; with experts its rows come last."""
        rows, columns = self.matrix
        return self.matrix if self.experts is None else (self.experts, columns, rows // self.experts)

    @property
    def path(self) -> AnyPath:
        """The file of the codes."""
        return self.codes.path

    @property
    def dtype(self) -> str:
        """The type of its scales, which its publisher's numbers have."""
        return self.scales.dtype

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return _block(self.how, self.matrix)

    def map(self) -> Float[np.ndarray, "R C"]:
        """All of its numbers."""
        return self.read(*map(np.arange, self.matrix))

    def read(
        self, rows: Int[np.ndarray, " part_r"], columns: Int[np.ndarray, " part_c"]
    ) -> Float[np.ndarray, "part_r part_c"]:
        """The numbers of some rows and columns, both in rising order."""
        raw, grid = self.codes.codes(), _grid(self.how, self.matrix)
        # Those of many experts are more than are read at once.
        first, last = rows[0] // self.block[0], rows[-1] // self.block[0] + 1
        if self.scales.dtype in FILE_TYPES:
            scales = self.scales.map().reshape(grid)[first:last].astype(np.float32)
        else:
            scales = POWERS[self.scales.codes().reshape(grid)[first:last]]
        zeros = self._zeros(grid)
        return dequantise(
            raw.reshape(self.matrix[0], -1)[first * self.block[0] :],
            scales,
            None if zeros is None else zeros[first:last],
            code=self.how.code,
            block=self.block,
            rows=rows - first * self.block[0],
            columns=columns,
        )

    def coded(self, rows: Int[np.ndarray, " part_r"]) -> Coded | None:
        """Some rows as codes; None where the last block has fewer columns, or scales are of no type that is read."""
        (count, columns), grid, code = self.matrix, _grid(self.how, self.matrix), self.how.code
        powers = self.scales.dtype not in FILE_TYPES
        if columns % self.block[1] or powers != (code == "e2m1"):
            return None
        down = rows // self.block[0]
        scales = (self.scales.codes() if powers else self.scales.map()).reshape(grid)[down]
        zeros = self._zeros(grid)
        offsets = None if zeros is None else -zeros[down] * scales.astype(np.float32)
        raw = self.codes.codes().reshape(count, -1)[rows]
        if code in ("e2m1", "offset4"):
            codes = halves_of(raw)[:, :columns]
        elif code == "offset8":
            codes = (raw[:, :columns] ^ 0x80).view(np.int8)
        else:
            codes = raw.view(np.int8 if code == "int8" else jnp.float8_e4m3fn)
        kind = _KINDS[code]
        return in_groups(Coded(kind, codes, scales) if powers else with_scales(kind, codes, scales, offsets))

    def _zeros(self, grid: tuple[int, int]) -> np.ndarray | None:
        if self.zeros is None:
            return None
        raw = self.zeros.codes()
        if not self.how.packed:
            return decode(raw, self.how.code).reshape(grid)
        # Those of several rows are packed into one number.
        words = raw.view("<i4")
        return decode(np.ascontiguousarray(words.T).view(np.uint8), self.how.code)[:, : grid[0]].T


# What a parameter is made of.
Entry = TensorEntry | QuantisedTensor | WordsTensor


@dataclass(frozen=True, eq=False)
class Dequantised:
    """A parameter of a quantised tensor, sliced as an array; a part is computed when it is read.

    What was read stays until this is dropped: replicas ask for the same again.
    """

    place: Stored
    tensor: CodedTensor
    cache: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        return self.place.shape

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part, by a slice of every dimension."""
        key = tuple((part.start, part.stop, part.step) for part in index)
        if key not in self.cache:
            self.cache[key] = self.read(index)
        return self.cache[key]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part that does not stay."""
        place, shape = self.place, self.place.shape
        # The parameter's dimensions are those of the rows and then of the columns, or the other way round.
        most = place.rows[-1] if place.linear else place.rows[0]
        split = next(i for i in range(len(shape) + 1) if math.prod(shape[:i]) == most)
        first, last = _numbers(shape[:split], index[:split]), _numbers(shape[split:], index[split:])
        rows, columns = (last, first) if place.linear else (first, last)
        found = self.tensor.read(place.numbers(rows.reshape(-1)), columns.reshape(-1))
        return (found.T if place.linear else found).reshape(first.shape + last.shape)


def _numbers(shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
    """The numbers of the places of an array that an index selects."""
    return np.asarray(np.arange(math.prod(shape)).reshape(shape)[index])


def without_codes(entries: dict[str, TensorEntry], how: Quantization | PackedWords | None) -> dict[str, Entry]:
    """Entries by the names that they have in a model which is not quantised.

    Raises CheckpointError, in one sentence that names the tensor, where codes have not the scales that they need.
    """
    if how is None:
        return dict(entries)
    if isinstance(how, PackedWords):
        return dict(of_words(entries, how))
    ends = how.codes or "weight"
    coded = {
        name.removesuffix(how.codes): name
        for name, entry in entries.items()
        if name.endswith(ends) and (how.codes or entry.dtype == how.type)
    }
    found = {name: _quantised(name, codes, entries, how) for name, codes in coded.items()}
    parts = {f"{name}{end}" for name in coded for end in (*how.scales, how.codes, "_zero_point", "_shape")}
    others = {name: entry for name, entry in entries.items() if name not in parts and not _UNUSED.search(name)}
    return {**others, **found}


def _quantised(name: str, codes: str, entries: dict[str, TensorEntry], how: Quantization) -> QuantisedTensor:
    entry = entries[codes]
    if entry.dtype != how.type:
        raise CheckpointError(f"{codes} in {entry.path} holds {entry.dtype}; allowed: {how.type}.")
    scale = next((f"{name}{end}" for end in how.scales if f"{name}{end}" in entries), f"{name}{how.scales[0]}")
    shape = _shape(name, entries, how)
    zeros = None if how.symmetric else f"{name}_zero_point"
    missing = [part for part in (scale, zeros) if part is not None and part not in entries]
    if missing:
        raise CheckpointError(f"{codes} in {entry.path} lacks {missing[0]}, without which its codes are no numbers.")
    experts = entry.shape[0] if how.code == "e2m1" and len(entry.shape) == 4 else None
    found = QuantisedTensor(how, name, shape, entry, entries[scale], None if zeros is None else entries[zeros], experts)
    grid = _grid(how, shape)
    _check(scale, found.scales, grid, (*FILE_TYPES, "U8") if how.code == "e2m1" else tuple(FILE_TYPES))
    if found.zeros is not None:
        per = 32 // _bits(how)
        _check(zeros or "", found.zeros, (-(-grid[0] // per), grid[1]) if how.packed else grid, (how.type,))
    return found


def _shape(name: str, entries: dict[str, TensorEntry], how: Quantization) -> tuple[int, int]:
    """Rows and columns of a tensor's numbers: as stated where its codes are packed."""
    codes = entries[f"{name}{how.codes}"]
    *front, last = codes.shape or (0,)
    if how.code == "e2m1":
        *front, groups = front or (0,)
        return math.prod(front), groups * last * 2
    if not how.packed:
        return math.prod(front), last
    stated = entries.get(f"{name}_shape")
    if stated is None or stated.dtype not in ("I64", "I32") or stated.shape != (2,):
        raise CheckpointError(f"{name}_packed in {codes.path} lacks {name}_shape, two whole numbers.")
    rows, columns = map(int, stated.codes().view("<i8" if stated.dtype == "I64" else "<i4"))
    if codes.shape != (rows, -(-columns * _bits(how) // 32)) or min(rows, columns) < 1:
        raise CheckpointError(
            f"{name}_packed in {codes.path} has the shape {list(codes.shape)}, which does not hold "
            f"{name}_shape {[rows, columns]} of {_bits(how)} bits."
        )
    return rows, columns


def _check(name: str, entry: TensorEntry, grid: tuple[int, int], types: tuple[str, ...]) -> None:
    """Raise CheckpointError for a tensor that has not a number for each block; dimensions of 1 do not count."""
    if entry.dtype not in types:
        raise CheckpointError(f"{name} in {entry.path} holds {entry.dtype}; allowed: {', '.join(types)}.")
    *front, last = entry.shape or (1,)
    if [n for n in (math.prod(front), last) if n != 1] != [n for n in grid if n != 1]:
        raise CheckpointError(
            f"{name} in {entry.path} has the shape {list(entry.shape)}, its codes imply {list(grid)}."
        )


def _bits(how: Quantization) -> int:
    return 4 if how.code == "offset4" else 8


def _block(how: Quantization, shape: tuple[int, int]) -> tuple[int, int]:
    return how.block[0] or shape[0], how.block[1] or shape[1]


def _grid(how: Quantization, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of its scales."""
    block = _block(how, shape)
    return -(-shape[0] // max(1, block[0])), -(-shape[1] // max(1, block[1]))
