"""Measures block sizes of the GPU kernels on this device and writes them to kernels/<op>/<device kind>.json.

    python scripts/benchmarks/tune_kernels.py    about a minute on an H200

Sizes are tried one kind after the other, each with the best so far of the others. How an entry is found: `tuning.py`.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import benchmark_kernels as benchmark
import jax
from benchmark_common import environment

from clusterkv_jax.kernels import tuning
from clusterkv_jax.runtime.dispatch import device_kind

Sizes = dict[str, int]


def grid(**values: tuple[int, ...]) -> list[Sizes]:
    """All combinations."""
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def keep_fastest(op: str, where: dict[str, Any], candidates: list[Sizes], measure: Callable[[], float]) -> None:
    """Measure every candidate as the entry for `where` and leave the fastest in the file."""
    path = tuning.file(op, device_kind())
    others = [entry for entry in _entries(path) if entry["where"] != where]
    before = next((entry["blocks"] for entry in _entries(path) if entry["where"] == where), {})

    def write(sizes: Sizes) -> None:
        entries = [json.dumps(entry) for entry in [*others, {"where": where, "blocks": before | sizes}]]
        path.write_text("[\n  " + ",\n  ".join(entries) + "\n]\n")
        tuning.forget()
        jax.clear_caches()

    times = dict(_timed(op, candidates, write, measure))
    write(candidates[min(times, key=times.__getitem__)])


def _timed(
    op: str, candidates: list[Sizes], write: Callable[[Sizes], None], measure: Callable[[], float]
) -> Iterator[tuple[int, float]]:
    for number, sizes in enumerate(candidates):
        write(sizes)
        try:
            time = measure()
        except jax.errors.JaxRuntimeError as error:  # does not fit this device
            print(f"{op} {sizes}: {str(error).splitlines()[0][:80]}", flush=True)
            continue
        print(f"{op} {sizes}: {time * 1e6:.1f} µs", flush=True)
        yield number, time


def _entries(path: Any) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def attention() -> None:
    """One row with a long cache, and a batch whose rows are full or half full."""
    bf16 = {"tile": 16, "dim": benchmark.DIM, "itemsize": 2}
    shapes = [
        (13312, 8, [2048, 24576], (128, 256)),
        (65536, 2, [24577, 98304], (512, 1024, 2048)),
        (131072, 1, [98305, 2**20], (1024, 2048, 4096)),
    ]
    for slots, sets, occurring, spans in shapes:
        caches = benchmark.caches(1, slots, sets)
        where = bf16 | {"heads": [1, 32], "slots": occurring}
        candidates = grid(span=spans, block=(64,), warps=(4,), stages=(3,))
        candidates += grid(span=spans[-1:], block=(64,), warps=(4,), stages=(4,))
        candidates += grid(span=spans[-1:], block=(128,), warps=(8,), stages=(2,))
        keep_fastest("biased_attention", where, candidates, partial(benchmark.attention_time, caches, "gpu"))
    fill = benchmark.half_filled(13312)
    full, part = benchmark.caches(16, 13312, 1), benchmark.caches(16, 13312, 1, fill)
    candidates = grid(span=(384, 512, 768, 1024, 2048), block=(64,), warps=(4,), stages=(3,))
    candidates += grid(span=(512,), block=(64,), warps=(4,), stages=(4,))
    candidates += grid(span=(512,), block=(32,), warps=(4,), stages=(4,))

    # The full batch is twice the work of the other: weighed alike.
    def both():
        return benchmark.attention_time(full, "gpu") + 2 * benchmark.attention_time(part, "gpu")

    keep_fastest("biased_attention", bf16 | {"heads": [33, 2**20], "slots": [2048, 2**20]}, candidates, both)


def sums() -> None:
    """Accumulated attention of a prompt."""
    operands = benchmark.prompt(32768)
    candidates = grid(tile=(128,), block=(64,), warps=(4, 8), stages=(2, 3))
    candidates += grid(tile=(128,), block=(128,), warps=(4, 8), stages=(2, 3))
    candidates += grid(tile=(256,), block=(64,), warps=(8,), stages=(2, 3))
    where = {"dim": [65, 128], "itemsize": 2}
    keep_fastest("accumulated_attention", where, candidates, lambda: benchmark.sums_time(operands, "gpu"))


def clustering() -> None:
    """Matching, by the time of the whole clustering. Merging has one set of sizes, the best of all shapes tried."""

    def measure():
        return benchmark.clustering_time()[0]

    where = {"chunk": [128, 512], "itemsize": 2, "width": [65, 256], "values": 0}
    matching = grid(columns=(64, 128), a_rows=(128,), b_rows=(64, 128), warps=(8,), stages=(2, 3))
    matching += grid(columns=(64,), a_rows=(64, 128), b_rows=(128,), warps=(4,), stages=(2,))
    keep_fastest("chunked_matching", where, matching, measure)


def kmeans() -> None:
    """Labels, then the keys that these leave in doubt, then means."""
    where = {"centroids": [128, 4096], "dim": [65, 128], "itemsize": 2}
    labels = ("label", "turns", [(128, 32, 8, 8), (128, 64, 8, 16), (128, 32, 8, 16), (128, 64, 8, 8), (64, 64, 4, 16)])
    exact = ("exact", "stages", [(64, 64, 4, 2), (32, 128, 4, 2), (16, 128, 4, 2), (64, 32, 4, 3)])
    for part, last, tried in [labels, exact]:
        names = ("keys", "centroids", "warps", last)
        candidates = [{f"{part}_{name}": n for name, n in zip(names, sizes, strict=True)} for sizes in tried]
        keep_fastest("kmeans", where, candidates, benchmark.k_means_time)
    keep_fastest("kmeans", where, grid(settle_rows=(1024, 2048, 4096)), benchmark.k_means_time)
    reads = grid(mean_keys=(64, 128), mean_warps=(4, 8), mean_stages=(3, 5))
    keep_fastest("kmeans", where, reads, benchmark.k_means_time)


def main() -> None:
    """Measure everything, a kernel after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU; this is {environment()}.")
    print(environment())
    for section in (attention, sums, clustering, kmeans):
        section()


if __name__ == "__main__":
    main()
