"""Asks a worker, in a process with a compiler's settings, and waits no longer than is allowed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from clusterkv_jax.planning.plan_types import Measures, PlanRequest
from clusterkv_jax.planning.topology import Topology, parse_topology

WORKER = ("-m", "clusterkv_jax.planning.worker")


def ask(question: PlanRequest, seconds: float, progress: Callable[[str], None]) -> Measures:
    """The measures of a question.

    Raises ValueError, in one sentence, for what cannot be planned, where libtpu is missing, and after `seconds`.
    """
    topology = parse_topology(question.topology)
    if topology.chip.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"Programs for {topology.name} are compiled with libtpu, which is not installed: "
            "pip install 'clusterkv-jax[plan]'."
        )
    late = threading.Event()
    command, streams = [sys.executable, *WORKER], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, stderr=log, env=os.environ | environment(topology), **streams) as process:
            timer = threading.Timer(seconds, lambda: (late.set(), process.kill()))
            timer.start()
            try:
                return _answer(process, question, progress)
            except EOFError:
                pass
            finally:
                timer.cancel()
                process.kill()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()] or ["it said nothing"]
    if late.is_set():
        raise ValueError(
            f"Compiling for {topology.name} took longer than {seconds:g} s; a larger --time-limit allows more."
        )
    raise ValueError(f"Compiling for {topology.name} ended without a result: {_cause(lines)}.")


def _cause(lines: list[str]) -> str:
    """What a compiler that aborts says first of it, or the last that any process says."""
    fatal = (found[1] for line in lines if (found := re.match(r"F\d{4} .*?\] (.*)", line)))
    return next(fatal, lines[-1])[-300:].rstrip(".")


def environment(topology: Topology) -> dict[str, str]:
    """What a worker's compiler reads: for GPUs, as many devices of the CPU."""
    settings = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if topology.chip.platform == "gpu":
        settings["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={topology.count}"
    return settings


def _answer(process: Any, question: PlanRequest, progress: Callable[[str], None]) -> Measures:
    """What the worker says. Raises EOFError where it ends before, ValueError for what it refuses."""
    try:
        process.stdin.write(msgspec.json.encode(question).decode())
        process.stdin.close()
    except BrokenPipeError:
        raise EOFError from None  # it has ended before it listened
    for line in process.stdout:
        message = json.loads(line) if line.startswith("{") else {}
        if "progress" in message:
            progress(message["progress"])
        if "error" in message:
            raise ValueError(message["error"])
        if "measures" in message:
            return msgspec.convert(message["measures"], Measures)
    raise EOFError
