"""Two processes share a mesh of eight devices: each reads its own half of a converted model."""

import json
import socket
import subprocess
import sys

import pytest

from clusterkv_jax.checkpoints import convert
from clusterkv_jax.checkpoints import orbax as orbax_files
from tests.support.checkpoint_files import LLAMA, random_tensors, write

pytest.importorskip("orbax.checkpoint")

HOST = """
import json, sys
import jax
import numpy as np
source, target, port, number = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
from clusterkv_jax.checkpoints import orbax as orbax_files
from clusterkv_jax.checkpoints.loading import load, open_checkpoint
from clusterkv_jax.runtime.sharding import named_mesh
reads, read = [], orbax_files.Pieces._whole_pieces
def counted(self, first, last, rows):
    reads.append([self.where.split()[0], first * rows, last * rows])
    return read(self, first, last, rows)
orbax_files.Pieces._whole_pieces = counted
model = load(target, mesh=named_mesh("model=8"))
parameters = jax.tree.leaves(open_checkpoint(source).parameters)
for array, parameter in zip(jax.tree.leaves(model.params), parameters, strict=True):
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, parameter.view()[shard.index])
print(json.dumps({"weights": model.config.weights, "reads": reads}))
"""


def test_each_process_reads_its_own_part(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_files, "_LEAST_PIECE", 128)
    source = write(tmp_path / "source", LLAMA, random_tensors(LLAMA), shards=2)
    convert.convert(source, tmp_path / "target")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [[sys.executable, "-c", HOST, source, tmp_path / "target", str(port), str(i)] for i in range(2)]
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    processes = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    texts = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts[0][1][-3000:]
    hosts = [json.loads(out.splitlines()[-1]) for out, _ in texts]
    assert hosts[0]["weights"] == hosts[1]["weights"]
    for name, size in (
        ("embed", 64),
        ("layers.0.attention.q", 8),
        ("layers.1.mlp.gate", 48),
        ("layers.1.mlp.down", 48),
    ):
        step = size // 8
        for number, host in enumerate(hosts):
            mine = sorted(lines[1:] for lines in host["reads"] if lines[0] == name)
            assert mine == [[i * step, (i + 1) * step] for i in range(4 * number, 4 * number + 4)]
