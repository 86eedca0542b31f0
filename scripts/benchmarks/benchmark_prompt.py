"""Times prompts with compressed caches and with the full one in turns, and says what a method adds to a prompt.

    python scripts/benchmarks/benchmark_prompt.py                      CentroidKV and auto, 32k tokens, a fifth kept
    python scripts/benchmarks/benchmark_prompt.py --tokens 16384 --tokens 65536 --repeats 11 --profile
    python scripts/benchmarks/benchmark_prompt.py --reading gated --ratio .125 --tokens 131072 --repeats 3
    python scripts/benchmarks/benchmark_prompt.py --method kvzap --reading gated --ratio .125 --chunk 4096 --alone \
        --tokens 1048576 --cache-dtype int8 --repeats 0

Weights are random, of Llama-3.1-8B's shapes by default. A method that asks for a repetition has any ids for its words.
Gated, the peak is that of the whole run beyond the weights; `--alone` leaves the full cache out, which has another.
A device's clock drifts, so the methods take turns, and each call is also compared with the full cache's call of its
turn. On a GPU `--profile` lists kernels in microseconds a layer, beyond the full cache's prompt unless `--alone`.
"""

import argparse
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_common import environment, kernel_times, timed

import clusterkv_jax as ckv
from clusterkv_jax.benchmark.own_runner import random_params
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.generation.gated_reading import gated_prefill
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.presets import preset

FULL, NEW_TOKENS, LISTED = "full", 128, 40  # room behind a prompt; lines of a profile
WORDS = (tuple(range(8)), tuple(range(11)), (0,))  # what asks for a repetition, as long as Llama's tokenizer makes it


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="'demo', a packaged shape, or a folder of config.json")
    parser.add_argument("--method", action="append", help="a preset; repeat it [centroidkv, auto]", default=None)
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the rows that is kept")
    parser.add_argument("--tokens", type=int, action="append", help="of the prompt; repeat it [32768]", default=None)
    parser.add_argument("--repeats", type=int, default=9, help="calls of each method beside the first; 0 times that")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--reading", default="whole", choices=("whole", "gated"), help="of the methods' prompts")
    parser.add_argument("--window", type=int, default=4096, help="gated, the newest tokens that stay")
    parser.add_argument("--chunk", type=int, default=2048, help="gated, tokens that are read at once")
    parser.add_argument("--cache-dtype", default=None, help="of stored rows")
    parser.add_argument("--alone", action="store_true", help="leave the full cache out")
    parser.add_argument("--profile", action="store_true", help="list the kernels")
    options = parser.parse_args()
    if options.repeats < 0:
        parser.error(f"--repeats must be at least 0, got {options.repeats}")
    if options.profile and jax.default_backend() != "gpu":
        parser.error(f"--profile needs a GPU, not a {jax.default_backend()}")
    counts = options.tokens or [32768]
    config = replace(model_config(options.model), eos_ids=())
    config = replace(config, max_positions=max(config.max_positions, *counts))
    params = random_params(config, jnp.dtype(options.dtype))
    budget = ckv.Budget(ratio=options.ratio)
    methods = {
        name: preset(name, budget, cache_dtype=options.cache_dtype) for name in options.method or ["centroidkv", "auto"]
    }
    methods = {name: replace(x, instruction=WORDS) if hasattr(x, "instruction") else x for name, x in methods.items()}
    print(f"{environment()}, {options.model}, {options.ratio:.0%} kept, medians of {max(1, options.repeats)}\n")
    print("| tokens | method | ms | more than the full cache | the same, call by call |\n|---|---|---|---|---|")
    for count in counts:
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, count)).astype(np.int32)
        args, sizes = (tokens, np.full(1, count)), {"max_new_tokens": NEW_TOKENS}
        gated = partial(gated_prefill, gate=Gate(options.window, options.chunk))
        read = gated if options.reading == "gated" else ckv.prefill
        runs = {} if options.alone else {FULL: partial(ckv.prefill, params, config, ckv.Full(), *args, **sizes)}
        runs |= {name: partial(read, params, config, method, *args, **sizes) for name, method in methods.items()}
        print_times(count, in_turns(runs, options.repeats))
        print_peak(params)
        if options.profile:
            print_kernels(runs, config.num_layers)


def in_turns(runs: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call after the first, which compiles; of that one if there is no other."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + repeats):
        for name, run in runs.items():
            times[name].append(timed(run)[0])
    return {name: each[1:] or each for name, each in times.items()}


def print_times(tokens: int, times: dict[str, list[float]]) -> None:
    """A line for each method."""
    full = times.get(FULL, [])
    for name, each in times.items():
        if not full:
            print(f"| {tokens:,} | {name} | {statistics.median(each) * 1e3:.1f} | | |", flush=True)
            continue
        more = statistics.median(each) / statistics.median(full) - 1
        paired = statistics.median(one / other - 1 for one, other in zip(each, full, strict=True))
        against = "| |" if name == FULL else f"| {more:.2%} | {paired:.2%} |"
        print(f"| {tokens:,} | {name} | {statistics.median(each) * 1e3:.1f} {against}", flush=True)


def print_peak(params: Any) -> None:
    """The most memory that was ever in use beside the weights, where the device tells."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        print(f"\npeak {(stats['peak_bytes_in_use'] - weights) / 2**30:.2f} GiB beyond the weights\n", flush=True)


def print_kernels(runs: dict[str, Any], layers: int) -> None:
    """Microseconds and launches a layer by kernel, beyond those of the full cache where it has run."""
    times = {name: kernel_times(run) for name, run in runs.items()}
    full = times.pop(FULL, {})
    for name, mine in times.items():
        both = {kernel: (mine.get(kernel, []), full.get(kernel, [])) for kernel in {*mine, *full}}
        more = {kernel: (sum(mine) - sum(full)) / layers for kernel, (mine, full) in both.items()}
        print(f"\n{name}, kernels{' beyond the full cache' if full else ''}: {sum(more.values()):.0f} µs a layer\n")
        print("| kernel | µs | launches |\n|---|---|---|")
        for kernel, took in sorted(more.items(), key=lambda item: -abs(item[1]))[:LISTED]:
            launches = (len(both[kernel][0]) - len(both[kernel][1])) / layers
            print(f"| {kernel} | {took:.1f} | {launches:.1f} |")
    print(flush=True)


if __name__ == "__main__":
    main()
