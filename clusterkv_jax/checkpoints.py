"""Hugging Face checkpoints in and out, without torch: safetensors, one file or sharded, straight onto the devices.

Tensors are mapped from disk one at a time: beside the parameters, one more tensor is in memory at most, and with a mesh
a device receives its own slice only. Everything is compared with the configuration by name and shape before the first
number is read, and every number is looked at on its way.
"""

import json
import math
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
from safetensors.numpy import save_file

from clusterkv_jax.arrays import CHUNK, all_finite, few, fingerprint
from clusterkv_jax.calibration import Calibration
from clusterkv_jax.calibration import read as read_calibration
from clusterkv_jax.files import replacing, write_whole
from clusterkv_jax.models import registry
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import Generation, end_ids
from clusterkv_jax.models.hf_weights import Stored, file_shapes, layout
from clusterkv_jax.models.transformer import Params, abstract
from clusterkv_jax.schema import checked, shown
from clusterkv_jax.sharding import auto_mesh, check_divides, fitted_mesh, param_shardings, replicated
from clusterkv_jax.weight_files import FILE_TYPES, IGNORED, SINGLE, Entry, entries_of, naming, read_json
from clusterkv_jax.weight_files import CheckpointError as CheckpointError

CALIBRATION = "calibration.safetensors"
_DTYPES = ("float32", "bfloat16", "float16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model: parameters, their configuration, the tokenizer (None if the folder has none), where it lies,
    and what `clusterkv calibrate` measured of it, whose surrogate is among the parameters.

    `config.weights` is the fingerprint of the parameters: the same for the same files and type, on any mesh and device.
    """

    params: Params
    config: ModelConfig
    tokenizer: Any
    mesh: Mesh | None
    name: str
    calibration: Calibration | None = None


def load(
    name: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    calibration: str | os.PathLike[str] | None = None,
) -> Model:
    """Load "demo" (the packaged model), a local folder or a hub id in Hugging Face format.

    `dtype` (float32, bfloat16 or float16, by name or as a type) is what all parameters become. None keeps the type that
    the token embeddings are stored in, except on the CPU, which has no 16-bit arithmetic: float32 there. With a `mesh`,
    parameters are laid out over it by their logical axes (see `sharding`); its axes become automatic ones.
    `calibration` is a file that `clusterkv calibrate` wrote for the model, by default `calibration.safetensors` of its
    folder, if there is one.

    Raises CheckpointError (a ValueError) naming what is missing, corrupt, misshapen or unsupported.
    """
    if not isinstance(mesh, Mesh | None):
        raise ValueError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}.")
    folder = _locate(name)
    published = read_json(folder / "config.json")
    config = load_config(folder)
    mesh = None if mesh is None else fitted_mesh(auto_mesh(mesh), config.num_kv_heads)
    rename = registry.FAMILIES[config.family].rename
    entries = {rename(tensor): entry for tensor, entry in entries_of(folder).items() if not IGNORED.search(tensor)}
    config, entries = _resolve_ties(config, "tie_word_embeddings" in published, entries)
    stored = layout(config, registry.FAMILIES[config.family].weights)
    _account(folder, {tensor: entry.shape for tensor, entry in entries.items()}, file_shapes(stored))
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    target = _dtype(dtype, entries[stored["embed"].name].dtype, platform)
    specs = abstract(config)
    if mesh is not None:
        check_divides(specs, mesh)
    shardings = jax.tree.map(lambda _: None, specs) if mesh is None else param_shardings(specs, mesh)

    def put(place: Stored, sharding: Any) -> jax.Array:
        where = f"{place.name} in {entries[place.name].path}"
        return _put(place, entries, partial(_host_copy, dtype=target, platform=platform, where=where), sharding)

    params = jax.tree.map(put, stored, shardings)
    views = (place.view(entries[place.name].map()) for place in jax.tree.leaves(stored))
    config = replace(config, weights=fingerprint(few(view).astype(target) for view in views))
    model = Model(params, config, _tokenizer(folder), mesh, str(name))
    measured = folder / CALIBRATION if calibration is None else Path(calibration)
    return model if calibration is None and not measured.is_file() else calibrated(model, read_calibration(measured))


def calibrated(model: Model, calibration: Calibration) -> Model:
    """The model with a calibration, and its surrogate in float32 among the parameters.

    Raises ValueError if the calibration is of another model.
    """
    calibration.check(model.config)
    layers = model.params["layers"]
    if calibration.surrogate is not None:
        place = partial(jax.device_put, device=None if model.mesh is None else replicated(model.mesh))
        layers = tuple(
            {**layer, "surrogate": jax.tree.map(place, dict(arrays))}
            for layer, arrays in zip(layers, calibration.surrogate, strict=True)
        )
    return replace(model, params={**model.params, "layers": layers}, calibration=calibration)


def load_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The configuration in a folder's `config.json`; `generation_config.json`, if there, names the end-of-text ids.

    Raises CheckpointError (a ValueError) naming the file and the field that are at fault.
    """
    folder = Path(folder)
    file = folder / "config.json"
    published = read_json(file)
    with naming(file):
        config = registry.from_hf(published, str(file))
    if (file := folder / "generation_config.json").is_file():
        generation = read_json(file)
        with naming(file):
            ids = end_ids(checked(generation, Generation, str(file)).eos_token_id, config.vocab_size)
        config = replace(config, eos_ids=ids or config.eos_ids)
    return config


def save_huggingface(
    folder: str | os.PathLike[str],
    params: Params,
    config: ModelConfig,
    *,
    tokenizer_json: str | os.PathLike[str] | None = None,
    dtype: Any = "bfloat16",
) -> None:
    """Write a Hugging Face folder: `model.safetensors`, `tokenizer.json` if given, `config.json`.

    `dtype` is the type on disk. Each file is written under a temporary name and then renamed, the configuration last,
    so an interrupted call leaves no half-written file and no loadable half of a new model.

    Raises ValueError for a model of another family than llama or qwen3.
    """
    target = _checked_dtype(dtype)
    writers = {name: family.to_hf for name, family in registry.FAMILIES.items() if family.to_hf is not None}
    if config.family not in writers:
        raise ValueError(f"Only models of the families {', '.join(writers)} can be written, got {config.family!r}.")
    stored = layout(config, registry.FAMILIES[config.family].weights)
    tensors: dict[str, np.ndarray] = {}
    plain = tuple({name: x for name, x in layer.items() if name != "surrogate"} for layer in params["layers"])
    for place, parameter in zip(jax.tree.leaves(stored), jax.tree.leaves({**params, "layers": plain}), strict=True):
        tensors[place.name] = np.ascontiguousarray(place.rows_of(np.asarray(parameter)).astype(target))
    described = json.dumps(writers[config.family](replace(config, dtype=target.name)), indent=2) + "\n"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # transformers refuses files that do not say which framework's layout they follow.
    with replacing(folder / SINGLE) as temporary:
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
    if not isinstance(name, str | os.PathLike) or not isinstance(path := os.fspath(name), str):
        raise CheckpointError(f"name must be 'demo', a folder or a hub id 'owner/name', got {name!r}.")
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise CheckpointError(f"{str(name)!r} is a file; give the folder that holds config.json.")
    if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise CheckpointError(
            f"There is no folder {shown(repr(str(name)))}; allowed: 'demo', a local folder, or a hub id 'owner/name'."
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


# --- which tensors there are ---


def _resolve_ties(
    config: ModelConfig, tie_is_stated: bool, entries: dict[str, Entry]
) -> tuple[ModelConfig, dict[str, Entry]]:
    """Decide between one and two vocabulary tables as transformers does, whichever of them the files hold."""
    table = registry.FAMILIES[config.family].weights
    embed, head = entries.get(table["embed"]), entries.get(table["lm_head"])
    if head is None:
        return replace(config, tie_embeddings=config.tie_embeddings or not tie_is_stated), entries
    if not config.tie_embeddings:
        return config, entries
    if embed is not None and not _equal(embed, head, (config.vocab_size, config.hidden_size)):
        return replace(config, tie_embeddings=False), entries
    others = {tensor: entry for tensor, entry in entries.items() if tensor != table["lm_head"]}
    return config, others | {table["embed"]: embed or head}


def _equal(a: Entry, b: Entry, shape: tuple[int, int]) -> bool:
    """Whether both are the table of this shape; of another shape they are refused later, by name."""
    if not a.shape == b.shape == shape:
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
    except (TypeError, ValueError, SyntaxError):  # numpy reads texts as expressions
        result = None
    if result is None or result.name not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; allowed: {', '.join(_DTYPES)}.")
    return result


def _dtype(requested: Any, stored: str, platform: str) -> np.dtype:
    if requested is not None:
        return _checked_dtype(requested)
    return jnp.dtype(jnp.float32 if platform == "cpu" else FILE_TYPES.get(stored, jnp.float32))


def _put(
    place: Stored, entries: dict[str, Entry], copy: Callable[[np.ndarray], np.ndarray], sharding: Any
) -> jax.Array:
    view = place.view(entries[place.name].map())
    if sharding is None:
        array = jax.device_put(copy(view))
    else:
        array = jax.make_array_from_callback(place.shape, sharding, lambda index: copy(view[index]))
    # Transfers run behind the program's back and hold their host copies: without waiting, many would pile up.
    return array.block_until_ready()


def _host_copy(view: np.ndarray, dtype: np.dtype, platform: str, where: str) -> np.ndarray:
    """What is handed to the device: the file's order is kept where the transfer transposes (faster than numpy would).

    The CPU backend adopts a buffer that is aligned and in order, so the parameter itself is the only copy there.
    Raises CheckpointError that names `where` for a number that is not finite, as stored or as `dtype`.
    """
    copy = np.empty_like(view, dtype, subok=False) if platform != "cpu" else _aligned(view.shape, dtype)
    order = np.argsort(copy.strides, kind="stable")[::-1]
    source, target = view.transpose(order), copy.transpose(order)
    rows = max(1, CHUNK // max(1, target[0].size))
    # Numbers are looked at while they are in the core's cache: memory is read once.
    for i in range(0, len(target), rows):
        with np.errstate(over="ignore", invalid="ignore"):
            target[i : i + rows] = source[i : i + rows]
        if not all_finite(target[i : i + rows]):
            wrong = source[i : i + rows][~np.isfinite(target[i : i + rows])].flat[0]
            raise CheckpointError(f"{where} holds {wrong}; allowed: numbers that are finite as {dtype.name}.")
    return copy


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    buffer = np.empty(size + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + size].view(dtype).reshape(shape)


def _tokenizer(folder: Path) -> Any:
    files = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        return None
    if "tokenizer_config.json" in files:
        read_json(folder / "tokenizer_config.json")
    advice = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    # transformers announces on import that it found no torch: here that is as it should be.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its parsers raise whatever they meet
        if "tokenizer.json" in files:
            raise CheckpointError(f"{folder / 'tokenizer.json'} makes no tokenizer: {shown(error)}.") from error
        # Other files need libraries that may be missing, and a model serves token ids without them.
        warnings.warn(f"The tokenizer in {folder} could not be loaded, so tokenizer is None: {error}", stacklevel=3)
        return None
    finally:
        if advice is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = advice
