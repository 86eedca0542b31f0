"""Times attention over rows of bf16, int8, float8_e4m3 and int4 beside the bandwidth measured in the same run.

    python scripts/benchmarks/benchmark_quantised.py                               64k and 128k slots, batches 1 and 8
    python scripts/benchmarks/benchmark_quantised.py --sizes block=128,span=1024   other blocks than the kernel's own
    python scripts/benchmarks/benchmark_quantised.py --sweep                       the best blocks of a grid of them

Shapes are Llama-3.1-8B's, one query a sequence; on a CPU small ones, to try the script. A time is the median of 20, of
a chain of calls inside one program over caches that together exceed the device's caches; turning queries and outputs of
int4 is part of it. Bytes are those of codes, scales and degrees. What is timed is compared with attention in float32,
over the same codes (the kernel's error) and over the rows before they were quantised (the error of rows).
"""

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from benchmark_common import LLAMA, environment, median_seconds

from clusterkv_jax.benchmark.own_runner import read_bandwidth
from clusterkv_jax.kernels.biased_attention import biased_attention, pallas_gpu
from clusterkv_jax.kernels.quantised import CODES, dequantised, quantise

HEADS, QUERIES, DIM = LLAMA.num_kv_heads, LLAMA.num_heads, LLAMA.head_dim
DTYPES = ("bfloat16", *CODES)
# Bytes of the caches that a chain of calls reads in turn, at least.
TURN = 2**29
SWEEP = {"block": (32, 64, 128), "span": (512, 1024, 2048, 3328), "warps": (1, 2, 4, 8), "stages": (2, 3, 4)}
WORST = 1e-2  # of the kernel, against its own codes

Cache = tuple[Any, Any, jax.Array, jax.Array]


@partial(jax.jit, static_argnames=("batch", "slots", "dtype"))
def cache(seed: int, batch: int, slots: int, dtype: str) -> Cache:
    """Normal rows of degree 3, stored in `dtype`."""
    shape = (batch, HEADS, slots, DIM)
    keys, values = (jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), shape, jnp.bfloat16) for i in (0, 1))
    if dtype != "bfloat16":
        keys, values = quantise(keys, dtype), quantise(values, dtype)
    return keys, values, jnp.full(shape[:3], 3.0), jnp.full(shape[:2], slots, jnp.int32)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def attention(sizes: dict[str, int]) -> Any:
    """The op as the library calls it, or its kernel with these sizes."""
    if not sizes:
        return partial(biased_attention, return_lse=True)
    return partial(pallas_gpu.biased_attention, return_lse=True, return_probs=False, sizes=sizes)


def seconds(sets: list[Cache], sizes: dict[str, int], loops: int) -> float:
    """Seconds of one call, from a chain of them."""
    run = attention(sizes)

    @jax.jit
    def chain(q: jax.Array, sets: list[Cache]) -> jax.Array:
        def body(_: Any, q: jax.Array) -> jax.Array:
            for one in sets:
                q = run(q, *one)[0]
            return q

        return jax.lax.fori_loop(0, loops, body, q)

    q = jax.random.normal(jax.random.key(0), (sets[0][2].shape[0], 1, QUERIES, DIM), jnp.bfloat16)
    return median_seconds(lambda: chain(q, sets)) / (loops * len(sets))


def errors(sizes: dict[str, int], slots: int, dtype: str) -> tuple[float, float]:
    """Relative errors of one sequence's output in float32: over the same codes, and over the rows before them."""
    q = jax.random.normal(jax.random.key(9), (1, 1, QUERIES, DIM), jnp.bfloat16)
    stored, rows = cache(0, 1, slots, dtype), cache(0, 1, slots, "bfloat16")
    out = jax.jit(attention(sizes))(q, *stored)[0].astype(jnp.float32)

    def error(keys: jax.Array, values: jax.Array) -> float:
        wide = (x.astype(jnp.float32) for x in (q, keys, values))
        exact = biased_attention(*wide, *stored[2:], backend="xla")
        return float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact))

    return error(*map(dequantised, stored[:2])), error(*rows[:2])


def tried(options: argparse.Namespace) -> Iterator[dict[str, int]]:
    """The sizes to time."""
    if not options.sweep:
        yield dict((name, int(value)) for name, value in (part.split("=") for part in options.sizes.split(",") if part))
        return
    for values in itertools.product(*SWEEP.values()):
        sizes = dict(zip(SWEEP, values, strict=True))
        if sizes["span"] >= sizes["block"]:
            yield sizes


def line(options: argparse.Namespace, bandwidth: float, batch: int, slots: int, dtype: str) -> str:
    """One row of the table: the fastest of the sizes tried."""
    count = max(1, -(-options.turn // nbytes(jax.eval_shape(lambda: cache(0, batch, slots, dtype)))))
    sets = [cache(i, batch, slots, dtype) for i in range(count)]
    best, sizes, refused = float("inf"), {}, 0
    for one in tried(options):
        try:
            time = seconds(sets, one, options.loops)
        except Exception:  # too much shared memory for one: the others are of interest
            if not options.sweep:
                raise
            refused += 1
            continue
        if time < best:
            best, sizes = time, one
    kernel, rows = errors(sizes, slots, dtype)
    assert kernel < WORST, f"{dtype}: the kernel's error is {kernel}, allowed {WORST}"
    share = nbytes(sets[0][:3]) / best / bandwidth
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "the kernel's own"
    shown += f", {refused} refused" if refused else ""
    return f"| {dtype} | {batch} | {slots} | {best * 1e6:.0f} | {share:.0%} | {kernel:.1e} | {rows:.1e} | {shown} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = jax.default_backend() == "cpu"
    parser.add_argument("--slots", type=int, nargs="+", default=[512] if small else [65536, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2] if small else [1, 8])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--sizes", default="", help="of the GPU kernel, such as block=128,span=1024,warps=4,stages=3")
    parser.add_argument("--sweep", action="store_true", help="try a grid of sizes")
    parser.add_argument("--loops", type=int, default=1 if small else 32, help="calls of each cache in one program")
    options = parser.parse_args()
    if small and (options.sizes or options.sweep):
        parser.error("sizes are those of the GPU kernel, and there is no GPU.")
    options.turn = 1 if small else TURN
    bandwidth = read_bandwidth()
    print(f"{environment()}, {bandwidth / 1e12:.3f} TB/s read\n")
    print("| rows | batch | slots | µs | of read bandwidth | error of the kernel | of the rows | sizes |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for slots, batch, dtype in itertools.product(options.slots, options.batches, options.dtypes):
        print(line(options, bandwidth, batch, slots, dtype), flush=True)


if __name__ == "__main__":
    main()
