"""A model's safetensors as an Orbax checkpoint (OCDBT), one part after another: `checkpoints.orbax` reads it.

Parts of half a gigabyte are saved by Orbax in a folder of their own beside the target, `.TARGET.started`, each with the
digests of its parameters. What a killed process has saved is not saved again. When all parts are there, Orbax joins
them in another folder, which takes the target's name when it is whole; the parts' data are linked there, not copied.
A model for a bucket is made on this machine and then copied, the manifest last: without it nothing there is a model.
"""

import ctypes
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from msgspec import Struct, to_builtins

from clusterkv_jax.checkpoints.activation_aware import codes_by_text
from clusterkv_jax.checkpoints.expert_stacks import Stack
from clusterkv_jax.checkpoints.host_copy import host_copy
from clusterkv_jax.checkpoints.in_codes import code_shapes, in_codes, kind_of, weights_as
from clusterkv_jax.checkpoints.loading import (
    DTYPES,
    Checkpoint,
    checked_dtype,
    open_checkpoint,
    parameter_name,
    stored_type,
)
from clusterkv_jax.checkpoints.model_dir import files_beside, nearby
from clusterkv_jax.checkpoints.orbax import (
    CODES,
    KINDS,
    MANIFEST,
    NUMBERS,
    WEIGHTS,
    Fingerprints,
    Manifest,
    Tensor,
    describe,
    file_digest,
    is_converted,
    read_manifest,
    write_manifest,
)
from clusterkv_jax.checkpoints.safetensors import InFile, StackInFiles
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.models.parameters import TensorSpec, abstract
from clusterkv_jax.runtime.extras import library
from clusterkv_jax.runtime.sharding import TENSOR_PARALLEL
from clusterkv_jax.storage.buckets import answering, copied, place, there, working_folder
from clusterkv_jax.storage.digests import all_finite, digest, whole
from clusterkv_jax.storage.files import alone, naming, replacing, write_whole
from clusterkv_jax.storage.hub import CALIBRATION
from clusterkv_jax.storage.schema import MIB, AnyPath, checked, from_json, read_text

# Of a part, unless one parameter is larger; and of what Orbax stores and reads as one.
PART, _CHUNK = 512 * MIB, 8 * MIB
# Objects that are copied at once.
_COPIES = 8
_SPLIT = (*TENSOR_PARALLEL, "kv_heads")
_DONE, _ORIGIN = "digests.json", "origin.json"


@dataclass(frozen=True)
class _Parameter:
    """One that is to be saved."""

    name: str
    source: InFile | StackInFiles
    spec: TensorSpec
    kind: np.dtype
    weights: str | None
    coded: QuantisedWeights | None  # where a text has rounded it

    @property
    def axis(self) -> int | None:
        """The axis that a mesh splits."""
        return next((i for i, name in enumerate(self.spec.axes) if name in _SPLIT), None)

    @property
    def codes(self) -> QuantisedWeights | None:
        """The shapes of its codes, if it is written in codes."""
        name = self.name.rpartition(".")[2]
        return code_shapes(self.spec, name, kind_of(name, self.weights), None)

    @property
    def size(self) -> int:
        """Its bytes."""
        shapes = jax.tree.leaves(self.codes) or [self.spec]
        return sum(math.prod(x.shape) * getattr(x, "dtype", self.kind).itemsize for x in shapes)


class _Origin(Struct):
    """What a conversion must agree with to go on."""

    dtype: str
    fingerprints: Fingerprints
    weights: str | None = None
    data: str | None = None


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: Any = None,
    weights: str | None = None,
    data: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> bool:
    """Write a model as a folder that `load` reads onto any mesh, each process its own part of it.

    Args:
        source: "demo", a local folder, a hub id or a gs:// address, with safetensors; or a GGUF file.
        target: a folder or gs:// address that does not exist. It appears when it is whole; a call that was killed goes
            on.
        dtype: float32, bfloat16 or float16; None keeps the type that the token embeddings are stored in.
        weights: "int8" or "int4" rounds weights to codes, as `load` does; None writes numbers.
        data: texts as tokens, equally many in each, by which int4 is rounded: what a code is off is made good where the
            model reads such texts. None rounds to the nearest code.
        progress: called with the bytes that are saved and those of the model; with `data`, with the layers that are
            rounded and all of them.

    Returns:
        False where `target` is already the whole conversion, and nothing was done.

    Raises:
        CheckpointError: (a ValueError) naming what is wrong with the source.
        ValueError: if `target` is anything else that exists, another conversion was begun there, or Orbax is missing.
        OSError: one sentence, if the system refuses to write it.
    """
    partial_saves = _orbax()
    goal = place(target)
    made = goal if isinstance(goal, Path) else working_folder(goal) / "model"
    if goal == made and not goal.parent.is_dir():
        raise ValueError(f"The folder {goal.parent} does not exist; make it before a model is written there.")
    if weights not in (None, "int8", "int4"):
        raise ValueError(f"weights must be 'int8', 'int4' or None, got {weights!r}.")
    if data is not None and (weights != "int4" or len({len(piece) for piece in data}) != 1):
        sizes = sorted({len(piece) for piece in data})
        raise ValueError(
            f"data is for weights 'int4', in texts of equally many tokens, got weights {weights!r} and texts of "
            f"{sizes}."
        )
    checkpoint = open_checkpoint(source)
    if checkpoint.manifest is not None:
        raise ValueError(f"{checkpoint.folder} is converted already.")
    kind = stored_type(checkpoint.dtype) if dtype is None else checked_dtype(dtype)
    fingerprints = {name: checkpoint.fingerprint(checked_dtype(name), kind) for name in DTYPES}
    read = None if data is None else digest(np.asarray(data, np.int32))
    origin = _Origin(kind.name, Fingerprints(**fingerprints), weights, read)
    work = made.with_name(f".{made.name}.started")
    if there(goal) and not there(goal / _ORIGIN):
        _check_whole(goal, origin)
        shutil.rmtree(work, ignore_errors=True)
        return False
    with naming(made):
        work.mkdir(parents=goal != made, exist_ok=True)
    with alone(work, goal):
        _begin(work, origin)
        if made.exists():  # only its copy is missing
            _check_whole(made, origin)
        else:
            coded = {} if data is None else codes_by_text(checkpoint, data, progress)
            on_bytes = progress if data is None else lambda done, total: None
            tensors = _save_parts(partial_saves, work, _parts(checkpoint, kind, weights, coded), on_bytes)
            _finish(partial_saves, work, made, checkpoint, Manifest(origin.fingerprints, {}, tensors, read))
        if goal != made:
            _copy(made, goal, work / _ORIGIN)
            shutil.rmtree(made)
        shutil.rmtree(work, ignore_errors=True)
    return True


def _orbax() -> Any:
    return library("orbax.checkpoint.experimental.v1", "Writing an Orbax checkpoint", "pods")


def _check_whole(target: AnyPath, origin: _Origin) -> None:
    if not target.is_dir() or not is_converted(target):
        raise ValueError(f"{target} exists; a model is written to a free place.")
    manifest = read_manifest(target)
    of_layers = (name for name in manifest.tensors if name.startswith("layers.") and name.endswith(CODES))
    codes = next((manifest.tensors[name].dtype for name in of_layers), None)
    held = KINDS[codes] if codes else None
    if _Origin(manifest.tensors[NUMBERS].dtype, manifest.fingerprints, held, manifest.data) != origin:
        kind = origin.dtype if origin.weights is None else f"{origin.dtype} with weights in {origin.weights}"
        kind += "" if origin.data is None else " by this text"
        raise ValueError(f"{target} holds another model, or another type than {kind}; choose another name.")


def _begin(work: Path, origin: _Origin) -> None:
    file = work / _ORIGIN
    if not file.is_file():
        write_whole(file, json.dumps(to_builtins(origin)))
    elif checked(from_json(read_text(file, most=MIB), str(file)), _Origin, str(file)) != origin:
        raise ValueError(f"{work} was begun with another model or type; remove it, or choose another name.")


# --- parts ---


def _parts(
    checkpoint: Checkpoint, kind: np.dtype, weights: str | None, coded: Mapping[str, QuantisedWeights]
) -> list[list[_Parameter]]:
    """All parameters in their order, as many together as make up a part."""
    leaves = jax.tree.leaves_with_path(abstract(checkpoint.config))
    sources = jax.tree.leaves(checkpoint.parameters)
    parts: list[list[_Parameter]] = [[]]
    size = 0
    for (path, spec), source in zip(leaves, sources, strict=True):
        name = parameter_name(path)
        parameter = _Parameter(name, source, spec, kind, weights, coded.get(name))
        if parts[-1] and size + parameter.size > PART:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.size
    return parts


def _save_parts(
    orbax: Any, work: Path, parts: list[list[_Parameter]], progress: Callable[[int, int], None]
) -> dict[str, Tensor]:
    sizes = [sum(each.size for each in part) for part in parts]
    folders = [work / f"{number:05d}" for number in range(len(parts))]
    _make_room(work, dict(zip(folders, sizes, strict=True)))
    tensors: dict[str, Tensor] = {}
    for number, (folder, part) in enumerate(zip(folders, parts, strict=True)):
        progress(sum(sizes[:number]), sum(sizes))
        file = folder / _DONE
        if not file.is_file():
            folder.mkdir()
            _save_part(orbax, folder, part)
            _give_back()
        tensors |= checked(from_json(read_text(file, most=16 * MIB), str(file)), dict[str, Tensor], str(file))
    progress(sum(sizes), sum(sizes))
    return tensors


def _make_room(work: Path, sizes: dict[Path, int]) -> None:
    """Remove what killed processes left of parts. Raises OSError where the disk has no room for what is to be saved."""
    missing = [folder for folder in sizes if not (folder / _DONE).is_file()]
    for folder in missing:
        shutil.rmtree(folder, ignore_errors=True)
    need, free = sum(sizes[folder] for folder in missing), shutil.disk_usage(work).free
    if need > free:
        raise OSError(f"{work} needs room for {need / 1e9:.3g} GB, and the disk has {free / 1e9:.3g} GB left.")


def _save_part(orbax: Any, folder: Path, part: list[_Parameter]) -> None:
    found = {name: pair for each in part for name, pair in _arrays(each).items()}
    arrays = {name: array for name, (array, _) in found.items()}
    digests = {name: to_builtins(describe(array, axis)) for name, (array, axis) in found.items()}
    with naming(folder), _settings(orbax):
        orbax.partial.save((folder / WEIGHTS).absolute(), arrays)  # it takes no other path
    write_whole(folder / _DONE, json.dumps(digests))


def _give_back() -> None:
    """Memory that Orbax's threads have freed goes back to the system; glibc would keep a gigabyte of it for them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _arrays(parameter: _Parameter) -> dict[str, tuple[np.ndarray, int | None]]:
    """What is saved of a parameter by name, and the axis of each that a mesh splits."""
    if parameter.codes is None or parameter.weights is None:
        return {parameter.name: (_array(parameter, parameter.kind), parameter.axis)}
    held, name = weights_as(parameter.weights, "cpu"), parameter.name.rpartition(".")[2]
    coded = parameter.coded or in_codes(parameter.source, parameter.spec, name, held)
    assert coded is not None
    axis = coded.codes.ndim - (2 if parameter.axis in coded.axes else 1)
    parts = {"codes": coded.codes, "scales": coded.scales, "offsets": coded.offsets}
    return {f"{parameter.name}.{part}": (x, axis) for part, x in parts.items() if x is not None}


def _array(parameter: _Parameter, kind: np.dtype) -> np.ndarray:
    """The numbers in order, on the file's own pages where they lie there as they will be saved."""
    view = parameter.source.view()[whole(parameter.spec.shape)]
    if isinstance(view, Stack) or view.dtype != kind or not view.flags.c_contiguous or not all_finite(view):
        return host_copy(view, kind, "cpu", parameter.source.where)
    return np.asarray(view)


@contextmanager
def _settings(orbax: Any) -> Iterator[None]:
    """Chunks that a process can read without much of its neighbours'; nothing is copied or compressed for them."""
    context = orbax.Context()
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK
    context.array.saving.scoped_storage_options_creator = lambda _, array: (
        orbax.options.ArrayOptions.Saving.StorageOptions(shard_axes=(0,)) if array.ndim == 3 else None  # by heads
    )
    with context:
        yield


# --- the whole ---


def _finish(orbax: Any, work: Path, target: Path, checkpoint: Checkpoint, manifest: Manifest) -> None:
    with replacing(target) as new:
        new.mkdir()
        for part in sorted(work.glob("[0-9]*")):
            for session in part.glob(f"{WEIGHTS}.*"):
                shutil.copytree(session, new / session.name, copy_function=_link, dirs_exist_ok=True)
        with _settings(orbax):
            orbax.partial.finalize((new / WEIGHTS).absolute())
        files = files_beside(checkpoint.folder) if checkpoint.gguf is None else _described(checkpoint, new)
        extra = [CALIBRATION] if (checkpoint.folder / CALIBRATION).is_file() else []
        given = (files if checkpoint.gguf is None else []) + extra
        with nearby(checkpoint.folder, given) as folder:
            for name in given:
                shutil.copyfile(folder / name, new / name)
        digests = {name: file_digest(new / name) for name in files}
        write_manifest(new, Manifest(manifest.fingerprints, digests, manifest.tensors, manifest.data))


def _described(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Configuration and tokenizer of a GGUF file as files of their own, whose names are returned."""
    assert checkpoint.gguf is not None
    write_whole(folder / "config.json", json.dumps(checkpoint.gguf.published, indent=2) + "\n")
    tokenizer = checkpoint.tokenizer()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return files_beside(folder)


def _copy(folder: Path, goal: AnyPath, origin: Path) -> None:
    """A whole model into a bucket. What a killed process has copied of its data is not copied again."""
    if there(goal / _ORIGIN) and (goal / _ORIGIN).read_bytes() != origin.read_bytes():
        raise ValueError(f"{goal} was begun with another model or type; remove it, or choose another address.")
    copied(origin, goal / _ORIGIN)
    files = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]

    def copy(name: Path) -> None:
        known = name.parent.name == "d" and there(goal / name)  # these names are of one saving alone
        if not known:
            copied(folder / name, goal / name)

    with ThreadPoolExecutor(_COPIES) as threads:
        list(threads.map(copy, [name for name in files if str(name) != MANIFEST]))
    copied(folder / MANIFEST, goal / MANIFEST)
    with answering(goal / _ORIGIN):
        (goal / _ORIGIN).unlink()


def _link(source: str, target: str) -> None:
    """Data stay where they are on the disk. What Orbax writes again when it joins parts is copied."""
    if Path(source).parent.name == "d":
        try:
            os.link(source, target)
            return
        except OSError:  # a file system without links
            pass
    shutil.copyfile(source, target)
