"""Clustered KV caches for long-context decoding in JAX.

A public name is imported when it is first used: what needs no jax, such as the command's help, starts at once.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterkv_jax import learned
    from clusterkv_jax.attention import attend
    from clusterkv_jax.budget import Budget
    from clusterkv_jax.cache import HeadGroups, KVCache, LayerCache, PagedHeads, WindowCache
    from clusterkv_jax.calibration import push as push_calibration
    from clusterkv_jax.checkpoints import CheckpointError, Model, load
    from clusterkv_jax.decoding import decode_step, prefill
    from clusterkv_jax.demo import demo_text
    from clusterkv_jax.engine import Context, Engine, EngineStats, Handle
    from clusterkv_jax.generation import generate
    from clusterkv_jax.methods import (
        H2O,
        TOVA,
        AdaKV,
        Auto,
        CaM,
        CentroidKV,
        Chelsea,
        ChunkKV,
        ClusterKV,
        Compactor,
        Composed,
        DropKV,
        ExpectedAttention,
        Full,
        GravityKV,
        InfiniGen,
        KeyDiff,
        Knorm,
        KVzap,
        KVzip,
        LagKV,
        Matched,
        OrbitKV,
        PyramidKV,
        Quest,
        SnapKV,
        StreamingLLM,
    )
    from clusterkv_jax.presets import completed
    from clusterkv_jax.results import Result, Stats
    from clusterkv_jax.sampling import Sampling
    from clusterkv_jax.saving import load as load_cache
    from clusterkv_jax.saving import save as save_cache
    from clusterkv_jax.tensors import build_index, compress, select

__all__ = [
    "H2O",
    "TOVA",
    "AdaKV",
    "Auto",
    "Budget",
    "CaM",
    "CentroidKV",
    "CheckpointError",
    "Chelsea",
    "ChunkKV",
    "ClusterKV",
    "Compactor",
    "Composed",
    "Context",
    "DropKV",
    "Engine",
    "EngineStats",
    "ExpectedAttention",
    "Full",
    "GravityKV",
    "Handle",
    "HeadGroups",
    "InfiniGen",
    "KVCache",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "Knorm",
    "LagKV",
    "LayerCache",
    "Matched",
    "Model",
    "OrbitKV",
    "PagedHeads",
    "PyramidKV",
    "Quest",
    "Result",
    "Sampling",
    "SnapKV",
    "Stats",
    "StreamingLLM",
    "WindowCache",
    "attend",
    "build_index",
    "completed",
    "compress",
    "decode_step",
    "demo_text",
    "generate",
    "learned",
    "load",
    "load_cache",
    "prefill",
    "push_calibration",
    "save_cache",
    "select",
]

_METHODS = (
    "H2O TOVA AdaKV Auto CaM CentroidKV Chelsea ChunkKV ClusterKV Compactor Composed DropKV ExpectedAttention Full "
    "GravityKV InfiniGen KVzap KVzip KeyDiff Knorm LagKV Matched OrbitKV PyramidKV Quest SnapKV StreamingLLM"
)
_HOMES = {name: f"methods.{name}" for name in _METHODS.split()} | {
    "Budget": "budget.Budget",
    "CheckpointError": "checkpoints.CheckpointError",
    "Context": "engine.Context",
    "Engine": "engine.Engine",
    "EngineStats": "engine.EngineStats",
    "Handle": "engine.Handle",
    "HeadGroups": "cache.HeadGroups",
    "KVCache": "cache.KVCache",
    "LayerCache": "cache.LayerCache",
    "Model": "checkpoints.Model",
    "PagedHeads": "cache.PagedHeads",
    "Result": "results.Result",
    "Sampling": "sampling.Sampling",
    "Stats": "results.Stats",
    "WindowCache": "cache.WindowCache",
    "attend": "attention.attend",
    "build_index": "tensors.build_index",
    "completed": "presets.completed",
    "compress": "tensors.compress",
    "decode_step": "decoding.decode_step",
    "demo_text": "demo.demo_text",
    "generate": "generation.generate",
    "load": "checkpoints.load",
    "load_cache": "saving.load",
    "prefill": "decoding.prefill",
    "push_calibration": "calibration.push",
    "save_cache": "saving.save",
    "select": "tensors.select",
}


def __getattr__(name: str) -> Any:
    """A public name, a module or the version, looked up when it is first asked for."""
    if name == "__version__":
        value = import_module("importlib.metadata").version("clusterkv-jax")
    elif name in _HOMES:
        module, attribute = _HOMES[name].split(".")
        value = getattr(import_module(f"{__name__}.{module}"), attribute)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"Module {__name__!r} has no attribute {name!r}.")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
