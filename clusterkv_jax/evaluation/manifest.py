"""What a run was made with: the command, the versions, the device, the checkpoint."""

import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from clusterkv_jax.runtime.extras import versions

_PACKAGES = ("clusterkv-jax", "jax", "jaxlib", "numpy", "transformers", "tokenizers")


def about(mesh: str | None = None, hosts: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The command, when and where it ran, and the versions of what it ran with; each process, where there are several.

    Args:
        mesh: as the command was told.
        hosts: names by process, of a job of several processes.
    """
    together = {} if hosts is None else {"processes": [_process(*each) for each in hosts.items()]}
    return {
        "command": shlex.join(["clusterkv", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"python": platform.python_version(), **versions(_PACKAGES)},
        "commit": _commit(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        **({} if mesh is None else {"mesh": mesh}),
        **together,
    }


def _process(number: int, host: str) -> dict[str, Any]:
    """A process by its number, host and devices."""
    devices = [device for device in jax.devices() if device.process_index == number]
    return {"process": number, "host": host, "devices": len(devices), "kind": devices[0].device_kind}


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-changed" if changed.stdout.strip() else "")
