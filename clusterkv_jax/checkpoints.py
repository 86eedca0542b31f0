"""Hugging Face checkpoints in and out, without torch: safetensors, one file or sharded, straight onto the devices.

Tensors are mapped from disk one at a time: beside the parameters, one more tensor is in memory at most, and with a mesh
a device receives its own slice only.
"""

import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from clusterkv_jax.files import replacing, write_whole
from clusterkv_jax.models import llama, registry
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import token_ids
from clusterkv_jax.models.hf_weights import Stored, file_shapes, layout
from clusterkv_jax.models.transformer import Params, abstract
from clusterkv_jax.sharding import auto_mesh, param_shardings

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FILE_TYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
_DTYPES = ("float32", "bfloat16", "float16")
# Buffers that old files carry; the angles follow from the configuration.
_IGNORED = re.compile(r"(^|\.)rotary(_pos)?_emb\.inv_freq$")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one sentence that names the file or tensor at fault."""


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model: parameters, their configuration, the tokenizer (None if the folder has none), where it lies."""

    params: Params
    config: ModelConfig
    tokenizer: Any
    mesh: Mesh | None
    name: str


@dataclass(frozen=True)
class _Entry:
    """One tensor inside a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def map(self) -> np.ndarray:
        """The tensor as a read-only memory map, released with the array."""
        if self.dtype not in _FILE_TYPES:
            raise CheckpointError(f"{self.path.name} holds {self.dtype} weights; allowed: {', '.join(_FILE_TYPES)}.")
        return np.memmap(self.path, _FILE_TYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape)


def load(name: str | os.PathLike[str], *, mesh: Mesh | None = None, dtype: Any = None) -> Model:
    """Load "demo" (the packaged model), a local folder or a hub id in Hugging Face format.

    `dtype` (float32, bfloat16 or float16, by name or as a type) is what all parameters become. None keeps the type that
    the token embeddings are stored in, except on the CPU, which has no 16-bit arithmetic: float32 there. With a `mesh`,
    parameters are laid out over it by their logical axes (see `sharding`); its axes become automatic ones.

    Raises CheckpointError (a ValueError) naming what is missing, corrupt, misshapen or unsupported.
    """
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(f"name must be 'demo', a folder or a hub id 'owner/name', got {name!r}.")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}.")
    mesh = None if mesh is None else auto_mesh(mesh)
    folder = _locate(name)
    published = _read_json(folder / "config.json")
    config = load_config(folder)
    rename = registry.FAMILIES[config.family].rename
    entries = {rename(tensor): entry for tensor, entry in _entries(folder).items() if not _IGNORED.search(tensor)}
    config, entries = _resolve_ties(config, "tie_word_embeddings" in published, entries)
    stored = layout(config, registry.FAMILIES[config.family].weights)
    _account(folder, {tensor: entry.shape for tensor, entry in entries.items()}, file_shapes(stored))
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    target = _dtype(dtype, entries[stored["embed"].name].dtype, platform)
    copy = partial(_host_copy, dtype=target, platform=platform)
    specs = abstract(config)
    shardings = jax.tree.map(lambda _: None, specs) if mesh is None else param_shardings(specs, mesh)
    params = jax.tree.map(lambda place, sharding: _put(place, entries, copy, sharding), stored, shardings)
    return Model(params, config, _tokenizer(folder), mesh, str(name))


def load_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The configuration in a folder's `config.json`; `generation_config.json`, if there, names the end-of-text ids."""
    folder = Path(folder)
    try:
        config = registry.from_hf(_read_json(folder / "config.json"))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if (generation := folder / "generation_config.json").is_file():
        ends = token_ids(_read_json(generation).get("eos_token_id"))
        config = replace(config, eos_ids=ends or config.eos_ids)
    return config


def save_huggingface(
    folder: str | os.PathLike[str],
    params: Params,
    config: ModelConfig,
    *,
    tokenizer_json: str | os.PathLike[str] | None = None,
    dtype: Any = "bfloat16",
) -> None:
    """Write a Llama model as a Hugging Face folder: `model.safetensors`, `tokenizer.json` if given, `config.json`.

    `dtype` is the type on disk. Each file is written under a temporary name and then renamed, the configuration last,
    so an interrupted call leaves no half-written file and no loadable half of a new model.
    """
    target = _checked_dtype(dtype)
    if config.family != "llama":
        raise ValueError(f"Only models of the llama family can be written, got {config.family!r}.")
    stored = layout(config, llama.WEIGHTS)
    tensors: dict[str, np.ndarray] = {}
    for place, parameter in zip(jax.tree.leaves(stored), jax.tree.leaves(params), strict=True):
        tensors[place.name] = np.ascontiguousarray(place.rows_of(np.asarray(parameter)).astype(target))
    described = json.dumps(llama.to_hf(replace(config, dtype=target.name)), indent=2) + "\n"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # transformers refuses files that do not say which framework's layout they follow.
    with replacing(folder / _SINGLE) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    if tokenizer_json is not None:
        write_whole(folder / "tokenizer.json", Path(tokenizer_json).read_text(encoding="utf-8"))
    write_whole(folder / "config.json", described)


# --- where the files are ---


def _locate(name: str | os.PathLike[str]) -> Path:
    if name == "demo":
        folder = Path(str(resources.files("clusterkv_jax.models") / "demo"))
        if not (folder / "config.json").is_file():
            raise CheckpointError("The demo model is missing from this installation.")
        return folder
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{str(name)!r} is a file; give the folder that holds config.json.")
    if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise CheckpointError(
            f"There is no folder {str(name)!r}; allowed: 'demo', a local folder, or a hub id 'owner/name'."
        )
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                # Some repositories hold the same weights again in their authors' own layout.
                ignore_patterns=["consolidated*", "original/*"],
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"There is no local folder {name!r}, and the hub did not deliver a model of that id: {reason}."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing from {path.parent}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not a readable JSON file: {error}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


def _entries(folder: Path) -> dict[str, _Entry]:
    """Every tensor of a checkpoint by name; nothing is read but the files' headers."""
    if (folder / _SINGLE).is_file():
        return _header(folder / _SINGLE)
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder} holds neither {_SINGLE} nor {_INDEX}; other weight formats are not read.")
    places = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / _INDEX} has no 'weight_map' from tensors to files.")
    for tensor, file in places.items():
        if not isinstance(file, str) or not (folder / file).is_file():
            raise CheckpointError(f"{_INDEX} places {tensor!r} in {file!r}, which is missing from {folder}.")
    entries: dict[str, _Entry] = {}
    for file in sorted(set(places.values())):
        entries |= _header(folder / file)
    for tensor, file in places.items():
        if tensor not in entries:
            raise CheckpointError(f"{_INDEX} places {tensor!r} in {file!r}, which does not hold it.")
    return entries


def _header(path: Path) -> dict[str, _Entry]:
    try:
        # The library's own checks: header, offsets, and a file as long as they say.
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}.") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        tensor: _Entry(path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for tensor, entry in header.items()
        if tensor != "__metadata__"
    }


# --- which tensors there are ---


def _resolve_ties(
    config: ModelConfig, tie_is_stated: bool, entries: dict[str, _Entry]
) -> tuple[ModelConfig, dict[str, _Entry]]:
    """Decide between one and two vocabulary tables as transformers does, whichever of them the files hold."""
    table = registry.FAMILIES[config.family].weights
    embed, head = entries.get(table["embed"]), entries.get(table["lm_head"])
    if head is None:
        return replace(config, tie_embeddings=config.tie_embeddings or not tie_is_stated), entries
    if not config.tie_embeddings:
        return config, entries
    if embed is not None and not _equal(embed, head):
        return replace(config, tie_embeddings=False), entries
    others = {tensor: entry for tensor, entry in entries.items() if tensor != table["lm_head"]}
    return config, others | {table["embed"]: embed or head}


def _equal(a: _Entry, b: _Entry) -> bool:
    if a.shape != b.shape:
        return False
    left, right, step = a.map(), b.map(), 4096
    return all(np.array_equal(left[i : i + step], right[i : i + step]) for i in range(0, len(left), step))


def _account(folder: Path, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless exactly the expected tensors are there in their expected shapes."""
    if missing := [f"{name} {list(expected[name])}" for name in expected if name not in stored]:
        raise CheckpointError(f"{folder} lacks {_some(missing)}, which its config.json implies.")
    if extra := [f"{name} {list(stored[name])}" for name in stored if name not in expected]:
        raise CheckpointError(f"{folder} holds {_some(extra)}, which its config.json has no place for.")
    for name, shape in expected.items():
        if stored[name] != shape:
            raise CheckpointError(
                f"{name} in {folder} has the shape {list(stored[name])}, its config.json implies {list(shape)}."
            )


def _some(names: list[str]) -> str:
    examples = ", ".join(names[:3])
    return examples if len(names) <= 3 else f"{examples} and {len(names) - 3} more tensors"


# --- onto the devices ---


def _checked_dtype(dtype: Any) -> np.dtype:
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        result = None
    if result is None or result.name not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; allowed: {', '.join(_DTYPES)}.")
    return result


def _dtype(requested: Any, stored: str, platform: str) -> np.dtype:
    if requested is not None:
        return _checked_dtype(requested)
    return jnp.dtype(jnp.float32 if platform == "cpu" else _FILE_TYPES.get(stored, jnp.float32))


def _put(
    place: Stored, entries: dict[str, _Entry], copy: Callable[[np.ndarray], np.ndarray], sharding: Any
) -> jax.Array:
    view = place.view(entries[place.name].map())
    if sharding is None:
        array = jax.device_put(copy(view))
    else:
        array = jax.make_array_from_callback(place.shape, sharding, lambda index: copy(view[index]))
    # Transfers run behind the program's back and hold their host copies: without waiting, many would pile up.
    return array.block_until_ready()


def _host_copy(view: np.ndarray, dtype: np.dtype, platform: str) -> np.ndarray:
    """What is handed to the device: the file's order is kept where the transfer transposes (faster than numpy would).

    The CPU backend adopts a buffer that is aligned and in order, so the parameter itself is the only copy there.
    """
    if platform != "cpu":
        return np.array(view, dtype)
    size, alignment = view.size * dtype.itemsize, 64
    buffer = np.empty(size + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    copy = buffer[start : start + size].view(dtype).reshape(view.shape)
    copy[...] = view
    return copy


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    advice = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    # transformers announces on import that it found no torch: here that is as it should be.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        warnings.warn(f"the tokenizer in {folder} could not be loaded, so tokenizer is None: {error}", stacklevel=3)
        return None
    finally:
        if advice is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = advice
