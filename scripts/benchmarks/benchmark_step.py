"""Times decode steps of a model's shapes against the floor of the bytes that they read, and says where the time goes.

    python scripts/benchmarks/benchmark_step.py                                          Llama-3.1-8B, 32k tokens
    python scripts/benchmarks/benchmark_step.py --model qwen3-30b-a3b --tokens 16384 --batch 1 --batch 16 --profile
    python scripts/benchmarks/benchmark_step.py --method centroidkv --weights int4                       in codes

Weights are random. The prompt is read once for each method; a batch has copies of its cache and other last tokens. A
step reads all weights and the cache; of experts it reads those that are chosen, by chance as many as even routing
gives. The bandwidth is that of the same run. `--profile` lists launches and microseconds a step by kernel.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_common import environment, kernel_times, timed

import clusterkv_jax as ckv
from clusterkv_jax.benchmark.own_runner import device_bytes, random_params, read_bandwidth
from clusterkv_jax.cache.layers import take_sequences
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.kernels.quantised import CODES
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.presets import list_presets, preset

SEGMENTS, PROFILED, LISTED = 4, 8, 20  # runs of `--steps`, of which the first compiles; steps of a profile; its lines
EXPERTS = ("gate", "up", "down")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="'demo', a packaged shape, or a folder of config.json")
    parser.add_argument("--method", action="append", help="a preset; repeat it [full, centroidkv]", default=None)
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the rows for presets that take one")
    spread = "spread rows over heads as random shares, whose logarithms have this standard deviation [evenly]"
    parser.add_argument("--spread", type=float, help=spread)
    parser.add_argument("--cache-dtype", choices=CODES, help="how rows are stored [as the model's numbers]")
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt")
    parser.add_argument("--batch", type=int, action="append", help="sequences; repeat it [1]", default=None)
    parser.add_argument("--steps", type=int, default=128, help="of a run")
    parser.add_argument("--repeats", type=int, default=2, help="of reading the prompt, beside the first")
    parser.add_argument("--dtype", default="bfloat16")
    held = "products in codes, a head in int8; mxfp4 is experts alone, as gpt-oss stores them [as numbers]"
    parser.add_argument("--weights", choices=["int8", "int4", "mxfp4"], help=held)
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    options = parser.parse_args()
    config = replace(model_config(options.model), eos_ids=())
    params = random_params(config, jnp.dtype(options.dtype), weights=options.weights)
    held, bandwidth = options.weights or options.dtype, read_bandwidth()
    print(f"{environment()}, {options.model}, {held}, {options.tokens} tokens, {bandwidth / 1e12:.2f} TB/s read\n")
    print("| method | batch | reading | step | floor | |\n|---|---|---|---|---|---|", flush=True)
    for name in options.method or ["full", "centroidkv"]:
        budget = ckv.Budget(ratio=options.ratio, shares=shares(config, options.spread))
        budget = budget if list_presets()[name].takes_budget else None
        method = preset(name, budget, cache_dtype=options.cache_dtype)
        seconds, cache = read(params, config, method, options)
        for batch in options.batch or [1]:
            run, size = steps(params, config, method, cache, batch, options)
            floor = (read_weights(params, config, batch) + size) / bandwidth
            times = [timed(run)[0] / options.steps for _ in range(SEGMENTS)]
            step = statistics.median(times[1:])
            took = f"{seconds:.3f} s | {step * 1e3:.3f} ms | {floor * 1e3:.3f} ms | {step / floor:.2f} ×"
            print(f"| {name} | {batch} | {took} |", flush=True)
            if options.profile:
                print_kernels(partial(run, PROFILED))


def shares(config: ModelConfig, spread: float | None) -> Any:
    """Random parts of the budget for every head, as a calibration measures them; None is evenly."""
    if spread is None:
        return None
    sizes = len(config.global_layers), config.num_kv_heads
    return tuple(map(tuple, np.exp(spread * np.random.default_rng(0).standard_normal(sizes)).tolist()))


def read(params: Params, config: ModelConfig, method: Any, options: argparse.Namespace) -> tuple[float, ckv.KVCache]:
    """Seconds of reading the prompt, the first time left out, and its cache."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, options.tokens)).astype(np.int32)
    room = (SEGMENTS + 1) * options.steps
    run = partial(ckv.prefill, params, config, method, tokens, np.full(1, options.tokens), max_new_tokens=room)
    times = []
    for _ in range(1 + options.repeats):
        cache: Any = None  # the one before it goes first
        took, (cache, _) = timed(run)
        times.append(took)
    return statistics.median(times[1:] or times), cache


def steps(
    params: Params, config: ModelConfig, method: Any, cache: ckv.KVCache, batch: int, options: argparse.Namespace
) -> tuple[Callable[..., Any], int]:
    """What decodes `--steps` more tokens of a batch at each call, or fewer; and the bytes of its cache."""
    cache = take_sequences(cache, jnp.zeros(batch, jnp.int32))
    first = 97 * jnp.arange(batch, dtype=jnp.int32) % config.vocab_size
    size, states = device_bytes((cache.layers, cache.state)), [DecodeState(cache, first, jnp.zeros(batch, bool))]
    fixed: dict[str, Any] = {"sampling": ckv.Sampling(), "eos_ids": (), "steps": options.steps}

    key = jax.random.key(0)

    def run(count: int = options.steps) -> Any:
        numbers = key, np.asarray(1, np.int32), np.asarray(count, np.int32)  # on the host, as those of `generate`
        state, tokens, _ = decode_loop(params, config, method, states.pop(), *numbers, **fixed)
        states.append(state)
        return tokens

    return run, size


def read_weights(params: Params, config: ModelConfig, batch: int) -> float:
    """Bytes of weights that a step reads."""
    read = {name: part for name, part in params.items() if name != "embed" or config.tie_embeddings}
    experts = [layer["experts"][name] for layer in params["layers"] if "experts" in layer for name in EXPERTS]
    if config.experts is None:
        return device_bytes(read)
    left_out = (1 - config.experts.per_token / config.experts.count) ** batch
    return device_bytes(read) - left_out * device_bytes(experts)


def print_kernels(run: Callable[[], Any]) -> None:
    """Launches and microseconds of a step, by kernel."""
    times = kernel_times(run)
    total, launches = (sum(map(of, times.values())) / PROFILED for of in (sum, len))
    print(
        f"\n{total:.0f} µs in {launches:.0f} launches a step\n\n| kernel | launches | µs | µs each |\n|---|---|---|---|"
    )
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:LISTED]:
        print(f"| {name} | {len(each) / PROFILED:.1f} | {sum(each) / PROFILED:.1f} | {sum(each) / len(each):.2f} |")
    print(flush=True)


if __name__ == "__main__":
    main()
