"""Compiles a decode step over two H100s that are not there; run by test_gpu_layers.

Prints as JSON the bytes that a device sends in a step, and how many weights' products have become reductions.

Usage: python tests/compile/gpu_mesh_program.py
"""

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
# Threads of the GPU's compiler crash now and then on a busy host; two cores gain nothing by them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_force_compilation_parallelism=1"

from described import LLAMA
from jax.experimental import topologies

import clusterkv_jax as ckv
from clusterkv_jax.planning.abstract_request import ProgramJob
from clusterkv_jax.planning.collectives import per_step
from clusterkv_jax.runtime.sharding import named_mesh

LAYERS = 2


def main() -> None:
    """Print what the program holds."""
    target = Path(__file__).with_name("h100.txtpb").read_text()
    pair = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1 x 2 x 1", target_config=target
    )
    mesh = named_mesh("model=2", pair.devices)
    job = ProgramJob(replace(LLAMA, num_layers=LAYERS), ckv.Full(), mesh, batch=1, context=8192, new_tokens=32)
    text = job.decode(LAYERS).compile().as_text()
    reductions = re.findall(r"%input_reduce_fusion[.\w]* = .*linear/dot_general", text)
    print(json.dumps({"collectives": list(map(asdict, per_step(text, 2))), "reductions": len(reductions)}))


if __name__ == "__main__":
    main()
