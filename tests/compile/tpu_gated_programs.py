"""Compiles what takes a chunk of a prompt through a layer, and a layer back to its budget, for TPUs; run by
test_tpu_compile. Prints as JSON, by topology and program, its bytes of temporaries and of aliased arguments.

Usage: python tests/compile/tpu_gated_programs.py METHOD CONTEXT TOPOLOGY ...
A process of its own, as tpu_decode_program. The cache holds an eighth of the context, a window and a chunk.
"""

import json
import sys
from dataclasses import replace

import described

import clusterkv_jax as ckv
from clusterkv_jax.decoding.appending import append_to_layer
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.methods.gating import back_to_budget
from clusterkv_jax.planning.abstract_request import ProgramJob
from clusterkv_jax.planning.devices import tpu_devices
from clusterkv_jax.presets import preset
from clusterkv_jax.runtime.sharding import fitted_mesh, named_mesh

PROGRAMS = {"chunk": append_to_layer, "budget": back_to_budget}


def compile_for(topology: str, name: str, context: int) -> dict[str, dict[str, int]]:
    """The programs of two equal layers, each of which must be one."""
    devices = tpu_devices(topology)
    config = replace(described.LLAMA, num_layers=2)
    mesh = fitted_mesh(named_mesh(f"model={len(devices)}", devices), config.num_kv_heads)
    job = ProgramJob(config, preset(name, ckv.Budget(ratio=0.125)), mesh, 1, context, 128, Gate())
    distinct = list({id(call): call for call in job.calls}.values())
    found = {}
    for label, program in PROGRAMS.items():
        calls = [call for call in distinct if call.program is program]
        memory = calls[0].lowered.compile().memory_analysis()
        found[label] = {
            "programs": len(calls),
            "temporary": memory.temp_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "reading": job.reading_bytes // config.num_layers,
        }
    return found


if __name__ == "__main__":
    print(json.dumps({name: compile_for(name, sys.argv[1], int(sys.argv[2])) for name in sys.argv[3:]}))
