"""A compressed cache on disk: read a long text once, answer questions about it in other processes.

One safetensors file: the arrays by their place in the cache, and as metadata the format's version, the model's
configuration with the fingerprint of its weights, and the method, all of which must be those of whoever loads it. Every
array has its checksum there, and the metadata have theirs.
"""

import ast
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.host_store import commit, place
from clusterkv_jax.cache.kinds import first_pages, group_arrays, head_slots, is_compressible, with_groups
from clusterkv_jax.cache.layers import (
    Group,
    HeadGroups,
    HeadSlots,
    KVCache,
    Layer,
    LayerCache,
    PagedHeads,
    WindowCache,
    group_heads,
    groups,
)
from clusterkv_jax.kernels.quantised import CODES, SCALE_BYTES, Quantised, kind, row_bytes
from clusterkv_jax.methods import Method
from clusterkv_jax.methods.registry import METHODS
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.runtime.errors import out_of_memory_explained
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.storage.digests import all_finite, digest
from clusterkv_jax.storage.files import replacing
from clusterkv_jax.storage.schema import checked, from_json, shown

FORMAT = "clusterkv_jax cache 3"
T = TypeVar("T")
_FLOATS = ("float32", "bfloat16", "float16")
_E4M3 = jnp.dtype(jnp.float8_e4m3fn)  # which files have as bytes
_FINITE = (*_FLOATS, _E4M3.name)


class _About(Struct):
    config: dict[str, Any]
    method: str
    heads: list[list[tuple[int, ...]] | None]
    checksums: dict[str, str]
    head_slots: list[HeadSlots | None] = msgspec.field(default_factory=list)
    origin: dict[str, Any] = msgspec.field(default_factory=dict)


@own_settings()
def save(
    path: str | os.PathLike[str],
    cache: KVCache,
    config: ModelConfig,
    method: Method,
    *,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write a cache made by `prefill`; the file appears only when it is whole.

    Args:
        path: of the file, in a folder that exists.
        cache: stays as it is.
        config: of the model that made it. The file is for the weights that `config.weights` names.
        method: that made it.
        origin: more to be written beside it, as JSON, which `origin` reads: where it comes from, say.

    Raises:
        ValueError: if the folder does not exist, or the cache is none of this model's or holds impossible numbers.
    """
    path = _checked_path(path, config, method)
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache must be a cache made by prefill, got {type(cache).__name__}.")
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} does not exist; make it before a cache is saved there.")
    _check_shapes(cache, config)
    arrays = {name: np.asarray(x) for name, x in _by_place(cache).items()}  # gathered from all devices
    for name, x in arrays.items():
        _check_numbers(name, x)
    arrays = {name: x.view(np.uint8) if x.dtype == _E4M3 else x for name, x in arrays.items()}
    about = {
        "config": _described(config),
        "method": repr(method),
        "heads": [group_arrays(layer) for layer in cache.layers],
        "checksums": {name: digest(x) for name, x in arrays.items()},
        "head_slots": [head_slots(layer) for layer in cache.layers],
        "origin": dict(origin or {}),
    }
    text = json.dumps(about)
    with replacing(path) as temporary:
        save_file(arrays, temporary, {"format": FORMAT, "about": text, "checksum": _checksum(text)})
        _put_in_order(temporary)


@own_settings()
def load(path: str | os.PathLike[str], config: ModelConfig, method: Method) -> KVCache:
    """Read a cache that `save` wrote, for the same model, weights and method.

    Raises:
        ValueError: one sentence, if the file is missing, damaged or no cache, or was made by another version, model or
            method, or with other weights; those of a Flax model, which training may change, are not looked at.
        MemoryError: one sentence, if the device's or the host's memory does not suffice.
    """
    return read(path, config, method)[0]


@own_settings()
def read(path: str | os.PathLike[str], config: ModelConfig, method: Method) -> tuple[KVCache, str]:
    """What `load` reads, and a fingerprint that tells the file from every other one. Raises as `load`."""
    path = _checked_path(path, config, method)
    if not path.is_file():
        raise ValueError(f"There is no cache file {path}.")
    with out_of_memory_explained(f"loading {path}", uses_host=method.storage == "host"):
        try:
            return _read(path, config, method)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole cache file: {shown(error)}.") from error


def origin(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was written beside a cache. Raises ValueError if the file is missing, damaged or no cache."""
    return _about_of(Path(path)).origin


def _about_of(path: Path) -> _About:
    if not path.is_file():
        raise ValueError(f"There is no cache file {path}.")
    try:
        with safe_open(path, framework="np") as file:
            return _about(path, file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole cache file: {shown(error)}.") from error


def fingerprint(config: ModelConfig, method: Method) -> str:
    """A text that tells what `save` writes for a model and a method from what it writes for others."""
    return _checksum(json.dumps([FORMAT, _described(config), repr(method)]))


def made_by(path: str | os.PathLike[str]) -> Method:
    """The method that made a cache, with all that its model knew of it.

    Raises ValueError as `origin`, and for a method that is none of this library's.
    """
    text = _about_of(Path(path)).method
    try:
        return _built(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{path} was made by {shown(text)}, which is to be given as its method.") from None


def _built(node: ast.AST) -> Any:
    """What an expression of methods, budgets and plain values says."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=fields):
            return {**METHODS, "Budget": Budget}[name](**{str(field.arg): _built(field.value) for field in fields})
        case ast.Tuple(elts=parts):
            return tuple(_built(part) for part in parts)
        case _:
            assert isinstance(node, ast.expr)
            return ast.literal_eval(node)


def _read(path: Path, config: ModelConfig, method: Method) -> tuple[KVCache, str]:
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        about = _about(path, metadata)
        _check_origin(path, about, config, method)
        if different := sorted(set(file.keys()) ^ about.checksums.keys()):
            raise ValueError(f"{path} is damaged: {different[0]} is not among its arrays, or not among its checksums.")
        arrays = {}
        for name, checksum in about.checksums.items():  # the host holds one at a time
            x = file.get_tensor(name)
            if digest(x) != checksum:
                raise ValueError(f"{path} is damaged: {name} does not have the checksum that it was saved with.")
            x = x.view(_E4M3) if name.endswith(".float8_e4m3") else x
            _check_numbers(name, x)
            arrays[name] = jnp.array(x)
    windows = dict.fromkeys(config.sliding_layers, config.window)
    slots = dict(enumerate(about.head_slots))
    layers = tuple(
        _layer(arrays, f"layers.{i}", heads, slots.get(i), windows.get(i)) for i, heads in enumerate(about.heads)
    )
    state = tuple(
        tuple(_named(arrays, f"state.{i}.{j}.") or None for j in range(len(groups(layer))))
        for i, layer in enumerate(layers)
    )
    cache = KVCache(layers, state, arrays.get("position", jnp.zeros(0, jnp.int32)))
    _check_shapes(cache, config)
    if unknown := sorted(arrays.keys() - _by_place(cache).keys()):
        raise ValueError(f"{path} holds {shown(unknown[0])}, which is no part of such a cache.")
    layers = tuple(
        with_groups(layer, [place(group, tensors) for group, tensors in zip(groups(layer), keeps, strict=True)])
        for layer, keeps in zip(layers, state, strict=True)
    )
    cache = dataclasses.replace(cache, layers=layers)
    return commit(cache) if method.storage == "host" else cache, metadata["checksum"]


# --- arrays by their place ---


def _by_place(cache: KVCache) -> dict[str, Any]:
    named: dict[str, Any] = {"position": cache.position}
    for i, (layer, state) in enumerate(zip(cache.layers, cache.state, strict=True)):
        for j, (group, memory) in enumerate(zip(groups(layer), state, strict=True)):
            named |= {f"layers.{i}.{j}.{name}": x for name, x in _fields(group).items() if x is not None}
            named |= {f"state.{i}.{j}.{name}": x for name, x in (memory or {}).items()}
    return named


def _fields(group: Group) -> dict[str, Any]:
    """The arrays of a group by name; of rows in int8 those are `keys.int8` and `keys.scales`."""
    arrays = [field.name for field in dataclasses.fields(group) if "static" not in field.metadata]
    fields: dict[str, Any] = {name: getattr(group, name) for name in arrays}
    stored = {name: fields.pop(name) for name in ("keys", "values") if isinstance(fields[name], Quantised)}
    for name, x in stored.items():
        fields |= {f"{name}.{kind(x)}": x.codes, f"{name}.scales": x.scales}
    return fields


def _layer(
    arrays: dict[str, jax.Array],
    where: str,
    heads: list[tuple[int, ...]] | None,
    slots: HeadSlots | None,
    window: int | None,
) -> Layer:
    if window is not None:
        return WindowCache(_group(LayerCache, arrays, f"{where}.0"), window)
    if heads is None:
        if f"{where}.0.first" not in arrays:
            return _group(LayerCache, arrays, f"{where}.0")
        return dataclasses.replace(_group(PagedHeads, arrays, f"{where}.0"), head_slots=slots)
    parts = [_group(LayerCache, arrays, f"{where}.{j}") for j in range(len(heads))]
    return HeadGroups(tuple(parts), tuple(heads))


def _group(group: type[T], arrays: dict[str, jax.Array], where: str) -> T:
    found = _named(arrays, f"{where}.")
    fields: dict[str, Any] = dict(found)
    try:
        for name in [name for name in fields if name.endswith(tuple(f".{stored}" for stored in CODES))]:
            of = name.partition(".")[0]
            fields[of] = Quantised(fields.pop(name), fields.pop(f"{of}.scales"))
        return group(**fields)
    except (TypeError, KeyError):
        raise ValueError(f"{where} of a cache cannot consist of {shown(', '.join(found) or 'nothing')}.") from None


def _named(arrays: dict[str, jax.Array], prefix: str) -> dict[str, jax.Array]:
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


# --- what is checked ---


def _checked_path(path: Any, config: Any, method: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ValueError(f"path must be the path of a file, got {path!r}.")
    if not isinstance(config, ModelConfig) or not hasattr(method, "compress"):
        raise ValueError(f"config and method must be a ModelConfig and a method, got {config!r} and {method!r}.")
    return Path(path)


def _about(path: Path, metadata: dict[str, str]) -> _About:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} must be of format {FORMAT!r}, got {shown(repr(metadata.get('format')))}.")
    text = metadata.get("about", "")
    if metadata.get("checksum") != _checksum(text):
        raise ValueError(f"{path} is damaged: its metadata do not have the checksum that they were saved with.")
    return checked(from_json(text, str(path)), _About, str(path))


def _put_in_order(path: Path) -> None:
    """The library writes metadata in another order each time; a cache is the same file each time."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _described(config: ModelConfig) -> dict[str, Any]:
    # Functions of a decoder that was written elsewhere are in no file.
    return dataclasses.asdict(dataclasses.replace(config, decoder=None))


def _check_origin(path: Path, about: _About, config: ModelConfig, method: Method) -> None:
    ours = json.loads(json.dumps(_described(config)))
    for name in ours:
        if about.config.get(name) != ours[name]:
            raise ValueError(
                f"The cache {path} was made by a model with {name} = {shown(repr(about.config.get(name)))}, "
                f"this one has {ours[name]!r}."
            )
    if about.method != repr(method):
        alike = about.method.startswith((f"{type(method).__name__}(", "Auto("))
        hint = "; clusterkv_jax.completed(model, method) has what a calibration says" if alike else ""
        raise ValueError(f"The cache {path} was made by {shown(about.method)}, not by {method!r}{hint}.")


def _check_numbers(name: str, x: np.ndarray) -> None:
    """Keys, values, scales and degrees are finite, degrees not negative: `log degree` is the mask."""
    field = name.rpartition(".")[2] if name.startswith("layers.") else ""
    numbers = ("keys", "values", "scales", "float8_e4m3", "key_mean", "degree")
    if field in numbers and x.dtype.name in _FINITE and not all_finite(x):
        raise ValueError(f"{name} of the cache holds numbers that are not finite.")
    if field == "degree" and np.any(x < 0):
        raise ValueError(f"{name} of the cache must be at least 0, got {x.min()}.")


def _check_shapes(cache: KVCache, config: ModelConfig) -> None:
    """Raise ValueError unless the arrays have the types and shapes of a cache of this model."""
    if len(cache.layers) != config.num_layers or len(cache.state) != config.num_layers:
        raise ValueError(f"The cache must have {config.num_layers} layers, got {len(cache.layers)}.")
    if cache.position.dtype != jnp.int32 or cache.position.ndim != 1:
        raise ValueError(f"position of the cache must be int32 [B], got {_kind(cache.position)}.")
    for i, layer in enumerate(cache.layers):
        if is_compressible(layer) == (i in config.sliding_layers):
            raise ValueError(f"layers.{i} of the cache must be that of the model, one {_seeing(i, config)}.")
        for j, group in enumerate(groups(layer)):
            if group.length.ndim != 2:
                raise ValueError(f"layers.{i}.{j}.length of the cache must be int32 [B, K], got {_kind(group.length)}.")
        heads = group_heads(layer)
        budgets = tuple(mine for mine, _ in head_slots(layer) or ()) or heads
        if any(sorted(itertools.chain(*x)) != list(range(config.num_kv_heads)) for x in (heads, budgets)):
            raise ValueError(f"layers.{i} of the cache must hold {config.num_kv_heads} KV heads, got {budgets}.")
        for j, (group, mine) in enumerate(zip(groups(layer), heads, strict=True)):
            _check_group(f"layers.{i}.{j}", group, cache.position.shape[0], len(mine), config.head_dim)


def _seeing(layer: int, config: ModelConfig) -> str:
    return f"with a window of {config.window}" if layer in config.sliding_layers else "that sees every token"


def _check_group(where: str, group: Group, batch: int, heads: int, dim: int) -> None:
    each = (batch, heads)
    rows = (*each, *group.keys.shape[2:3]) if first_pages(group) is None else (batch, *group.keys.shape[1:3])
    allowed = {"keys": (_FLOATS, (*rows, dim)), "values": (_FLOATS, (*rows, dim)), "degree": (("float32",), rows)}
    allowed |= {"length": (("int32",), each), "positions": (("int32",), rows), "first": (("int32",), each)}
    allowed |= {"key_mean": (("float32",), (*each, 1, dim))}
    fields = _fields(group)
    for name in ("keys", "values"):
        allowed[f"{name}.scales"] = ("float32",), rows
        for stored, dtype in CODES.items():
            width = row_bytes(stored, dim) - SCALE_BYTES
            allowed[f"{name}.{stored}"] = (jnp.dtype(dtype).name,), (*rows, width)
    for name, (kinds, shape) in allowed.items():
        x = fields.get(name)
        if x is not None and (x.dtype.name not in kinds or x.shape != shape):
            raise ValueError(f"{where}.{name} of the cache must be {kinds[0]} {list(shape)}, got {_kind(x)}.")


def _kind(x: jax.Array) -> str:
    return f"{x.dtype.name} {list(x.shape)}"
