"""Times reading and decoding over several devices, by mesh, method and compiler options; random weights.

    python scripts/benchmarks/benchmark_mesh.py --mesh one --mesh model=2 --method full --method centroidkv

"one" is a single device. Each line is a mesh, a method, a batch and a variant of the decode program: the time to read
a prompt, the time of a decode step, the share of tokens that are those of the first mesh, and the bytes of weights and
cache on a device beside the most that it ever held. A batch has copies of the prompt's cache. Weights are born on their
devices, so that a model need not fit one of them. In float32 tokens should be the same on every mesh:

    python scripts/benchmarks/benchmark_mesh.py --model demo --dtype float32 --tokens 4096

A model of random weights repeats itself sooner or later. Keys that repeat are equally alike up to rounding, so a method
that matches keys may then merge other ones on another mesh. Fewer steps end before that.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_common import environment, timed

import clusterkv_jax as ckv
from clusterkv_jax.benchmark.own_runner import random_params
from clusterkv_jax.cache.layers import take_sequences
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.kernels.quantised import CODES
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.presets import list_presets, preset
from clusterkv_jax.runtime.sharding import fitted_mesh, named_mesh

CALLS = 4  # of the decode program; the first is not counted
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES"
# All-reduces by NCCL, which graphs can hold; from jax 0.11 on.
NCCL_GRAPHS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": GRAPHS,
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_collectives_command_buffer_filter": "ALLREDUCE",
    "xla_gpu_experimental_use_collective_kernels": "",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "graphs": {"xla_gpu_enable_command_buffer": GRAPHS, "xla_gpu_graph_min_graph_size": 1},
    "one-shot": {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True},
    "both": {
        "xla_gpu_enable_command_buffer": GRAPHS,
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True,
    },
    "nccl-graphs": NCCL_GRAPHS,
    "nccl-buffers": NCCL_GRAPHS | {"xla_gpu_enable_nccl_user_buffers": True},  # registered with NCCL
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="'demo', a packaged shape, or a folder of config.json")
    parser.add_argument("--mesh", action="append", help="'one' or such as model=2; repeat it", default=None)
    parser.add_argument("--method", action="append", help="a preset; repeat it", default=None)
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the rows for presets that take one")
    parser.add_argument("--cache-dtype", choices=CODES, help="how rows are stored [as the model's numbers]")
    parser.add_argument(
        "--variant", action="append", choices=VARIANTS, help="of the decode program; repeat it", default=None
    )
    parser.add_argument("--tokens", type=int, default=65536, help="of the prompt")
    parser.add_argument("--steps", type=int, default=128, help="of each of 4 calls of the decode program [%(default)s]")
    parser.add_argument("--layers", type=int, help="of the model, the first ones [all]")
    parser.add_argument("--batch", type=int, action="append", help="sequences; repeat it [1]", default=None)
    parser.add_argument("--repeats", type=int, default=2, help="of reading the prompt, beside the first")
    parser.add_argument("--progress", action="store_true", help="say when each layer is read, which waits for it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", help="folder for a profile of each variant's last call", default=None)
    options = parser.parse_args()
    print(f"{environment()}, {options.model}, {options.tokens} tokens\n")
    print("| mesh | method | batch | variant | reading | step | same tokens | weights | cache | most held |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    tokens_of_first: dict[Any, np.ndarray] = {}
    for text in options.mesh or ["one", "model=2"]:
        benchmark(text, options, tokens_of_first)


def benchmark(text: str, options: argparse.Namespace, tokens_of_first: dict[Any, np.ndarray]) -> None:
    """All lines of a mesh."""
    config = model_config(options.model)
    positions = options.tokens + reserve(options)  # random weights are given as many as are asked for
    config = replace(
        config, num_layers=options.layers or config.num_layers, max_positions=max(config.max_positions, positions)
    )
    whole = named_mesh("model=1", jax.devices()[:1]) if text == "one" else named_mesh(text)
    mesh = fitted_mesh(whole, config.num_kv_heads)
    params = random_params(config, jnp.dtype(options.dtype), mesh)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, options.tokens)).astype(np.int32)
    for name in options.method or ["full", "centroidkv"]:
        budget = ckv.Budget(ratio=options.ratio) if list_presets()[name].takes_budget else None
        method = preset(name, budget, cache_dtype=options.cache_dtype)
        scope = contextlib.nullcontext() if text == "one" else jax.set_mesh(mesh)
        with scope:
            for line in lines(config, params, method, tokens, options, tokens_of_first):
                print(f"| {text} | {name} | {line} |", flush=True)


def lines(
    config: ModelConfig,
    params: Params,
    method: Any,
    tokens: np.ndarray,
    options: argparse.Namespace,
    tokens_of_first: dict[Any, np.ndarray],
) -> Any:
    """A line for each batch and variant of the decode program."""
    width = tokens.shape[1]

    def read() -> Any:
        on_layer = layers_read(config.num_layers) if options.progress else None
        return ckv.prefill(
            params, config, method, tokens, np.full(1, width), max_new_tokens=reserve(options), on_layer=on_layer
        )

    seconds = []
    for _ in range(1 + options.repeats):
        cache: Any = None  # the one before it goes first
        took, (cache, _) = timed(read)
        seconds.append(took)
    reading = f"{statistics.median(seconds[1:] or seconds):.3f} s"
    batches = options.batch or [1]
    for number, batch in enumerate(batches):
        alone = batch == 1 and number + 1 == len(batches)  # then no copy is held beside it
        copies = cache if alone else take_sequences(cache, jnp.zeros(batch, jnp.int32))
        state = DecodeState(copies, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool))
        held = f"{on_device(params) / 2**30:.2f} GiB | {on_device(copies.layers) / 2**30:.3f} GiB"
        del copies
        for name, step, new in steps(config, params, method, state, options):
            same = (
                "" if new is None else f"{(new == tokens_of_first.setdefault((method, batch, name), new)).mean():.1%}"
            )
            yield f"{batch} | {name} | {reading} | {step} | {same} | {held} | {most_held()}"


def layers_read(count: int) -> Callable[[int, jax.Array], None]:
    """A line for each layer of so many."""
    begin = time.perf_counter()

    def on_layer(number: int, hidden: jax.Array) -> None:
        jax.block_until_ready(hidden)
        took = time.perf_counter() - begin
        left = took / (number + 1) * (count - number - 1)
        print(f"layer {number + 1} of {count}: {took:.0f} s, {left:.0f} s left", file=sys.stderr, flush=True)

    return on_layer


def steps(config: ModelConfig, params: Params, method: Any, state: DecodeState, options: argparse.Namespace) -> Any:
    """The name of each variant, the time of a step with it, and the tokens; None where the compiler refuses it."""
    for name in options.variant or ["default"]:
        numbers = jax.random.key(0), jnp.int32(1), jnp.int32(options.steps)
        lowered = decode_loop.lower(
            params, config, method, state, *numbers, sampling=ckv.Sampling(), eos_ids=(), steps=options.steps
        )
        try:
            program = lowered.compile(compiler_options=VARIANTS[name] if jax.default_backend() == "gpu" else {})
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # options come and go with compilers
            yield name, f"refused: {str(error).splitlines()[0]}", None
            continue
        times, tokens = [], []
        for call in range(CALLS):
            last = options.profile is not None and call == CALLS - 1
            with jax.profiler.trace(f"{options.profile}/{name}") if last else contextlib.nullcontext():
                took, (state, new, _) = timed(partial(program, params, state, *numbers))
            times.append(took / options.steps)
            tokens.append(np.asarray(new))
        yield name, f"{statistics.median(times[1:]) * 1e3:.3f} ms", np.concatenate(tokens, axis=1)


def reserve(options: argparse.Namespace) -> int:
    """Tokens that all variants decode, one after the other."""
    return CALLS * options.steps * len(options.variant or ["default"])


def on_device(tree: Any) -> int:
    """Bytes of arrays on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def most_held() -> str:
    """The most bytes that a device ever held, where it says so."""
    stats = jax.devices()[0].memory_stats() or {}
    return f"{stats['peak_bytes_in_use'] / 2**30:.2f} GiB" if "peak_bytes_in_use" in stats else "unknown"


if __name__ == "__main__":
    main()
