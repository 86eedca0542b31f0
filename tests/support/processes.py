"""Programs in processes of their own."""

import importlib.util
import json
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest


def python(*arguments: Any, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Python with these arguments; the test fails with its errors if it does."""
    process = _python(*arguments, timeout=timeout, **options)
    assert process.returncode == 0, _end(process)
    return process


def compiled(script: Path, *arguments: Any, timeout: float = 600) -> Any:
    """What a script that compiles for an accelerator prints last, as JSON.

    Such a compiler is not ours, and it can die of a signal: that of GPU programs did now and then on a busy host, in a
    thread of its own. The script is then started once more, twice at most, with a warning. An error of its own fails
    the test at once.
    """
    process = _python(script, *arguments, timeout=timeout)
    for _ in range(2):
        if process.returncode < 0:
            warnings.warn(f"{script.name} is started once more: {_end(process)}", stacklevel=2)
            process = _python(script, *arguments, timeout=timeout)
    assert process.returncode == 0, _end(process)
    return json.loads(process.stdout.splitlines()[-1])


def compiled_for_a_gpu(script: Path, *arguments: Any) -> Any:
    """The same of a script that compiles for a GPU: without the compiler for it the test is skipped."""
    missing = [name for name in ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc") if not _is_installed(name)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (extra `compile`)")
    # Some minutes on two cores; a slow machine that runs other tests beside needs more than ten.
    return compiled(script, *arguments, timeout=1800)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _python(*arguments: Any, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """One that prints where each of its threads is when a signal ends it."""
    command = [sys.executable, "-X", "faulthandler", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, **options)


def _end(process: subprocess.CompletedProcess[str]) -> str:
    code = process.returncode
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"{how}\n{process.stderr[-6000:]}"
