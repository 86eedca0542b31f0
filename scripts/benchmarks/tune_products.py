"""Times block sizes of the kernels that multiply few rows with large weights, on a GPU; random weights.

    python scripts/benchmarks/tune_products.py                  Llama-3.1-8B, and a device that has half of it
    python scripts/benchmarks/tune_products.py --ways 2 --rows 1 --product gate

A line is a product, its rows and its sizes: the median launch in a profile, and how fast it reads its weights. The
first line of a product has the sizes that the library takes. Each launch reads weights that no other one has brought
into the cache of the device. Sizes that do not fit are refused, and say so.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from benchmark_common import environment, kernel_times

from clusterkv_jax.kernels.head_products import pallas_gpu as heads_gpu
from clusterkv_jax.kernels.row_products import pallas_gpu as rows_gpu
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.planning.shapes import model_config

PRODUCTS = ("heads", "out", "gate", "down")
BYTES = 400e6  # of the weights of a product's launches: several times what a device's cache holds
Sizes = dict[str, int]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a packaged shape, or a folder of config.json")
    parser.add_argument("--ways", type=int, action="append", help="devices that share a product; repeat it [1 2]")
    parser.add_argument("--rows", type=int, action="append", help="tokens; repeat it [1 16]")
    parser.add_argument("--product", action="append", choices=PRODUCTS, help="repeat it [all]")
    parser.add_argument("--few", action="store_true", help="the library's sizes alone")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU; this is {environment()}.")
    print(f"{environment()}, {options.model}\n")
    print("| product | devices | rows | sizes | µs | TB/s |\n|---|---:|---:|---|---:|---:|", flush=True)
    config = model_config(options.model)
    for name, ways, rows in product(options.product or PRODUCTS, options.ways or [1, 2], options.rows or [1, 16]):
        for sizes in [{}, *([] if options.few else candidates(name, rows))]:
            print(f"| {name} | {ways} | {rows} | {line(config, name, ways, rows, sizes)} |", flush=True)


def line(config: ModelConfig, name: str, ways: int, rows: int, sizes: Sizes) -> str:
    """What these sizes take."""
    said = " ".join(f"{key} {value}" for key, value in sizes.items()) or "the library's"
    launch, shapes = operation(config, name, ways)
    size = sum(2 * math.prod(shape) for shape in shapes)
    try:
        micros = median_launch(partial(launch, sizes=sizes), shapes, inputs_of(config, name, ways), rows, size)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return f"{said} | refused: {str(error).splitlines()[0][:60]} | "
    return f"{said} | {micros:.2f} | {size / micros / 1e6:.2f}"


def operation(config: ModelConfig, name: str, ways: int) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """A launch, and the shapes of its weights on a device."""
    width, inner, dim = config.hidden_size, config.intermediate_size // ways, config.head_dim
    heads, kv_heads = config.num_heads // ways, config.num_kv_heads // ways
    if name == "heads":
        return _heads, [(heads, dim, width), (kv_heads, dim, width), (kv_heads, dim, width)]
    if name == "gate":
        return partial(_gate, config.activation), [(width, inner), (width, inner)]
    return _onto, [(heads * dim if name == "out" else inner, width)]


def inputs_of(config: ModelConfig, name: str, ways: int) -> int:
    """The numbers of a row that enters it."""
    split = {"out": config.num_heads * config.head_dim // ways, "down": config.intermediate_size // ways}
    return split.get(name, config.hidden_size)


def _heads(x: jax.Array, *weights: jax.Array, sizes: Sizes) -> Any:
    angles = tuple(jnp.ones((len(x), weights[0].shape[1] // 2), jnp.float32) for _ in range(2))
    scale = jnp.ones(x.shape[1], x.dtype) if len(x) == 1 else None  # one token is normalised on the way
    return heads_gpu.head_products(x, weights, None, angles, scale, eps=1e-5, sizes=sizes)


def _gate(activation: str, x: jax.Array, gate: jax.Array, up: jax.Array, *, sizes: Sizes) -> Any:
    return rows_gpu.row_products(x, gate, None, up, gate=activation, sizes=sizes)


def _onto(x: jax.Array, weights: jax.Array, *, sizes: Sizes) -> Any:
    onto = jnp.ones((len(x), weights.shape[1]), x.dtype)
    return rows_gpu.row_products(x, weights, onto, share=0.5, sizes=sizes)


def median_launch(
    launch: Callable[..., Any], shapes: list[tuple[int, ...]], inputs: int, rows: int, size: int
) -> float:
    """Microseconds of a launch, over weights of `BYTES` in all."""
    sets = math.ceil(BYTES / size)
    key = jax.random.key(0)
    weights = [
        tuple(jax.random.normal(jax.random.fold_in(key, n), shape, jnp.bfloat16) for shape in shapes)
        for n in range(sets)
    ]
    x = jax.random.normal(key, (rows, inputs), jnp.bfloat16)
    run = jax.jit(lambda x, weights: [launch(x, *own) for own in weights])
    jax.block_until_ready(run(x, weights))
    times = kernel_times(lambda: [run(x, weights) for _ in range(3)])
    return statistics.median(next(times[kernel] for kernel in times if "products" in kernel))


def candidates(name: str, rows: int) -> Iterator[Sizes]:
    """Sizes worth a try."""
    if name == "heads" and rows == 1:
        for numbers, warps in product((2048, 4096, 8192, 16384), (2, 4, 8)):
            yield {"numbers": numbers, "warps": warps}
        return
    blocks = (32, 64) if name == "gate" else (16, 32)
    for block, depth, warps, stages in product(blocks, (64, 128, 256), (2, 4), (4, 6, 8)):
        moving = 2 * block * depth * stages * (2 if name in ("gate", "heads") else 1)
        if 32_768 <= moving <= 131_072:  # bytes of weights on their way to a program
            yield {"block": block, "depth": depth, "warps": warps, "stages": stages}


if __name__ == "__main__":
    main()
