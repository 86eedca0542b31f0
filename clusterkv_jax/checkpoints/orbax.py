"""InOrbax models: an Orbax checkpoint (OCDBT) of the parameters, and a manifest with digests of all of it.

    config.json, tokenizer.json ...    as they were
    manifest.json                      what the folder must hold
    weights/                           Orbax's; what it calls `state` maps names to parameters

A parameter is cut into pieces along the axis that a mesh splits. Whoever reads a part of it reads the pieces around
that part and nothing else, and compares their digests.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from msgspec import Meta, Struct

from clusterkv_jax.kernels.weight_codes import QuantisedWeights, dequantised
from clusterkv_jax.runtime.extras import library
from clusterkv_jax.storage.digests import digest, whole
from clusterkv_jax.storage.files import write_whole
from clusterkv_jax.storage.schema import MIB, AnyPath, checked, shown
from clusterkv_jax.storage.weight_files import CheckpointError, naming, read_json

MANIFEST, WEIGHTS, FORMAT = "manifest.json", "weights", "clusterkv_jax weights 1"
# So many devices can share a parameter before two of them read the same piece; fewer where a piece gets small.
# What the codes of a parameter are called after it, and what their type says of them.
CODES, KINDS = ".codes", {"int8": "int8", "uint8": "int4"}
NUMBERS = "final_norm.scale"  # which every model has, and never in codes
_MOST_PIECES, _LEAST_PIECE = 64, MIB // 4
_READ = 4 * MIB


class Tensor(Struct, frozen=True):
    """A parameter of a converted model, and the digests of equal pieces of it along `axis`."""

    dtype: Annotated[str, Meta(pattern="^(float32|bfloat16|float16|int8|uint8)$")]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1)]
    axis: Annotated[int, Meta(ge=0)]
    digests: Annotated[tuple[str, ...], Meta(min_length=1)]


class Fingerprints(Struct, frozen=True):
    """Of the parameters, in each type that they may be loaded as."""

    float32: str
    bfloat16: str
    float16: str


class Manifest(Struct, frozen=True):
    """What a converted folder holds: parameters by name, digests of the files beside them, and that of the tokens by
    which its codes were rounded, if they were.
    """

    fingerprints: Fingerprints
    files: dict[str, str]
    tensors: dict[str, Tensor]
    data: str | None = None


class _Envelope(Struct):
    format: str
    checksum: str
    manifest: dict[str, Any]


def is_converted(folder: AnyPath) -> bool:
    """Whether the folder is one that `clusterkv convert` made, whole or not."""
    return (folder / MANIFEST).is_file() or (folder / WEIGHTS).is_dir()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it with its own checksum."""
    content = msgspec.to_builtins(manifest)
    envelope = {"format": FORMAT, "checksum": _checksum(content), "manifest": content}
    write_whole(folder / MANIFEST, json.dumps(envelope, indent=1) + "\n")


def read_manifest(folder: AnyPath) -> Manifest:
    """The manifest of a converted folder, itself and the files beside it compared with their digests.

    Raises CheckpointError (a ValueError) naming the file at fault.
    """
    file = folder / MANIFEST
    content = read_json(file)
    with naming(file):
        envelope = checked(content, _Envelope, str(file))
        if envelope.format != FORMAT:
            raise ValueError(f"{file} must be of format {FORMAT!r}, got {shown(repr(envelope.format))}.")
        if envelope.checksum != _checksum(envelope.manifest):
            raise ValueError(f"{file} is damaged: it does not have the checksum it was written with.")
        manifest = checked(envelope.manifest, Manifest, str(file))
        for name, x in manifest.tensors.items():
            if x.axis >= len(x.shape) or x.shape[x.axis] % len(x.digests):
                raise ValueError(f"{len(x.digests)} digests do not divide axis {x.axis} of {name} {list(x.shape)}.")
    for name, expected in manifest.files.items():
        _check_file(folder, name, expected)
    return manifest


def file_digest(file: AnyPath) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(_READ):
            found.update(part)
    return found.hexdigest()


def describe(x: np.ndarray, axis: int | None) -> Tensor:
    """What the manifest says of a parameter that a mesh splits along this axis, or along none."""
    pieces, most = 1, min(_MOST_PIECES, x.nbytes // _LEAST_PIECE)
    if axis is None:
        axis, most = 0, 1
    while 2 * pieces <= most and x.shape[axis] % (2 * pieces) == 0:
        pieces *= 2
    return Tensor(x.dtype.name, x.shape, axis, tuple(map(digest, _cut(x, axis, pieces))))


def index_cache() -> Any:
    """Where parameters of a checkpoint find its index, which is then read once. Raises ValueError without Orbax."""
    store = library("tensorstore", "Reading an Orbax checkpoint", "pods")
    return store.Context({"cache_pool#index": {"total_bytes_limit": 64 * MIB}})


@dataclass(frozen=True)
class InOrbax:
    """A parameter in a converted folder; `view()[index]` reads it, as memory maps of safetensors files do."""

    folder: AnyPath
    name: str
    about: Tensor
    index: Any

    @property
    def where(self) -> str:
        """Its name and place in a sentence."""
        return f"{self.name} in {self.folder}"

    @property
    def dtype(self) -> np.dtype:
        """The type it is stored in."""
        return jnp.dtype(self.about.dtype)

    def view(self) -> "Pieces":
        """Its numbers, read when they are asked for. Raises CheckpointError where the checkpoint lacks it."""
        store = library("tensorstore", "Reading an Orbax checkpoint", "pods")
        base = _place(self.folder / WEIGHTS / "state")
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{self.name}/", "cache_pool": "cache_pool#index"},
            "fill_missing_data_reads": False,
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
        }
        try:
            array = store.open(store.Spec(spec), read=True, open=True, context=self.index).result()
        except Exception as error:  # tensorstore raises whatever fits
            raise _unreadable(self.where, error) from None
        found = (array.dtype.name, tuple(array.shape))
        if found != (self.about.dtype, self.about.shape):
            raise CheckpointError(
                f"{self.where} is {found[0]} {list(found[1])}, {MANIFEST} says {self.about.dtype} "
                f"{list(self.about.shape)}."
            )
        return Pieces(self.where, self.about, array)


@dataclass(frozen=True)
class CodesInOrbax:
    """A parameter in codes: each array of them in a converted folder, in the place that it has in `arrays`."""

    arrays: QuantisedWeights

    @property
    def where(self) -> str:
        """The name and place of its codes in a sentence."""
        return self.arrays.codes.where

    def read(self) -> QuantisedWeights:
        """The codes, on the host."""
        return jax.tree.map(lambda x: x.view()[whole(x.about.shape)], self.arrays)

    def view(self) -> np.ndarray:
        """The numbers that they stand for."""
        return np.asarray(dequantised(jax.tree.map(jnp.asarray, self.read())))


@dataclass(frozen=True)
class Pieces:
    """The numbers of one parameter. What was read stays until this is dropped: replicas ask for the same again."""

    where: str
    about: Tensor
    array: Any
    cache: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part, of which every piece has its digest. Raises CheckpointError for one that has not."""
        axis, rows = self.about.axis, self.about.shape[self.about.axis] // len(self.about.digests)
        start, stop, _ = index[axis].indices(self.about.shape[axis])
        first, last = start // rows, -(-stop // rows)
        if (first, last) not in self.cache:
            self.cache[first, last] = self._whole_pieces(first, last, rows)
        inside = slice(start - first * rows, stop - first * rows)
        return self.cache[first, last][(*index[:axis], inside, *index[axis + 1 :])]

    def _whole_pieces(self, first: int, last: int, rows: int) -> np.ndarray:
        axis = self.about.axis
        box = (slice(None),) * axis + (slice(first * rows, last * rows),)
        try:
            found = self.array[box].read().result()
        except Exception as error:
            raise _unreadable(self.where, error) from None
        for piece, expected in zip(_cut(found, axis, last - first), self.about.digests[first:last], strict=True):
            if digest(piece) != expected:
                raise CheckpointError(f"{self.where} is damaged: it does not have the checksum it was written with.")
        return found


def _cut(x: np.ndarray, axis: int, pieces: int) -> Iterator[np.ndarray]:
    rows = x.shape[axis] // pieces
    before = (slice(None),) * axis
    return (x[(*before, slice(i * rows, (i + 1) * rows))] for i in range(pieces))


def _place(folder: AnyPath) -> Any:
    """A folder as tensorstore names it."""
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder.resolve()}/"}
    bucket, _, path = str(folder).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}


def _check_file(folder: AnyPath, name: str, expected: str) -> None:
    if "/" in name or not (folder / name).is_file():
        raise CheckpointError(f"{MANIFEST} names {shown(repr(name))}, which is missing from {folder}.")
    if file_digest(folder / name) != expected:
        raise CheckpointError(f"{folder / name} is not the file that was converted: its checksum is another.")


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _unreadable(where: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{where} cannot be read: {shown(error)}.")
