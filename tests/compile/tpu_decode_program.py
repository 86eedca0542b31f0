"""Compiles the decode program for a TPU topology and prints what it found as JSON; run by test_tpu_compile.

Usage: python tests/compile/tpu_decode_program.py PRESET LAYERS BATCH TOKENS
A process of its own: libtpu reads its settings from the environment once, and a compiler's abort must not end the
tests.
"""

import json
import re
import sys
from dataclasses import replace

import described

import clusterkv_jax as ckv
from clusterkv_jax.planning.described import Job, chip_bytes
from clusterkv_jax.planning.devices import tpu_devices
from clusterkv_jax.presets import preset
from clusterkv_jax.sharding import named_mesh

NEW_TOKENS = 512  # several times the interval after which clustering methods compress again


def compile_loop(name: str, layers: int, batch: int, tokens: int) -> dict[str, float]:
    """Llama-3.1-8B's shapes with `layers` layers, tensor-parallel over eight v5e chips, 20 % of the prompt kept."""
    mesh = named_mesh("model=8", tpu_devices("v5e:2x4"))
    config = replace(described.LLAMA, num_layers=layers)
    job = Job(config, preset(name, ckv.Budget(ratio=0.2)), mesh, batch, tokens, NEW_TOKENS)
    compiled = job.decode(layers).compile()
    memory = compiled.memory_analysis()
    return {
        "cache": chip_bytes(job.cache),
        "temporary": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "conditionals": len(re.findall(r"\bconditional\(", compiled.as_text())),
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }


if __name__ == "__main__":
    print(json.dumps(compile_loop(sys.argv[1], *map(int, sys.argv[2:]))))
