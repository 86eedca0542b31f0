"""Calls into what a model's files say: panics become errors, and what may never return runs in a process of its own."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The process that is waiting for work, if one is; transformers takes a second to import, so it is kept.
_idle: list[subprocess.Popen[str]] = []
_lock = threading.Lock()
_ENDS = {"SIGXCPU": "It takes too long.", "SIGKILL": "It takes too much memory."}


@contextmanager
def advice_silenced() -> Iterator[None]:
    """transformers announces on import that it found no torch: here that is as it should be."""
    advice = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        yield
    finally:
        if advice is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = advice


@contextmanager
def panics_caught() -> Iterator[None]:
    """A panic of a library in Rust, which is no Exception, as a ValueError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from error


def ask(kind: str, **arguments: Any) -> Any:
    """What the process of `child` answers to a job. Raises ValueError for its error, and beyond limits."""
    job = json.dumps([kind, arguments], default=str)
    with _lock:
        process = _idle.pop() if _idle else _start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(job + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # interrupted: what it answers later would be taken for the answer to the next job
            _end(process)
            raise
        if not line.endswith("\n"):  # it has ended, or is about to
            with process:
                code = process.wait()
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ValueError(_ENDS.get(name, f"It takes too much memory, or makes a library fail ({name})."))
        _idle.append(process)
    reply = json.loads(line)
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["answer"]


def _start() -> subprocess.Popen[str]:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    quiet = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "clusterkv_jax.text.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **quiet, "PYTHONPATH": paths},
        encoding="ascii",
    )


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _end(_idle.pop())
