"""What the benchmarks share: Llama-3.1-8B's shapes, how a call is timed, and which device it was."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from clusterkv_jax.models.config import Llama3Scaling, ModelConfig, Rope

# Without end tokens: random weights would stop anywhere.
LLAMA = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131072,
    rope=Rope(5e5, 128, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    dtype="bfloat16",
)
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
