"""Compiles one layer's prefill for a TPU, method by method, and prints its memory as JSON; run by test_tpu_compile.

Usage: python tests/compile/tpu_prefill_programs.py TOKENS [METHOD ...]
A process of its own, as tpu_decode_program. Prefill is a host loop over one jitted layer: beside the program's own
memory there are the parameters and the caches of the layers that are done.
"""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import described
import jax
import jax.numpy as jnp
import numpy as np
from tpu_topology import tpu_devices

import clusterkv_jax as ckv
from clusterkv_jax import decoding
from clusterkv_jax.cache import groups
from clusterkv_jax.methods.plan import plan_layer
from clusterkv_jax.methods.request import Request
from clusterkv_jax.models.transformer import abstract
from clusterkv_jax.presets import list_presets, preset

CONFIG = replace(described.LLAMA, num_layers=2)
SHARE = ckv.Budget(ratio=0.2, base="prompt")


def method_of(name: str) -> Any:
    """A preset with a fifth of the prompt."""
    return preset(name, SHARE if list_presets()[name].takes_budget else None)


def compile_layer(name: str, tokens: int) -> dict[str, float]:
    """Layer 0 of Llama-3.1-8B over one prompt of `tokens` tokens, a fifth of it kept."""
    mesh = jax.sharding.Mesh(np.array(tpu_devices("v5p:2x2x1")[:1]), ("model",))
    method = method_of(name)
    whole = partial(described.array, mesh)
    weights = jax.tree.map(lambda spec: whole(spec.shape, jnp.bfloat16), abstract(CONFIG)["layers"][0])
    request = Request(
        np.asarray([tokens]), CONFIG.num_layers, CONFIG.num_kv_heads, reserve=128, row_bytes=516, rope=CONFIG.rope
    )
    with jax.set_mesh(mesh), mock.patch("jax.default_backend", return_value="tpu"):
        plan = plan_layer(method, 0, request)
        hidden = whole((1, tokens, CONFIG.hidden_size), jnp.bfloat16)
        rows = whole((1, len(plan.heads), 1), jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        arguments = (weights, CONFIG, method, plan, None, hidden, whole((1,), jnp.int32), rows)
        lowered = decoding._prefill_layer.lower(*arguments, whole(key.shape, key.dtype), None)
        _, layer, _, _ = lowered.out_info
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return {
        "cache": sum(
            math.prod(x.shape) * x.dtype.itemsize for g in groups(layer) for x in (g.keys, g.values, g.degree)
        ),
        "slots": sum(g.keys.shape[1] * g.keys.shape[2] for g in groups(layer)) / CONFIG.num_kv_heads,
        "full_cache": 2 * tokens * CONFIG.num_kv_heads * CONFIG.head_dim * 2,
        # Gate and up of the MLP; queries, what they attended to, and normalised hidden states: bf16.
        "activations": 2 * tokens * (2 * CONFIG.intermediate_size + 3 * CONFIG.hidden_size),
        "temporary": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
    }


if __name__ == "__main__":
    # Presets with shares are those of one model.
    names = sys.argv[2:] or [name for name in list_presets() if not getattr(method_of(name), "budget", SHARE).shares]
    print(json.dumps({name: compile_layer(name, int(sys.argv[1])) for name in names}))
