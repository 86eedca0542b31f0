"""Clustered KV caches for long-context decoding in JAX.

A public name is imported when it is first used: what needs no jax, such as the command's help, starts at once.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterkv_jax import calibration, saving
    from clusterkv_jax import learned as learned
    from clusterkv_jax.budget import Budget as Budget
    from clusterkv_jax.cache import HeadGroups as HeadGroups
    from clusterkv_jax.cache import KVCache as KVCache
    from clusterkv_jax.cache import LayerCache as LayerCache
    from clusterkv_jax.cache import PagedHeads as PagedHeads
    from clusterkv_jax.cache import WindowCache as WindowCache
    from clusterkv_jax.cache.attention import attend as attend
    from clusterkv_jax.checkpoints import CheckpointError as CheckpointError
    from clusterkv_jax.checkpoints import Model as Model
    from clusterkv_jax.checkpoints import load as load
    from clusterkv_jax.decoding import decode_step as decode_step
    from clusterkv_jax.decoding import prefill as prefill
    from clusterkv_jax.engine import AsyncEngine as AsyncEngine
    from clusterkv_jax.engine import Context as Context
    from clusterkv_jax.engine import Conversation as Conversation
    from clusterkv_jax.engine import Engine as Engine
    from clusterkv_jax.engine import EngineFull as EngineFull
    from clusterkv_jax.engine import EngineStats as EngineStats
    from clusterkv_jax.engine import Handle as Handle
    from clusterkv_jax.engine import RequestOutput as RequestOutput
    from clusterkv_jax.engine import SamplingParams as SamplingParams
    from clusterkv_jax.generation import generate as generate
    from clusterkv_jax.generation.results import Result as Result
    from clusterkv_jax.generation.results import Stats as Stats
    from clusterkv_jax.methods.registry import *
    from clusterkv_jax.presets import completed as completed
    from clusterkv_jax.sampling import Sampling as Sampling
    from clusterkv_jax.tensors import build_index as build_index
    from clusterkv_jax.tensors import compress as compress
    from clusterkv_jax.tensors import select as select
    from clusterkv_jax.text.demo import demo_text as demo_text

    push_calibration = calibration.push
    load_cache = saving.load
    save_cache = saving.save

# Where public names are, but for the methods, which their registry lists.
_HOMES = {
    "AsyncEngine": "engine.AsyncEngine",
    "Budget": "budget.Budget",
    "CheckpointError": "checkpoints.CheckpointError",
    "Context": "engine.Context",
    "Conversation": "engine.Conversation",
    "Engine": "engine.Engine",
    "EngineFull": "engine.EngineFull",
    "EngineStats": "engine.EngineStats",
    "Handle": "engine.Handle",
    "HeadGroups": "cache.HeadGroups",
    "KVCache": "cache.KVCache",
    "LayerCache": "cache.LayerCache",
    "Model": "checkpoints.Model",
    "PagedHeads": "cache.PagedHeads",
    "RequestOutput": "engine.RequestOutput",
    "Result": "generation.results.Result",
    "Sampling": "sampling.Sampling",
    "SamplingParams": "engine.SamplingParams",
    "Stats": "generation.results.Stats",
    "WindowCache": "cache.WindowCache",
    "attend": "cache.attention.attend",
    "build_index": "tensors.build_index",
    "completed": "presets.completed",
    "compress": "tensors.compress",
    "decode_step": "decoding.decode_step",
    "demo_text": "text.demo.demo_text",
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
        module, _, attribute = _HOMES[name].rpartition(".")
        value = getattr(import_module(f"{__name__}.{module}"), attribute)
    elif name == "__all__":
        value = sorted({*_HOMES, *_methods(), "learned"})
    elif name.startswith("_"):
        raise AttributeError(f"Module {__name__!r} has no attribute {name!r}.")
    elif find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")
    elif name in (found := _methods()):
        value = found[name]
    else:
        raise AttributeError(f"Module {__name__!r} has no attribute {name!r}.")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__getattr__("__all__"), "__version__", *(name for name in globals() if name.startswith("__"))})


def _methods() -> dict[str, type]:
    return import_module(f"{__name__}.methods.registry").METHODS
