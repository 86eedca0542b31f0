"""Block sizes measured on a kind of device, as JSON in the op's folder.

`kernels/<op>/<device kind>.json` ("NVIDIA H200" -> nvidia_h200.json) lists what was measured, best match first:

    [{"where": {"dim": 128, "slots": [0, 16384]}, "blocks": {"block": 128, "warps": 4}}, ...]

A number or string in `where` must be equal, a pair is a range with both ends. A device without a file of its own takes
that of one with the same multiprocessors.
"""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from clusterkv_jax.runtime.dispatch import device_kind

# Kinds of devices by a part of their names, and whose sizes they take.
ALIKE = {"H100": "NVIDIA H200", "H800": "NVIDIA H200", "GH200": "NVIDIA H200"}

log = logging.getLogger(__name__)


def blocks(op: str, **shape: int | str) -> dict[str, int]:
    """Measured block sizes of `op` for this shape on the device that is compiled for.

    Empty where nothing was measured: the kernel then takes what it computes itself, and one line of the log says so.

    Raises:
        ValueError: if an entry names a property that `shape` lacks.
    """
    return dict(_blocks(op, device_kind(), tuple(sorted(shape.items()))))


def file(op: str, device: str) -> Path:
    """Where the measured block sizes of an op on a kind of device stand."""
    return Path(__file__).parent / op / f"{device.lower().replace(' ', '_')}.json"


def forget() -> None:
    """Read the files anew: they changed."""
    _blocks.cache_clear()


@cache
def _blocks(op: str, device: str, shape: tuple[tuple[str, int | str], ...]) -> dict[str, int]:
    path, sizes = file(op, device), dict(shape)
    if not path.exists():
        path = next((file(op, other) for part, other in ALIKE.items() if part in device), path)
    for entry in json.loads(path.read_text()) if path.exists() else []:
        if unknown := entry["where"].keys() - sizes.keys():
            raise ValueError(f"{path.name} of {op} names {', '.join(sorted(unknown))}; allowed: {', '.join(sizes)}.")
        if all(_fits(sizes[name], limit) for name, limit in entry["where"].items()):
            return entry["blocks"]
    log.info("%s has no measured block sizes on %s for %s", op, device, sizes)
    return {}


def _fits(value: Any, limit: Any) -> bool:
    return limit[0] <= value <= limit[1] if isinstance(limit, list) else value == limit
