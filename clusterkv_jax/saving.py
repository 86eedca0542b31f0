"""A compressed cache on disk: read a long text once, answer questions about it in other processes.

One safetensors file: the arrays by their place in the cache, and as metadata the format's version, the model's
configuration and the method, all of which must be those of whoever loads it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from clusterkv_jax.cache import Group, HeadGroups, KVCache, Layer, LayerCache, PagedHeads, groups
from clusterkv_jax.errors import out_of_memory_explained
from clusterkv_jax.files import replacing
from clusterkv_jax.host_store import commit, place
from clusterkv_jax.methods import Method
from clusterkv_jax.methods.chassis import with_groups
from clusterkv_jax.models.config import ModelConfig

FORMAT = "clusterkv_jax cache 1"


def save(path: str | Path, cache: KVCache, config: ModelConfig, method: Method) -> None:
    """Write a cache made by `prefill`; the file appears only when it is whole.

    Args:
        path: of the file, in a folder that exists.
        cache: stays as it is.
        config: of the model that made it.
        method: that made it.

    Raises:
        ValueError: if the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} does not exist; make it before a cache is saved there.")
    heads = [layer.heads if isinstance(layer, HeadGroups) else None for layer in cache.layers]
    metadata = {
        "format": FORMAT,
        "config": json.dumps(dataclasses.asdict(config)),
        "method": repr(method),
        "heads": json.dumps(heads),
    }
    with replacing(path) as temporary:
        save_file(_flat(cache), temporary, metadata)


def load(path: str | Path, config: ModelConfig, method: Method) -> KVCache:
    """Read a cache that `save` wrote, for the same model and method.

    Raises:
        ValueError: one sentence, if the file is missing or not a whole cache, or was made by another version, model or
            method.
        MemoryError: one sentence, if the device's or the host's memory does not suffice.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no cache file {path}.")
    with out_of_memory_explained(f"loading {path}", uses_host=method.holds == "host"):
        return _read(path, config, method)


def _read(path: Path, config: ModelConfig, method: Method) -> KVCache:
    try:
        with safe_open(path, framework="flax") as file:
            metadata = file.metadata() or {}
            _check(path, metadata, config, method)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole cache file: {error}.") from error
    heads = json.loads(metadata["heads"])
    layers = tuple(_layer(arrays, f"layers.{i}", at) for i, at in enumerate(heads))
    state = tuple(
        tuple(_named(arrays, f"state.{i}.{j}.") or None for j in range(len(groups(layer))))
        for i, layer in enumerate(layers)
    )
    layers = tuple(
        with_groups(layer, [place(group, tensors) for group, tensors in zip(groups(layer), keeps, strict=True)])
        for layer, keeps in zip(layers, state, strict=True)
    )
    cache = KVCache(layers, state, arrays["position"])
    return commit(cache) if method.holds == "host" else cache


def _flat(cache: KVCache) -> dict[str, jax.Array]:
    """Arrays by their place; gathered, where they lie on several devices."""
    named: dict[str, Any] = {"position": cache.position}
    for i, (layer, state) in enumerate(zip(cache.layers, cache.state, strict=True)):
        for j, (group, memory) in enumerate(zip(groups(layer), state, strict=True)):
            fields = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
            named |= {f"layers.{i}.{j}.{name}": x for name, x in fields.items() if x is not None}
            named |= {f"state.{i}.{j}.{name}": x for name, x in (memory or {}).items()}
    return {name: jnp.asarray(np.asarray(x)) for name, x in named.items()}


def _layer(arrays: dict[str, jax.Array], where: str, heads: list[list[int]] | None) -> Layer:
    if heads is None:
        return _group(_named(arrays, f"{where}.0."))
    parts = [LayerCache(**_named(arrays, f"{where}.{j}.")) for j in range(len(heads))]
    return HeadGroups(tuple(parts), tuple(map(tuple, heads)))


def _group(fields: dict[str, jax.Array]) -> Group:
    return PagedHeads(**fields) if "first" in fields else LayerCache(**fields)


def _named(arrays: dict[str, jax.Array], prefix: str) -> dict[str, jax.Array]:
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def _check(path: Path, metadata: dict[str, str], config: ModelConfig, method: Method) -> None:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} must be of format {FORMAT!r}, got {metadata.get('format')!r}.")
    theirs, ours = json.loads(metadata["config"]), json.loads(json.dumps(dataclasses.asdict(config)))
    for name in ours:
        if theirs.get(name) != ours[name]:
            raise ValueError(
                f"The cache {path} was made by a model with {name} = {theirs.get(name)!r}, this one has {ours[name]!r}."
            )
    if metadata["method"] != repr(method):
        raise ValueError(f"The cache {path} was made by {metadata['method']}, not by {method!r}.")
