"""Compiles programs for an H100 that is not there; run by test_gpu_kernels and test_gpu_layers.

Prints as JSON what each program holds: Triton kernels, barriers, launches of a decode step, loops, bytes of
temporaries, of arguments, of results in host memory and of aliased arguments.
A process of its own: the GPU's compiler reads its settings from the environment once.

Usage: python tests/compile/gpu_programs.py gpu_kernels|gpu_layers
"""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
# Threads of the GPU's compiler crash now and then on a busy host; two cores gain nothing by them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_force_compilation_parallelism=1"

import jax
import numpy as np
from compiled_text import largest_copy, launches, most_operands, most_results
from described import array as on_mesh
from jax.experimental import topologies

from clusterkv_jax.runtime.programs import ON_ONE


def compile_all(part: Any) -> dict[str, dict[str, Any]]:
    """The programs of a module compiled for one H100, and some of them for a GPU with less shared memory too."""
    target = Path(__file__).with_name("h100.txtpb").read_text()
    small = target.replace("NVIDIA H100 80GB HBM3", "NVIDIA L4").replace("major: 9 }", "major: 8 minor: 9 }")
    small = re.sub(r"(shared_memory_per_(?:core|block_optin)): \d+", r"\1: 101376", small)
    return compile_for(target, part.programs) | compile_for(small, part.of_little_memory)


def compile_for(target: str, programs: Callable[..., dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Programs compiled for the GPU that `target` describes."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1 x 1 x 1", target_config=target
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("x",))

    results = {}
    with jax.set_mesh(mesh):
        described = programs(partial(on_mesh, mesh))
    for name, (function, args, donated) in described.items():
        with jax.set_mesh(mesh):
            options = ON_ONE if name.startswith("decode") else None  # as `decode_loop` is compiled
            compiled = jax.jit(function, donate_argnums=donated).lower(*args).compile(options)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        results[name] = {
            "kernels": len(re.findall(r"triton", text)),
            "names": sorted(set(re.findall(r'name = \\?"(\w+)', text))),
            "waits": bool(re.findall("barrier", text)),
            "launches": launches(text),
            "operands": most_operands(text),
            "results": most_results(text),
            "copied": largest_copy(text),
            "products": len(re.findall(r"gemm_fusion\S* = ", text)),
            "loops": len(re.findall(r" while\(", text)),
            "temporary": memory.temp_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "host": memory.host_output_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
        }
    return results


if __name__ == "__main__":
    print(json.dumps(compile_all(import_module(sys.argv[1]))))
