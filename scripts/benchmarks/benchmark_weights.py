"""Checks and times products of few rows with weights in codes beside those in bfloat16, on a GPU; random weights.

    python scripts/benchmarks/benchmark_weights.py                             Llama-3.1-8B, int8 and int4
    python scripts/benchmarks/benchmark_weights.py --kind mxfp4 --product down --as-is

A line is a product, its rows and what was changed of the library's sizes: microseconds of a launch and those behind it,
TB/s of codes and scales, and their share of what a read reaches in the same run. A program launches a product again and
again, with weights that no launch before has brought into the caches, so that what lies between launches counts. Each
line is compared with the definition; the exit status is 1 where one is off. Programs are compiled side by side.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from benchmark_common import environment, timed

from clusterkv_jax.benchmark.own_runner import device_bytes, read_bandwidth
from clusterkv_jax.kernels.quantised_linear import pallas_gpu
from clusterkv_jax.kernels.row_products import pallas_gpu as rows_gpu
from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights, dequantised
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.planning.shapes import model_config

GROUPS = {"int4": 128, "fp8": 128, "mxfp4": 32}  # inputs that share a scale; of int8 all do
KINDS = ("int8", *GROUPS)
BYTES, LEAST, MOST = 600e6, 4, 64  # of the weights of a program's launches, and launches
PROGRAMS = range(120, 1200)  # of a launch, worth a try
# Timings, programs of each, one behind the other so that no launch waits for the host; relative errors of bfloat16.
RUNS, PROGRAMS_AT_ONCE, ALLOWED = 3, 3, 5e-3
TURNS = 3  # through all weights, of a program: the host takes some 10 µs a weight to start one
Sizes = dict[str, int]


@dataclass(frozen=True)
class Case:
    """A line of the table, and the program that is compiled for it."""

    name: str
    inputs: int
    outputs: int
    kind: str
    rows: int
    sizes: str
    program: Future[Any]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a packaged shape, or a folder of config.json")
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeat it [int8 int4]")
    parser.add_argument("--product", action="append", help="heads, out, gate, down or logits; repeat it [all]")
    parser.add_argument("--as-is", action="store_true", help="the library's sizes alone")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU; this is {environment()}.")
    shapes, kinds = products(model_config(options.model)), options.kind or ["int8", "int4"]
    if unknown := set(options.product or ()) - set(shapes):
        parser.error(f"--product {unknown.pop()} is none of {', '.join(shapes)}.")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cases = [
            case
            for name in options.product or shapes
            for case in compiling(pool, name, *shapes[name], kinds, options.as_is)
        ]
        wait([case.program for case in cases])  # what compiles beside a timing slows it down
        bandwidth = read_bandwidth()
        print(f"{environment()}, {options.model}, {bandwidth / 1e12:.2f} TB/s read\n")
        head = "| product | inputs | outputs | weights | rows | sizes | µs | TB/s | of a read | error |"
        print(f"{head}\n|---|---:|---:|---|---:|---|---:|---:|---:|---:|", flush=True)
        right = [line(case, bandwidth) for case in cases]
    sys.exit(not all(right))


def products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's products as they may be launched, and of the logits."""
    width, inner = config.hidden_size, config.intermediate_size
    return {
        "heads": (width, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
        "out": (config.num_heads * config.head_dim, width),
        "gate": (width, 2 * inner),
        "down": (inner, width),
        "logits": (width, config.vocab_size),
    }


def compiling(
    pool: ThreadPoolExecutor, name: str, inputs: int, outputs: int, kinds: list[str], as_is: bool
) -> list[Case]:
    """The lines of a product, weights of a kind behind each other."""
    cases = []
    for kind, rows in product(["bfloat16", *kinds], (1, 16)):
        tried = [{}, *([] if as_is or rows > 1 else candidates(outputs, kind))]
        launches: dict[str, Callable[..., Any]] = {
            " ".join(f"{key} {value}" for key, value in sizes.items()) or "the library's": partial(
                pallas_gpu.quantised_linear, sizes=sizes
            )
            for sizes in tried
        }
        if kind == "bfloat16":
            launches = {"XLA": _in_xla, "row_products": rows_gpu.row_products}
        of_line = kind, inputs, outputs, rows
        cases += [
            Case(name, inputs, outputs, kind, rows, sizes, pool.submit(program, *of_line, launch))
            for sizes, launch in launches.items()
        ]
    return cases


def candidates(outputs: int, kind: str) -> list[Sizes]:
    """Sizes worth a try."""
    splits = [{"splits": splits} for splits in (2, 4, 8, 16) if outputs // 128 * splits in PROGRAMS]
    blocks = [{"block": block, "warps": block // 32} for block in (64, 256)]
    steps = [{"step": 128, "stages": 3}, {"step": 128}, {"stages": 3}, {"stages": 6}]
    held = [{"held": 0}, {"held": 0, "step": 128, "stages": 2}, {"held": 16}] if kind in GROUPS else []
    return [*splits, *blocks, *steps, *held]


def program(kind: str, inputs: int, outputs: int, rows: int, launch: Callable[..., Any]) -> Any:
    """A product with many weights, one after the other, compiled."""
    spec = jax.eval_shape(partial(random_weights, kind, inputs, outputs), 0)
    x = jax.ShapeDtypeStruct((TURNS, rows, inputs), jnp.bfloat16)
    one = jax.jit(launch)

    def run(x: jax.Array, every: list[Any]) -> list[Any]:
        return [one(own, each) for own in x for each in every]

    return jax.jit(run).lower(x, [spec] * launches_of(spec)).compile()


def launches_of(weights: Any) -> int:
    """Launches of a program, whose weights exceed the caches together."""
    size = sum(math.prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(weights))
    return min(MOST, max(LEAST, math.ceil(BYTES / size)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def random_weights(kind: str, inputs: int, outputs: int, seed: Any) -> Any:
    """Weights of products near 1: numbers, or codes with offsets where a converter makes such."""
    keys = jax.random.split(jax.random.key(seed), 3)
    if kind == "bfloat16":
        return inputs**-0.5 * jax.random.normal(keys[0], (inputs, outputs), jnp.bfloat16)
    groups = inputs // GROUPS.get(kind, inputs)
    codes = jax.random.bits(keys[0], (inputs // 2 if kind in PACKED else inputs, outputs), jnp.uint8)
    if kind == "fp8":  # no NaN
        codes = jax.lax.bitcast_convert_type(codes & 0xBF, jnp.float8_e4m3fn)
    codes = jax.lax.bitcast_convert_type(codes, jnp.int8) if kind == "int8" else codes
    spread = jax.random.uniform(keys[1], (groups, outputs), minval=0.5, maxval=1.5) * inputs**-0.5
    scales = (spread / {"int8": 74, "int4": 4.6}.get(kind, 1)).astype(jnp.float16)
    if kind == "mxfp4":
        scales = jax.random.randint(keys[1], (groups, outputs), 119, 123).astype(jnp.uint8)
    offsets = scales * jax.random.normal(keys[2], scales.shape, jnp.float16) if kind == "int4" else None
    names: Any = {"kind": kind, "shape": (inputs, outputs), "names": ("model", "mlp")}
    return QuantisedWeights(codes, scales, offsets, **names)


@cache
def operands(kind: str, inputs: int, outputs: int, rows: int) -> tuple[jax.Array, list[Any], jax.Array]:
    """Rows, weights for each launch of a program, and what the first launch has to return."""
    x = jax.random.normal(jax.random.key(1), (TURNS, rows, inputs), jnp.bfloat16)
    first = random_weights(kind, inputs, outputs, 0)
    weights = [first, *(random_weights(kind, inputs, outputs, seed) for seed in range(1, launches_of(first)))]
    return x, weights, _definition(x[0], first)


@jax.jit
def _definition(x: jax.Array, weights: Any) -> jax.Array:
    return jnp.matmul(x.astype(jnp.float32), dequantised(weights), precision=jax.lax.Precision.HIGHEST)


def _in_xla(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.matmul(x, weights)


def line(case: Case, bandwidth: float) -> bool:
    """Print what a program takes; whether its first product is right."""
    start = f"| {case.name} | {case.inputs} | {case.outputs} | {case.kind} | {case.rows} | {case.sizes} |"
    try:
        run = case.program.result()
        x, weights, expected = operands(case.kind, case.inputs, case.outputs, case.rows)
        y = jax.tree.leaves(run(x, weights)[0])[0].astype(jnp.float32)
        error = float(jnp.max(jnp.linalg.norm(y - expected, axis=1) / jnp.linalg.norm(expected, axis=1)))
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as problem:
        print(f"{start} refused: {str(problem).splitlines()[0][:60]} | | | |", flush=True)
        return True
    times = [timed(lambda: [run(x, weights) for _ in range(PROGRAMS_AT_ONCE)])[0] for _ in range(RUNS)]
    seconds = min(times) / PROGRAMS_AT_ONCE / TURNS / len(weights)
    speed = device_bytes(weights[0]) / seconds
    took = f"{seconds * 1e6:.2f} | {speed / 1e12:.2f} | {speed / bandwidth:.0%} | {error:.1e}"
    print(f"{start} {took}{'' if error <= ALLOWED else ' WRONG'} |", flush=True)
    return error <= ALLOWED


if __name__ == "__main__":
    main()
