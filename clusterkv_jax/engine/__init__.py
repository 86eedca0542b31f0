"""Many requests to one model: they come and go while one compiled program decodes for all of them."""

from clusterkv_jax.engine.contexts import Context
from clusterkv_jax.engine.engine import Engine
from clusterkv_jax.engine.handle import Handle
from clusterkv_jax.engine.metrics import EngineStats

__all__ = ["Context", "Engine", "EngineStats", "Handle"]
