"""What the benchmarks share: Llama-3.1-8B's shapes, how a call is timed, and which device it was."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
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


def environment() -> str:
    """The version of jax and the device, for the first line of a report."""
    return f"jax {jax.__version__}, {jax.devices()[0].device_kind}"
