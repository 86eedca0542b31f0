"""What the benchmarks share: Llama-3.1-8B's shapes, how a call is timed, and which device it was."""

import gzip
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from clusterkv_jax.planning.shapes import model_config

# Without end tokens: random weights would stop anywhere.
LLAMA = replace(model_config("llama-3.1-8b"), eos_ids=())
WARM_UP, REPEATS = 3, 20  # calls before those that count, and those


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the result of `run` is there, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - start, result


def median_seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median time of `run` after a warm-up."""
    return statistics.median([timed(run)[0] for _ in range(WARM_UP + repeats)][WARM_UP:])


def kernel_times(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds of every launch of `run` on a GPU, by kernel; names without the numbers at their ends."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        files = list(Path(folder).rglob("*.trace.json.gz"))
        events = [event for file in files for event in _on_streams(json.loads(gzip.decompress(file.read_bytes())))]
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(re.sub(r"[\d_.]+$", "", event["name"]), []).append(event["dur"])
    return times


def _on_streams(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What ran on the streams of a GPU; nothing of other devices."""
    named = [event for event in trace["traceEvents"] if event.get("ph") == "M" and "name" in event.get("args", {})]
    devices = {event["pid"] for event in named if "GPU" in event["args"]["name"]}
    streams = {(event["pid"], event.get("tid")) for event in named if "Stream" in event["args"]["name"]}
    ran = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event["pid"] in devices]
    return [event for event in ran if (event["pid"], event["tid"]) in streams]


def environment() -> str:
    """The version of jax and the device, for the first line of a report."""
    return f"jax {jax.__version__}, {jax.devices()[0].device_kind}"
