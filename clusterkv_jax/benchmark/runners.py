"""Sides of a benchmark as their parent sees them: processes that are asked for one timing after the other."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec

from clusterkv_jax.benchmark.grid import PEERS, Cell, GridRequest

WORKER = ("-m", "clusterkv_jax.benchmark.worker")


@dataclass(frozen=True)
class Runner:
    """A side that runs.

    Attributes:
        hello: what it says of itself, or `failed` and why it cannot.
        measure: a timing of a cell and repeat, or `failed` and why there is none; `ended` where its process is gone.
    """

    hello: dict[str, Any]
    measure: Callable[[Cell, int], dict[str, Any]]


def missing(side: str) -> str | None:
    """Why a peer cannot run here, in a sentence; None if it can."""
    for name in PEERS.get(side, ()):
        if importlib.util.find_spec(name) is None:
            return f"{side} is left out: the package {name!r} is not installed."
    return None


@contextmanager
def running(name: str, asked: GridRequest) -> Iterator[Runner]:
    """A side in a process of its own, which ends with the block."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen([sys.executable, *WORKER], stderr=log, **streams) as process,
    ):
        try:
            ask = partial(_exchange, process, log)
            hello = ask({"side": name, "asked": msgspec.to_builtins(asked)})
            yield Runner(hello, lambda cell, repeat: ask({"cell": asdict(cell), "repeat": repeat}))
        finally:
            process.kill()


def _exchange(process: Any, log: Any, message: dict[str, Any]) -> dict[str, Any]:
    """What a process answers; `failed` and the last that it said where it has ended."""
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if answer:
        return json.loads(answer)
    code = process.wait()
    log.seek(0)
    said = [line.strip() for line in log if line.strip()] or ["nothing"]
    return {"failed": f"its process ended with code {code} and said: {said[-1][-300:].rstrip('.')}.", "ended": True}
