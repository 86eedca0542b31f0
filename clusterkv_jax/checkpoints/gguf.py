"""GGUF files: metadata and tensors by name; the numbers of what is read are computed by the package `gguf`.

Nothing is believed: every count, length and offset is compared with the file before it is followed.
"""

import math
import mmap
import struct
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from clusterkv_jax.checkpoints.gguf_codes import gguf_codes
from clusterkv_jax.checkpoints.repack import Coded
from clusterkv_jax.models import gguf
from clusterkv_jax.runtime.extras import library
from clusterkv_jax.storage.schema import AnyPath, as_text, shown
from clusterkv_jax.storage.weight_files import FILE_TYPES, CheckpointError, gguf_parts, naming

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Types of metadata by their number: numbers as struct names them; 8 is a text, 9 a list.
_NUMBERS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
_TEXT, _LIST = 8, 9
# Far more than any model has.
_MOST_ENTRIES, _MOST_DIMENSIONS, _MOST_ALIGNMENT = 2**17, 4, 2**20
_MOST_EXPERTS, _MOST_FACTORS = 2**12, 2**14
# Numbers dequantised at once: what is computed of them stays in a core's cache.
_CHUNK = 2**16
# Shape, number of the type, offset.
_Described = tuple[tuple[int, ...], int, int]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor inside a GGUF file, or the part of a stack of them that is one expert's.

    Attributes:
        kind: its type, as `gguf.GGMLQuantizationType` calls it: "Q4_K".
        block: numbers that are stored together, and their bytes.
        heads: if not None, the rows of each head are stored in the order in which llama.cpp rotates them: the pairs
            that a rotation turns are neighbours.
        plus: what was added to its numbers.
    """

    path: Path
    kind: str
    block: tuple[int, int]
    shape: tuple[int, ...]
    offset: int
    heads: int | None = None
    plus: float = 0.0

    @property
    def dtype(self) -> str:
        """The type of its numbers; bfloat16 where they are codes."""
        return self.kind if self.kind in FILE_TYPES else "BF16"

    @property
    def stored_as(self) -> str:
        """Its type as configurations call it."""
        return jnp.dtype(FILE_TYPES[self.dtype]).name

    def map(self) -> Float[np.ndarray, "..."]:
        """All of its numbers."""
        rows, columns = _matrix(self.shape)
        return self.read(np.arange(rows), np.arange(columns)).reshape(self.shape)

    def read(
        self, rows: Int[np.ndarray, " part_r"], columns: Int[np.ndarray, " part_c"]
    ) -> Float[np.ndarray, "part_r part_c"]:
        """The numbers of some rows and columns; a vector is a row for each number."""
        count, width = _matrix(self.shape)
        rows = self._order(count)[rows]
        if len(self.shape) == 1:  # its numbers may be stored together
            return self._dequantised(self._raw((1, count))).reshape(count, 1)[rows][:, columns] - self.plus
        raw, step = self._raw((count, width)), max(1, _CHUNK // width)
        whole = len(columns) == width and bool((columns == np.arange(width)).all())
        found = np.empty((len(rows), len(columns)), np.float32)
        for i in range(0, len(rows), step):
            part = self._dequantised(raw[rows[i : i + step]]).reshape(-1, width)
            found[i : i + step] = part if whole else part[:, columns]
        if self.plus:
            found -= self.plus
        return found

    def coded(self, rows: Int[np.ndarray, " part_r"]) -> Coded | None:
        """Some rows as codes; None for types that are not kept in codes."""
        count, width = _matrix(self.shape)
        if len(self.shape) == 1 or self.plus:
            return None
        return gguf_codes(
            self.kind, self._raw((count, width))[self._order(count)[rows]].reshape(len(rows), -1, self.block[1])
        )

    def _order(self, count: int) -> Int[np.ndarray, " count"]:
        """Where the file has each row."""
        order = np.arange(count)
        return order if self.heads is None else order.reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _raw(self, matrix: tuple[int, int]) -> np.ndarray:
        shape = (matrix[0], matrix[1] // self.block[0] * self.block[1])
        return np.memmap(self.path, np.uint8, mode="r", offset=self.offset, shape=shape)

    def _dequantised(self, raw: np.ndarray) -> np.ndarray:
        package: Any = library("gguf", str(self.path), "gguf")
        flat = np.ascontiguousarray(raw).reshape(1, -1)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused when it is copied
            return package.dequantize(flat, package.GGMLQuantizationType[self.kind])


@dataclass(frozen=True)
class Gguf:
    """What a model's GGUF file, or all parts of it, hold; metadata are those of the first part.

    `published` is the configuration as Hugging Face publishes it.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    published: dict[str, Any] = field(default_factory=dict)


def read_gguf(path: AnyPath) -> Gguf:
    """What a GGUF file holds, and its other parts if it is split; no number of a parameter is read.

    Raises CheckpointError (a ValueError), in one sentence that names the file and what is wrong in it.
    """
    if not isinstance(path, Path):
        raise CheckpointError(f"{path} is a GGUF file in a bucket; copy it to this machine.")
    files = [path.with_name(name) for name in gguf_parts(path.name)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{path} is a part of {len(files)}, of which {missing[0]} is missing beside it.")
    parts = [_read_file(file) for file in files]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        with naming(part.path):
            stated = part.metadata.get("split.no", 0), part.metadata.get("split.count", 0) or 1
            if stated != (number, len(files)):
                raise ValueError(
                    f"It says that it is part {shown(stated[0])} of {shown(stated[1])}, not {number} of {len(files)}."
                )
            if twice := next((name for name in part.tensors if name in tensors), None):
                raise ValueError(f"It holds {shown(repr(twice))}, which another part holds too.")
        tensors |= part.tensors
    count = parts[0].metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and count != len(tensors):
        raise CheckpointError(f"{path} and its other parts hold {len(tensors)} tensors and say {shown(count)}.")
    return _of_model(Gguf(path, parts[0].metadata, tensors))


def _of_model(file: Gguf) -> Gguf:
    """The file with its published configuration, and tensors as that has them: every expert's alone."""
    with naming(file.path):
        factors = {name: _numbers(name, file.tensors[name]) for name in gguf.FACTORS if name in file.tensors}
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        published = gguf.published(file.metadata, shapes, factors, str(file.path))
    tensors = {}
    for name, tensor in file.tensors.items():
        if name not in factors:
            heads, plus = gguf.pairs_of(name, published), gguf.added_to(name, published)
            if heads is not None and tensor.shape[0] % (2 * heads):
                raise CheckpointError(f"{name} in {tensor.path} has {tensor.shape[0]} rows; {heads} heads need pairs.")
            tensors |= _apart(name, replace(tensor, heads=heads, plus=plus))
    embed = file.tensors[gguf.EMBED]
    return replace(file, tensors=tensors, published=published | {"dtype": embed.stored_as})


def _numbers(name: str, tensor: GgufTensor) -> list[float]:
    if len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FACTORS:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; allowed: a vector of {_MOST_FACTORS} at most.")
    return tensor.map().tolist()


def _apart(name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
    """Every expert's part of a stack by a name of its own: "blk.0.ffn_up_exps.7.weight"."""
    start, stack, end = name.rpartition("_exps.")
    count, *shape = tensor.shape
    if not stack or not shape or count > _MOST_EXPERTS:
        return {name: tensor}
    size = math.prod(shape) // tensor.block[0] * tensor.block[1]
    return {
        f"{start}_exps.{number}.{end}": replace(tensor, shape=tuple(shape), offset=tensor.offset + number * size)
        for number in range(count)
    }


# --- one file ---


def _read_file(path: Path) -> Gguf:
    try:
        with path.open("rb") as file, naming(path):
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"It is not a GGUF file, which begins with {_MAGIC.decode()!r}.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                return _parsed(path, raw)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def _parsed(path: Path, raw: mmap.mmap) -> Gguf:
    _take(raw, len(_MAGIC))
    version = _number(raw, "I")
    if version not in _VERSIONS:
        allowed = " and ".join(map(str, _VERSIONS))
        raise ValueError(f"It is a GGUF file of version {version}; allowed: {allowed}, with the lowest byte first.")
    tensors, entries = _number(raw, "Q"), _number(raw, "Q")
    if max(tensors, entries) > _MOST_ENTRIES:
        raise ValueError(f"It says that it holds {max(tensors, entries)} entries; at most {_MOST_ENTRIES} are read.")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = _text(raw)
        if key in metadata:
            raise ValueError(f"It has the key {shown(repr(key))} twice.")
        metadata[key] = _value(raw, key)
    described: dict[str, _Described] = {}
    for _ in range(tensors):
        name = _text(raw)
        if name in described:
            raise ValueError(f"It holds {shown(repr(name))} twice.")
        dimensions = _number(raw, "I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"It gives {shown(repr(name))} {dimensions} dimensions; allowed: 1 to {_MOST_DIMENSIONS}.")
        shape = tuple(_number(raw, "Q") for _ in range(dimensions))[::-1]
        described[name] = (shape, _number(raw, "I"), _number(raw, "Q"))
    return Gguf(path, metadata, _placed(path, metadata, described, raw.tell(), len(raw)))


def _placed(
    path: Path, metadata: dict[str, Any], described: dict[str, _Described], header: int, size: int
) -> dict[str, GgufTensor]:
    """Tensors that lie inside a file, behind its header, none over another."""
    kinds = _kinds(path)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(
            f"Its general.alignment is {shown(repr(alignment))}; allowed: powers of two up to {_MOST_ALIGNMENT}."
        )
    start = -(-header // alignment) * alignment
    tensors, spans = {}, []
    for name, (shape, number, offset) in described.items():
        label = shown(repr(name))
        if number not in kinds:
            allowed = ", ".join(kind for kind, _ in kinds.values())
            raise ValueError(f"It holds {label} in the type {number}, which is not read; allowed: {allowed}.")
        kind, block = kinds[number]
        if shape[-1] % block[0] or 0 in shape:
            raise ValueError(f"It holds {label} of the shape {list(shape)} in {kind}, blocks of {block[0]} numbers.")
        end = offset + math.prod(shape) // block[0] * block[1]
        if offset % alignment or end > size - start:
            raise ValueError(f"It is not complete: {label} does not lie inside of it.")
        tensors[name] = GgufTensor(path, kind, block, shape, start + offset)
        spans.append((offset, end, label))
    spans.sort()
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise ValueError(f"It holds {second} where {first} lies.")
    return tensors


def _kinds(path: Path) -> dict[int, tuple[str, tuple[int, int]]]:
    """Types that can be dequantised by their number: name, numbers and bytes of a block."""
    package: Any = library("gguf", str(path), "gguf")
    found = {}
    for kind, block in package.GGML_QUANT_SIZES.items():
        try:
            package.dequantize(np.zeros((1, block[1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found[int(kind)] = (kind.name, block)
    return found


# --- values, one after the other ---


def _take(raw: mmap.mmap, size: int) -> bytes:
    if size > len(raw) - raw.tell():
        raise ValueError("It is not a complete GGUF file: it ends inside its header.")
    return raw.read(size)


def _number(raw: mmap.mmap, kind: str) -> Any:
    return struct.unpack(f"<{kind}", _take(raw, struct.calcsize(f"<{kind}")))[0]


def _text(raw: mmap.mmap) -> str:
    return as_text(_take(raw, _number(raw, "Q")), "A text in its header")


def _value(raw: mmap.mmap, key: str) -> Any:
    kind = _number(raw, "I")
    if kind == _TEXT:
        return _text(raw)
    if kind != _LIST:
        return _number(raw, _format(kind, key))
    kind, count = _number(raw, "I"), _number(raw, "Q")
    if kind != _TEXT:
        numbers = np.dtype(f"<{_format(kind, key)}")
        return np.frombuffer(_take(raw, count * numbers.itemsize), numbers).tolist()
    if 8 * count > len(raw) - raw.tell():  # each has its length before it
        raise ValueError(f"Its {shown(repr(key))} are {count} texts, more than fit into it.")
    return [_text(raw) for _ in range(count)]


def _format(kind: int, key: str) -> str:
    """How struct names a type of numbers."""
    found = _NUMBERS[kind] if kind < len(_NUMBERS) else None
    if found is None:
        raise ValueError(f"Its {shown(repr(key))} is of the type {kind}, which is not read.")
    return found


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor's numbers; a vector has one column."""
    return (shape[0], 1) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])
