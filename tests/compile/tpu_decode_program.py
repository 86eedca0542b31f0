"""Compiles the decode program for a TPU topology and prints what it found as JSON; run by test_tpu_compile.

Usage: python tests/compile/tpu_decode_program.py PRESET LAYERS BATCH TOKENS
A process of its own: libtpu reads its settings from the environment once, and a compiler's abort must not end the
tests.
"""

import json
import math
import re
import sys
from dataclasses import replace
from functools import partial

import described
import jax
import jax.numpy as jnp
import numpy as np
from tpu_topology import tpu_devices

import clusterkv_jax as ckv
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.models.transformer import abstract
from clusterkv_jax.presets import preset
from clusterkv_jax.sharding import CACHE_AXES, param_shardings, partition

DEVICES = 8
NEW_TOKENS = 512  # several times the interval after which clustering methods compress again


def compile_loop(name: str, layers: int, batch: int, tokens: int) -> dict[str, float]:
    """Llama-3.1-8B's shapes with `layers` layers, tensor-parallel over eight v5e chips, 20 % of the prompt kept."""
    mesh = jax.sharding.Mesh(np.array(tpu_devices("v5e:2x4")).reshape(1, DEVICES), ("data", "model"))
    config = replace(described.LLAMA, num_layers=layers)
    method = preset(name, ckv.Budget(ratio=0.2))

    whole = partial(described.array, mesh)

    def placed(x):
        return described.array(mesh, x.shape, x.dtype, partition(CACHE_AXES[x.ndim], x.shape, mesh))

    with jax.set_mesh(mesh):
        specs = abstract(config)
        params = jax.tree.map(
            lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16, sharding=sharding),
            specs,
            param_shardings(specs, mesh),
        )
        cache, _ = jax.eval_shape(
            lambda p, t, n: ckv.prefill(p, config, method, t, n, max_new_tokens=NEW_TOKENS),
            params,
            whole((batch, tokens), jnp.int32),
            whole((batch,), jnp.int32),
        )
        cache = jax.tree.map(placed, cache)
        key = jax.eval_shape(lambda: jax.random.key(0))
        compiled = decode_loop.lower(
            params,
            config,
            method,
            DecodeState(cache, whole((batch,), jnp.int32), whole((batch,), jnp.bool_)),
            whole(key.shape, key.dtype),
            whole((), jnp.int32),
            whole((), jnp.int32),
            sampling=ckv.Sampling(),
            eos_ids=(128001,),
            steps=32,
        ).compile()
    memory = compiled.memory_analysis()
    return {
        "cache": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache)) / DEVICES,
        "temporary": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "conditionals": len(re.findall(r"\bconditional\(", compiled.as_text())),
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }


if __name__ == "__main__":
    print(json.dumps(compile_loop(sys.argv[1], *map(int, sys.argv[2:]))))
