"""Compiles the decode program for a TPU topology and prints what it found as JSON; run by test_tpu_compile.

Usage: python tests/compile/tpu_decode_program.py PRESET LAYERS BATCH TOKENS [TOPOLOGY [WEIGHTS]]
A process of its own: libtpu reads its settings from the environment once, and a compiler's abort must not end the
tests.
"""

import json
import math
import re
import sys
from dataclasses import replace

import described

import clusterkv_jax as ckv
from clusterkv_jax.planning.abstract_request import ProgramJob, chip_bytes
from clusterkv_jax.planning.devices import tpu_devices
from clusterkv_jax.presets import preset
from clusterkv_jax.runtime.sharding import fitted_mesh, named_mesh

NEW_TOKENS = 512  # several times the interval after which clustering methods compress again


COLLECTIVE = re.compile(r"= (\(.*?\)|\S+) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\S*\(")


def largest_array(result: str) -> int:
    """Bytes of the largest array in the result of an instruction, as it is written."""
    widths = {"pred": 1, "bf16": 2}
    arrays = re.findall(r"\b(pred|bf16|f32|s32|u32)\[([\d,]*)\]", result)
    sizes = [widths.get(kind, 4) * math.prod(map(int, filter(None, shape.split(",")))) for kind, shape in arrays]
    return max(sizes, default=0)


def compile_loop(
    name: str, layers: int, batch: int, tokens: int, topology: str = "v5e:2x4", weights: str | None = None
) -> dict[str, float]:
    """Llama-3.1-8B's shapes with `layers` layers, tensor-parallel over the chips, 20 % of the prompt kept. In
    codes the head is the table of embeddings too, of whole tiles a chip: others are laid out anew for each call.
    """
    devices = tpu_devices(topology)
    mesh = fitted_mesh(named_mesh(f"model={len(devices)}", devices), described.LLAMA.num_kv_heads)
    config = replace(described.LLAMA, num_layers=layers)
    if weights is not None:
        config = replace(config, tie_embeddings=True, vocab_size=2**17)
    job = ProgramJob(config, preset(name, ckv.Budget(ratio=0.2)), mesh, batch, tokens, NEW_TOKENS, weights=weights)
    compiled = job.decode(layers).compile()
    memory = compiled.memory_analysis()
    return {
        "cache": chip_bytes(job.cache),
        "temporary": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "conditionals": len(re.findall(r"\bconditional\(", compiled.as_text())),
        "largest collective": max(map(largest_array, COLLECTIVE.findall(compiled.as_text())), default=0),
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }


if __name__ == "__main__":
    print(json.dumps(compile_loop(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])))
