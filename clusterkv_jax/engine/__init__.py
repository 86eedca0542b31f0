"""Many requests to one model: they come and go while one compiled program decodes for all of them."""

from clusterkv_jax.engine.async_engine import AsyncEngine, OutputStream
from clusterkv_jax.engine.contexts import Context
from clusterkv_jax.engine.conversation import Conversation
from clusterkv_jax.engine.engine import Engine
from clusterkv_jax.engine.handle import Handle
from clusterkv_jax.engine.metrics import EngineStats
from clusterkv_jax.engine.outputs import RequestOutput
from clusterkv_jax.engine.params import SamplingParams
from clusterkv_jax.engine.requests import EngineFull, Request

__all__ = [
    "AsyncEngine",
    "Context",
    "Conversation",
    "Engine",
    "EngineFull",
    "EngineStats",
    "Handle",
    "OutputStream",
    "Request",
    "RequestOutput",
    "SamplingParams",
]
