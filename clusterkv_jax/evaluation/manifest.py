"""What a run was made with: the command, the versions, the device, the checkpoint."""

import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("clusterkv-jax", "jax", "jaxlib", "numpy", "transformers", "tokenizers")


def about() -> dict[str, Any]:
    """The command, when and where it ran, and the versions of what it ran with."""
    return {
        "command": shlex.join(["clusterkv", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
        "commit": _commit(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-changed" if changed.stdout.strip() else "")
