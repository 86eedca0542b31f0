"""The files of a checkpoint: JSON read through the one door, safetensors by their headers, shards by their index.

Nothing is believed: what an index names must lie in its folder, and hold what it says and nothing else.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open

from clusterkv_jax.storage.schema import MIB, AnyPath, as_text, checked, from_json, read_text, shown, size

ADAPTER = "adapter_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
GGUF = ".gguf"
# "name-00002-of-00003.gguf"
_GGUF_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
FILE_TYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
# Bytes of what quantised weights are stored in.
_CODE_SIZES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
# Buffers that old files carry; the angles follow from the configuration.
IGNORED = re.compile(r"(^|\.)rotary(_pos)?_emb\.inv_freq$")
# How a file begins that Git LFS has not fetched.
_POINTER = b"version https://git-lfs"
# A configuration has kilobytes; the index and the header of a model of 400 billion parameters a few hundred.
_MOST_JSON = 16 * MIB


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one sentence that names the file or tensor at fault."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor inside a safetensors file."""

    path: AnyPath
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def map(self) -> np.ndarray:
        """The tensor as a read-only memory map, released with the array; one in a bucket is read whole."""
        if self.dtype not in FILE_TYPES:
            raise CheckpointError(f"{self.path} holds {self.dtype} weights; allowed: {', '.join(FILE_TYPES)}.")
        return self._mapped(jnp.dtype(FILE_TYPES[self.dtype]), self.shape)

    def codes(self) -> np.ndarray:
        """The bytes of a tensor of whole numbers or 8-bit floats, those of a row along the last dimension."""
        *front, last = self.shape or (1,)
        return self._mapped(jnp.dtype(jnp.uint8), (*front, last * _CODE_SIZES[self.dtype]))

    def _mapped(self, kind: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        if not isinstance(self.path, Path):
            return self._fetched(kind, shape)
        return np.memmap(self.path, kind, mode="r", offset=self.offset, shape=shape)

    def _fetched(self, kind: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape) * kind.itemsize
        with self.path.open("rb") as file:
            file.seek(self.offset)
            raw = file.read(size)
        if len(raw) != size:
            raise CheckpointError(f"{self.path} is not a complete safetensors file: it ends too early.")
        return np.frombuffer(raw, kind).reshape(shape)


def read_config(folder: AnyPath) -> dict[str, Any]:
    """The folder's config.json, unchecked; in one of a family that is not read any number may be infinite.

    Raises CheckpointError that names what is missing, or what the folder holds instead of a model.
    """
    if (folder / ADAPTER).is_file():
        raise CheckpointError(
            f"{folder} holds {ADAPTER}, and adapters are not read; merge it into its base model, and load that."
        )
    if not (folder / "config.json").is_file() and (files := sorted(path.name for path in folder.glob("*.gguf"))):
        raise CheckpointError(
            f"{folder} holds {files[0]} and no config.json; give the GGUF file itself, {folder / files[0]}."
        )
    return read_json(folder / "config.json", finite=False)


def read_json(path: AnyPath, *, finite: bool = True) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError that names the file where it is missing, too large, or anything else."""
    try:
        with naming(path):
            value = from_json(read_text(path, most=_MOST_JSON), str(path), finite=finite)
            return checked(value, dict[str, Any], str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing from {path.parent}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


@contextmanager
def naming(file: AnyPath) -> Iterator[None]:
    """What is wrong in the block as a CheckpointError that names the file."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(file)) else f"{file}: {text}") from None


class _Index(Struct):
    weight_map: Annotated[dict[str, str], Meta(min_length=1)]


class _Tensor(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def entries_of(folder: AnyPath) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint by name; nothing is read but the files' headers."""
    if (folder / SINGLE).is_file():
        return _header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; other weight formats are not read.")
    index, places = folder / INDEX, _places(folder)
    shards = {file: _header(_shard(folder, file)) for file in sorted(set(places.values()))}
    for tensor, file in places.items():
        if tensor not in shards[file]:
            raise CheckpointError(f"{index} places {tensor!r} in {file!r}, which does not hold it.")
    for file, entries in shards.items():
        for tensor in entries:
            if places.get(tensor) != file and not IGNORED.search(tensor):
                raise CheckpointError(f"{folder / file} holds {tensor!r}, which {INDEX} does not place there.")
    return {tensor: shards[file][tensor] for tensor, file in places.items()}


def weight_names(folder: AnyPath) -> list[str]:
    """The files in which a checkpoint's tensors lie, whether they are there or not."""
    return sorted(set(_places(folder).values())) if (folder / INDEX).is_file() else [SINGLE]


def is_gguf(path: AnyPath) -> bool:
    """Whether something is a GGUF file by its name."""
    return path.suffix == GGUF


def gguf_parts(name: str) -> list[str]:
    """The names of all parts of a model, by that of one of them."""
    found = _GGUF_PART.fullmatch(name)
    if found is None or not 1 <= int(found[3]) <= 10**4:
        return [name]
    return [f"{found[1]}{number:05}-of-{found[3]}{GGUF}" for number in range(1, int(found[3]) + 1)]


def _places(folder: AnyPath) -> dict[str, str]:
    """The index: the file of every tensor."""
    index = folder / INDEX
    content = read_json(index)
    with naming(index):
        return checked(content, _Index, str(index)).weight_map


def _shard(folder: AnyPath, file: str) -> AnyPath:
    """The path of a shard, which is in the folder itself, or where the hub's cache keeps what its snapshots link to."""
    path = folder / file
    if not isinstance(folder, Path):
        if "/" in file or not path.is_file():
            raise CheckpointError(f"{INDEX} places tensors in {shown(repr(file))}, which is missing from {folder}.")
        return path
    inside = folder.resolve()
    if file not in os.listdir(folder) or not path.is_file():
        raise CheckpointError(f"{INDEX} places tensors in {shown(repr(file))}, which is missing from {folder}.")
    blobs = inside.parents[1] / "blobs" if inside.parent.name == "snapshots" else inside
    if path.resolve().parent not in (inside, blobs):
        raise CheckpointError(f"{INDEX} places tensors in {file!r}, which is a link to a file outside of {folder}.")
    return path


def _header(path: AnyPath) -> dict[str, TensorEntry]:
    return header(path)[0]


def header(path: AnyPath) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata; nothing is read but its header."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
            if start == _POINTER:
                raise CheckpointError(f"{path} is a Git LFS pointer in the place of weights; run 'git lfs pull' there.")
            file.seek(8)
            length = int.from_bytes(start[:8], "little")
            if length > _MOST_JSON:
                raise CheckpointError(f"{path} has a header of more than {size(_MOST_JSON)}, the most that is read.")
            text = file.read(length)
        if not isinstance(path, Path) and len(text) < max(1, length):
            raise CheckpointError(f"{path} is not a complete safetensors file: its header ends too early.")
        # The library's own checks: header, offsets, and a file as long as they say.
        if isinstance(path, Path):
            with safe_open(path, framework="np"):
                pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {shown(error)}.") from None
    with naming(path):
        content = checked(from_json(as_text(text, str(path)), str(path)), dict[str, Any], str(path))
        metadata = checked(content.pop("__metadata__", {}), dict[str, str], str(path))
        tensors = checked(content, dict[str, _Tensor], str(path))
    entries = {
        name: TensorEntry(path, entry.dtype, entry.shape, 8 + length + entry.data_offsets[0])
        for name, entry in tensors.items()
    }
    return entries, metadata


def account(
    folder: AnyPath,
    stored: dict[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
    source: str = "config.json",
) -> None:
    """Raise CheckpointError unless exactly the expected tensors are there in their expected shapes."""
    if missing := [f"{name} {list(expected[name])}" for name in expected if name not in stored]:
        raise CheckpointError(f"{folder} lacks {_some(missing)}, which its {source} implies.")
    if extra := [f"{name} {list(stored[name])}" for name in stored if name not in expected]:
        raise CheckpointError(f"{folder} holds {_some(extra)}, which its {source} has no place for.")
    for name, shape in expected.items():
        if stored[name] != shape:
            raise CheckpointError(
                f"{name} in {folder} has the shape {list(stored[name])}, its {source} implies {list(shape)}."
            )


def _some(names: list[str]) -> str:
    examples = ", ".join(names[:3])
    return examples if len(names) <= 3 else f"{examples} and {len(names) - 3} more tensors"
