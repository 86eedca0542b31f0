"""The benchmark of meshes runs, on two devices of the CPU, and finds the same tokens on all."""

import itertools
import json
import os
from pathlib import Path

from tests.support.checkpoint_files import LLAMA
from tests.support.job import FLAGS
from tests.support.processes import python

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "benchmark_mesh.py"


def test_every_mesh_and_method_has_a_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 1024}))
    small = ["--model", tmp_path, "--tokens", "512", "--dtype", "float32", "--repeats", "0", "--variant", "default"]
    small += ["--batch", "2", "--layers", "1", "--steps", "32"]
    meshes = ["--mesh", "one", "--mesh", "model=2", "--mesh", "sequence=2"]
    devices = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    said = python(SCRIPT, *small, *meshes, env={**os.environ, **FLAGS, "XLA_FLAGS": devices}).stdout
    lines = [[cell.strip() for cell in line.split("|")] for line in said.splitlines() if "GiB" in line]
    names = itertools.product(meshes[1::2], ("full", "centroidkv"), ("2",))
    assert [line[1:5] for line in lines] == [[mesh, name, batch, "default"] for mesh, name, batch in names]
    assert {line[7] for line in lines} == {"100.0%"}
