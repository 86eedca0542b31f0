"""One layer through a method, as prefill takes it."""

from typing import Any

import jax
import jax.numpy as jnp

from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.driver import LayerPrompt, compress_layer
from clusterkv_jax.methods.plan import plan_layer, rows_of_request
from clusterkv_jax.methods.request import RequestShape


def compress(method: Method, tensors: Any, lengths: Any, request: RequestShape, layer: int = 0, selection: Any = None):
    """A layer's cache, the memory of its groups and what they selected, from (queries, keys, values)."""
    plan = plan_layer(method, layer, request)
    budgets = rows_of_request(method, plan, lengths, layer, request)
    prompt = LayerPrompt(*tensors, lengths=jnp.asarray(lengths))
    return _compress_layer(method, prompt, budgets, plan, jax.random.key(1), selection)


# One program, as in the library: its operations one by one are a hundred programs.
_compress_layer = jax.jit(compress_layer, static_argnums=(0, 3))
