"""A job of several processes: `clusterkv evaluate --distributed` with answers that need no model.

    python -m tests.support.job OUTPUT ADDRESS COUNT INDEX TIMEOUT [BUCKET]

runs 60 examples of unequal lengths, each of which takes some hundredths of a second; its answer depends on the prompt
alone. BUCKET is the folder that gs://my-bucket shows.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = 60
# What `evaluated` asks of `small_model`.
ASKED = ["evaluate", "--suite", "ruler", "--tasks", "vt", "--lengths", "500,600", "--limit", "4"]
ASKED += ["--methods", "snapkv", "--budgets", "0.5", "--batch-size", "2"]
# Fake devices and quick compilation, as in the tests themselves.
FLAGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class Job:
    """The processes of one command in a folder; `command(folder, address, count, index)` are its arguments."""

    def __init__(self, folder: Path, command: Callable[..., Sequence[Any]], devices: int = 1) -> None:
        self.folder, self.command, self.devices = folder, command, devices
        self.processes: list[subprocess.Popen[bytes]] = []
        self.said: list[Path] = []

    def start(self, count: int, **more: Any) -> None:
        """Starts the processes, with more in their environment."""
        self.stop()
        address = f"localhost:{free_port()}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self.devices}"
        environment = {**os.environ, **FLAGS, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
        environment |= {name: str(value) for name, value in more.items()}
        self.processes, self.said = [], []
        for index in range(count):
            self.said.append(self.folder.with_name(f"{self.folder.name}-said-{index}.txt"))
            with self.said[-1].open("w") as said:
                command = [sys.executable, *map(str, self.command(self.folder, address, count, index))]
                process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
                self.processes.append(process)

    def wait_for(self, lines: int, seconds: float = 120) -> None:
        """Until the results have so many lines."""
        file, end = self.folder / "results.jsonl", time.monotonic() + seconds
        while not file.exists() or file.read_bytes().count(b"\n") < lines:
            assert time.monotonic() < end, self.stop()
            assert all(process.poll() is None for process in self.processes), self.stop()
            time.sleep(0.01)

    def signal(self, number: int, *which: int) -> None:
        """A signal for some of the processes, for all by default."""
        for index in which or range(len(self.processes)):
            self.processes[index].send_signal(number)

    def ends(self, *which: int, seconds: float = 120) -> list[tuple[int, str]]:
        """Exit codes of some processes, all by default, and what they said."""
        ends = []
        for index in which or range(len(self.processes)):
            code = self.processes[index].wait(timeout=seconds)
            ends.append((code, self.said[index].read_text(errors="replace")))
        return ends

    def stop(self) -> str:
        """Kills what is left; what all of them said."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        return "\n".join(said for _, said in self.ends(seconds=10) if said)

    def answers(self) -> list[dict[str, Any]]:
        """The lines of the results without their times."""
        return answers(self.folder)


def answers(folder: Path) -> list[dict[str, Any]]:
    """The lines of a folder's results without their times."""
    lines = map(json.loads, (folder / "results.jsonl").read_text(encoding="utf-8").splitlines())
    return [{**line, "seconds": 0} for line in lines]


def small_model(folder: Path) -> Path:
    """A model of one layer in a folder, with random weights and the demo model's tokenizer."""
    import jax

    from clusterkv_jax.checkpoints import loading
    from clusterkv_jax.models import parameters, registry

    demo = ROOT / "models" / "demo"
    published = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    config = registry.from_hf(published | small)
    params = parameters.init(jax.random.key(0), config)
    loading.save_huggingface(folder, params, config, tokenizer_json=demo / "tokenizer.json", dtype="float32")
    return folder


def evaluated(model: Path | str, folder: Path | str, *more: str) -> str:
    """`clusterkv evaluate` of a few examples in this process; what it said."""
    from typer.testing import CliRunner

    from clusterkv_jax import cli

    result = CliRunner().invoke(cli.app, [*ASKED, "--model", str(model), "--output", str(folder), *more])
    assert result.exit_code == 0, result.output
    return result.output


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def stub(folder: Path, address: str, count: int, index: int, *, timeout: float = 5, **_: Any) -> list[Any]:
    """Arguments of Python for this module."""
    return ["-m", "tests.support.job", folder, address, count, index, timeout]


def main(output: str, address: str, count: str, index: str, timeout: str, cloud: str = "") -> None:
    """One process of the job."""
    import jax

    from clusterkv_jax.cli.distributed_run import answered, joined, serve
    from clusterkv_jax.evaluation import batching, manifest, outputs, replicas
    from clusterkv_jax.evaluation.responses import Response
    from clusterkv_jax.evaluation.settings import settings
    from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
    from clusterkv_jax.methods import Full
    from tests.support import runs

    def respond(method: Any, prompts: Sequence[EncodedPrompt], new: int, stop: Sequence[str]) -> list[Response]:
        time.sleep(sum(len(prompt.context) for prompt in prompts) / 2000)
        return [Response(str(sum(prompt.context) % 7), rows=len(prompt.context)) for prompt in prompts]

    lengths = [20 + 37 * i % 180 for i in range(EXAMPLES)]
    jobs = [
        batching.Job(i, Case(f"t/{i}", f"t{i % 3}", answers=("3",)), EncodedPrompt(tuple(range(i, i + length))))
        for i, length in enumerate(lengths)
    ]
    entries = [batching.MethodEntry("full", "1.0", Full())]
    config = settings({"suite": "stub", "model": "stub"}, jobs, entries)
    batches = batching.plan(jobs, entries, 2)
    with ExitStack() as stack:
        if cloud:
            from tests.support.buckets import bucket

            stack.enter_context(bucket(Path(cloud), "my-bucket"))
        results = outputs.at(output)
        peers = stack.enter_context(
            joined(count != "0", results, address, int(count), int(index), float(timeout), False)
        )
        everywhere = replicas.replicas(None)
        process = 0 if peers is None else peers.index
        here = [(replica, runs.in_turn(respond)) for replica in everywhere if process in replica.processes]
        team = replicas.ReplicaGroup(everywhere, here, process)
        assert jax.process_count() == int(count)
        if process == 0:
            stack.enter_context(results.opened())
            answered(results, config, manifest.about(), batches, team, peers, lambda lines, tokens: None)
            results.complete()
        else:
            assert peers is not None
            serve(config, batches, team, peers)


if __name__ == "__main__":
    main(*sys.argv[1:])
