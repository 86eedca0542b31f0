"""Times block sizes of the kernels that multiply few rows with large weights, on a GPU; random weights.

    python scripts/benchmarks/tune_products.py                  Llama-3.1-8B, and a device that has half of it
    python scripts/benchmarks/tune_products.py --ways 2 --rows 1 --product gate

A line is a product, its rows and its sizes: the median launch in a profile, and how fast it reads its weights. The
first line of a product has the sizes that the library takes. Each launch reads weights that no other one has brought
into the cache of the device. The kernels lower sizes that do not divide a product, and stages that find no room.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from benchmark_common import environment, kernel_times
from tune_kernels import Sizes, grid

from clusterkv_jax.kernels.head_products import pallas_gpu as heads_gpu
from clusterkv_jax.kernels.row_products import pallas_gpu as rows_gpu
from clusterkv_jax.kernels.row_products.reference import GATES
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.planning.shapes import model_config

PRODUCTS = ("heads", "out", "gate", "down")
BYTES = 400e6  # of the weights of a product's launches: several times what a device's cache holds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a packaged shape, or a folder of config.json")
    parser.add_argument("--ways", type=int, action="append", help="devices that share a product; repeat it [1 2]")
    parser.add_argument("--rows", type=int, action="append", help="tokens; repeat it [1 16]")
    parser.add_argument("--product", action="append", choices=PRODUCTS, help="repeat it [all]")
    parser.add_argument("--as-is", action="store_true", help="the library's sizes alone")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU; this is {environment()}.")
    config, all_ways = model_config(options.model), options.ways or [1, 2]
    if config.experts is not None or not config.gated_mlp or config.mlp_bias or config.activation not in GATES:
        parser.error(f"--model {options.model} has no gated MLP for these kernels; llama-3.1-8b has one.")
    for ways in all_ways:
        if ways < 1 or config.num_kv_heads % ways or config.intermediate_size % ways:
            numbers = f"{config.num_kv_heads} KV heads and {config.intermediate_size} inner units"
            parser.error(f"--ways {ways} does not divide the {numbers} of {options.model}.")
    print(f"{environment()}, {options.model}\n")
    print("| product | devices | rows | sizes | µs | TB/s |\n|---|---:|---:|---|---:|---:|", flush=True)
    for name, ways, rows in product(options.product or PRODUCTS, all_ways, options.rows or [1, 16]):
        launch, shapes, inputs = operation(config, name, ways)
        weights, x = operands(shapes, inputs, rows)
        for sizes in [{}, *([] if options.as_is else candidates(name, rows))]:
            print(f"| {name} | {ways} | {rows} | {line(partial(launch, sizes=sizes), weights, x, sizes)} |", flush=True)


def operation(config: ModelConfig, name: str, ways: int) -> tuple[Callable[..., Any], list[tuple[int, ...]], int]:
    """A launch, the shapes of its weights on a device, and the numbers of a row that enters it."""
    width, inner, dim = config.hidden_size, config.intermediate_size // ways, config.head_dim
    heads, kv_heads = config.num_heads // ways, config.num_kv_heads // ways
    if name == "heads":
        return _heads, [(heads, dim, width), (kv_heads, dim, width), (kv_heads, dim, width)], width
    if name == "gate":
        return partial(_gate, config.activation), [(width, inner), (width, inner)], width
    inputs = heads * dim if name == "out" else inner
    return _onto, [(inputs, width)], inputs


def operands(shapes: list[tuple[int, ...]], inputs: int, rows: int) -> tuple[list[tuple[jax.Array, ...]], jax.Array]:
    """Weights of `BYTES` in all, a tuple of them for each launch, and rows [rows, inputs]."""
    key = jax.random.key(0)

    def draw(n, shape):
        return jax.random.normal(jax.random.fold_in(key, n), shape, jnp.bfloat16)

    launches = math.ceil(BYTES / sum(2 * math.prod(shape) for shape in shapes))
    return [tuple(draw(n, shape) for shape in shapes) for n in range(launches)], draw(launches, (rows, inputs))


def line(launch: Callable[..., Any], weights: list[tuple[jax.Array, ...]], x: jax.Array, sizes: Sizes) -> str:
    """What these sizes take."""
    said = " ".join(f"{key} {value}" for key, value in sizes.items()) or "the library's"
    run = jax.jit(lambda x, weights: [launch(x, *own) for own in weights])
    try:
        jax.block_until_ready(run(x, weights))
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return f"{said} | refused: {str(error).splitlines()[0][:60]} | "
    times = kernel_times(lambda: [run(x, weights) for _ in range(3)])
    micros = statistics.median(next(times[kernel] for kernel in times if "products" in kernel))
    return f"{said} | {micros:.2f} | {sum(part.nbytes for part in weights[0]) / micros / 1e6:.2f}"


def _heads(x: jax.Array, *weights: jax.Array, sizes: Sizes) -> Any:
    angles = tuple(jnp.ones((len(x), weights[0].shape[1] // 2), jnp.float32) for _ in range(2))
    scale = jnp.ones(x.shape[1], x.dtype) if len(x) == 1 else None  # one token is normalised on the way
    return heads_gpu.head_products(x, weights, None, angles, scale, eps=1e-5, sizes=sizes)


def _gate(activation: str, x: jax.Array, gate: jax.Array, up: jax.Array, *, sizes: Sizes) -> Any:
    return rows_gpu.row_products(x, gate, None, up, gate=activation, sizes=sizes)


def _onto(x: jax.Array, weights: jax.Array, *, sizes: Sizes) -> Any:
    onto = jnp.ones((len(x), weights.shape[1]), x.dtype)
    return rows_gpu.row_products(x, weights, onto, share=0.5, sizes=sizes)


def candidates(name: str, rows: int) -> list[Sizes]:
    """Sizes worth a try."""
    if name == "heads" and rows == 1:
        return grid(numbers=(2048, 4096, 8192, 16384), warps=(2, 4, 8))
    blocks, tiles = (32, 64) if name == "gate" else (16, 32), 2 if name in ("gate", "heads") else 1
    sizes = grid(block=blocks, depth=(64, 128, 256), sums=(1, 2), warps=(2, 4), stages=(4, 6, 8))
    # Bytes on their way.
    moving = [2 * tiles * one["block"] * one["depth"] * one["sums"] * one["stages"] for one in sizes]
    return [one for one, size in zip(sizes, moving, strict=True) if 32_768 <= size <= 131_072]


if __name__ == "__main__":
    main()
