"""Checks and times every kernel on this device: a table with the share of the bandwidth measured in the same run.

    python scripts/benchmarks/benchmark_kernels.py            all of it
    python scripts/benchmarks/benchmark_kernels.py attention  one section: checks, attention, sums, clustering ...

The checks are those of the tests (tests/kernels/ops/) with the kernels as they are compiled for this device; what
fails is printed, the rest goes on, and the exit status is 1. The other sections take about two minutes on an H200.

Every number is the median of 20 timings after a warm-up, over several sets of inputs that together exceed the caches;
a short kernel is repeated inside one program, each call taking the last one's output, so that no launch is measured
twice and none overlaps. What is timed is compared with the reference in float32 too.
"""

import argparse
import importlib.util
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_common import LLAMA, environment, median_seconds, timed

import clusterkv_jax as ckv
from clusterkv_jax import kmeans, soft_matching
from clusterkv_jax.benchmark.own_runner import read_bandwidth
from clusterkv_jax.blocks.causal_attention import causal_attention
from clusterkv_jax.cache.layers import from_tokens
from clusterkv_jax.kernels.accumulated_attention import accumulated_attention
from clusterkv_jax.kernels.append_rows import append_rows
from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.kernels.expert_products import expert_products
from clusterkv_jax.kernels.gather_rows import gather_rows
from clusterkv_jax.kernels.group_rows import group_rows
from clusterkv_jax.kernels.head_products import head_products
from clusterkv_jax.kernels.index_scores import index_scores
from clusterkv_jax.kernels.index_scores import pallas_gpu as scores_gpu
from clusterkv_jax.kernels.kmeans import pallas_gpu as kmeans_gpu
from clusterkv_jax.kernels.normed_rows import normed_rows
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.kernels.row_merge import row_merge
from clusterkv_jax.kernels.row_products import row_products
from clusterkv_jax.kernels.select_rows import pallas_gpu as select_gpu
from clusterkv_jax.kernels.select_rows import select_rows
from clusterkv_jax.kernels.step_in_groups import step_in_groups
from clusterkv_jax.kernels.top_rows import top_rows
from clusterkv_jax.kernels.turned_heads import turned_heads

HEADS, GROUP, DIM = LLAMA.num_kv_heads, LLAMA.num_heads // LLAMA.num_kv_heads, LLAMA.head_dim
# Llama-3.1-8B with random weights, batch 1, no compression: seconds of prefill on one H200 (docs/results/speed.md).
PREFILL_64K, PREFILL_32K = 3.398, 1.215
LAYERS = LLAMA.num_layers
CASES = 3  # of every shape that is checked; it is the compilation of each that takes its time


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels to be checked, as the CHECKS of tests/kernels/collect.py name them before a comma."""
    ops = [biased_attention, accumulated_attention, chunked_matching, append_rows, group_rows, gather_rows]
    ops += [index_scores, select_rows, recalled_attention, row_merge, expert_products, turned_heads]
    ops += [top_rows, step_in_groups, normed_rows, row_products, head_products]
    versions: dict[str, Callable[..., Any]] = {op.__name__: partial(op, backend="gpu") for op in ops}
    versions["index_scores, long tiles"] = partial(scores_gpu.index_scores, tile=64)
    versions["select_rows, marks"] = partial(select_gpu.select_rows, tuning={"marked": 1})
    versions["kmeans"] = kmeans_gpu.kmeans
    return versions


def checks(bandwidth: float) -> bool:
    """Every kernel through the shared base of the tests; whether all are right."""
    del bandwidth
    # A script's own folder is on the path, not the one that holds `tests`.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.kernels.collect import CHECKS

    return all([check(op, kernel, CHECKS[op.partition(",")[0]]) for op, kernel in kernels().items()])


def check(op: str, kernel: Callable[..., Any], through: Sequence[Callable[..., None]]) -> bool:
    """Print one line of the table, and what went wrong."""
    start, right = time.perf_counter(), True
    for one in through:
        try:
            one(kernel, examples=CASES)
        except Exception:  # whatever it is, the others are of interest
            right = False
            print(f"{op} fails {one.__name__}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    print(f"| checks, {op} | {'ok' if right else 'FAILED'} | {time.perf_counter() - start:.0f} s | |", flush=True)
    return right


def rows(seed: int, *shape: int) -> jax.Array:
    """Random bf16 rows in which neighbours are alike, as keys are."""
    noise, place = jax.random.split(jax.random.key(seed))
    walk = jnp.cumsum(jax.random.normal(noise, (*shape[:-2], shape[-2] // 64, 64, shape[-1])), axis=-2) / 8
    start = jax.random.normal(place, (*shape[:-2], shape[-2] // 64, 1, shape[-1]))
    return (walk + start).reshape(shape).astype(jnp.bfloat16)


def report(name: str, measured: float, target: str, note: str) -> None:
    """One line of the table."""
    print(f"| {name} | {measured * 1e6:.0f} µs | {note} | {target} |", flush=True)


def caches(batch: int, slots: int, sets: int, fill: Sequence[int] | None = None) -> list[tuple[jax.Array, ...]]:
    """Keys, values, degrees and lengths of `sets` caches."""
    counts = jnp.asarray([slots] * batch if fill is None else fill, jnp.int32)
    length = jnp.broadcast_to(counts[:, None], (batch, HEADS))
    degree = jnp.where(jnp.arange(slots) < length[..., None], 3.0, 0.0)
    return [
        (rows(2 * i, batch, HEADS, slots, DIM), rows(2 * i + 1, batch, HEADS, slots, DIM), degree, length)
        for i in range(sets)
    ]


def half_filled(slots: int) -> list[int]:
    """Lengths of 16 rows that are half full on average."""
    return [slots * (i + 1) // 17 for i in range(16)]


def attention_time(sets: list[tuple[jax.Array, ...]], backend: str | None) -> float:
    """Seconds of one attention call, from a chain of them."""
    loops = 32  # some 10 ms in all: what the host does before and after is then nothing

    @jax.jit
    def chain(q, sets):
        def body(_, q):
            for cache in sets:
                q = biased_attention(q, *cache, return_lse=True, backend=backend)[0]
            return q

        return jax.lax.fori_loop(0, loops, body, q)

    q = jax.random.normal(jax.random.key(0), (sets[0][0].shape[0], 1, HEADS * GROUP, DIM), jnp.bfloat16)
    return median_seconds(lambda: chain(q, sets)) / (loops * len(sets))


def attention(bandwidth: float) -> None:
    """Decode attention at one query, full caches and ragged ones."""
    slot_bytes = HEADS * (4 * DIM + 4)
    for slots, sets, target in ((13312, 8, "≥ 1.7 × XLA"), (65536, 3, "≥ 85 %"), (131072, 2, "≥ 85 %")):
        layers = caches(1, slots, sets)
        q = jax.random.normal(jax.random.key(9), (1, 1, HEADS * GROUP, DIM), jnp.bfloat16)
        keys, values, degree, length = layers[0]
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
        exact = biased_attention(q.astype(jnp.float32), keys, values, degree, length, backend="xla")
        error = jnp.linalg.norm(biased_attention(q, *layers[0]).astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
        assert error < 5e-3, error
        kernel, xla = attention_time(layers, None), attention_time(layers, "xla")
        share = slots * slot_bytes / kernel / bandwidth
        report(f"attention, {slots} slots", kernel, target, f"{xla / kernel:.2f} × XLA, {share:.0%} of read bandwidth")
    fill = half_filled(13312)
    whole, part = attention_time(caches(16, 13312, 2), None), attention_time(caches(16, 13312, 2, fill), None)
    share = sum(fill) / 16 / 13312
    report("attention, batch 16, ragged", part, "1 ± 15 %", f"{part / whole / share:.2f} × its share of the full time")


def prompt(tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and the length of a prompt."""
    q, keys = (rows(i, 1, heads, tokens, DIM) for i, heads in enumerate((HEADS * GROUP, HEADS)))
    return q, keys, jnp.asarray([tokens], jnp.int32)


def sums_time(operands: tuple[jax.Array, ...], backend: str | None) -> float:
    """Seconds of one prompt's accumulated attention."""
    run = jax.jit(lambda *operands: accumulated_attention(*operands, backend=backend))
    return median_seconds(lambda: run(*operands), 5)


def sums(bandwidth: float) -> None:
    """Accumulated attention of a 32k prompt, beside attention itself."""
    del bandwidth
    q, keys, length = operands = prompt(32768)
    exact = accumulated_attention(q.astype(jnp.float32), keys.astype(jnp.float32), length, backend="xla")
    error = jnp.linalg.norm(accumulated_attention(*operands) - exact) / jnp.linalg.norm(exact)
    assert error < 1e-3, error
    kernel, xla = sums_time(operands, None), sums_time(operands, "xla")
    by_token = [jnp.swapaxes(x, 1, 2) for x in (q, keys, keys)]
    run = jax.jit(causal_attention)
    attention = median_seconds(lambda: run(*by_token), 5)
    note = f"{xla / kernel:.2f} × XLA, {kernel / attention:.2f} × attention's {attention * 1e3:.1f} ms"
    report("accumulated_attention, 32k tokens", kernel, "≤ 2 × attention", note)


def clustering_time() -> tuple[float, str]:
    """Seconds that compressing one layer's 64k prompt to 20 % takes beyond keeping it, with CentroidKV's rounds."""
    tokens, method = 65536, ckv.CentroidKV(ckv.Budget(ratio=0.2))
    keep = tokens // 5
    schedule = soft_matching.merge_schedule(tokens, method.chunk, method.ratios, method.merge_of)
    shape: dict[str, Any] = {"sinks": method.sinks, "recent": method.recent, "chunk": method.chunk}
    shape["expected"] = soft_matching.rows_by_round((tokens, keep), (tokens, keep), schedule, **shape)
    shape |= {"enough": True, "slots": 13184}

    def compress(keys, values):
        layer = from_tokens(keys, values, jnp.asarray([tokens], jnp.int32))
        return soft_matching.cluster(layer, jnp.asarray([keep], jnp.int32), jnp.zeros(1, jnp.int32), schedule, **shape)

    layers = [(rows(2 * i, 1, HEADS, tokens, DIM), rows(2 * i + 1, 1, HEADS, tokens, DIM)) for i in range(4)]
    keep_all = jax.jit(lambda k, v: from_tokens(k, v, jnp.asarray([tokens], jnp.int32)))
    clustered = jax.jit(compress)
    compiled, (cache, rounds) = timed(lambda: clustered(*layers[0]))
    assert int(cache.length[0, 0]) == keep
    assert float(jnp.max(jnp.abs(cache.degree.sum(-1) - tokens))) == 0
    # As many programs in a row as a prefill has layers: while one runs, the host sends the next.
    row = layers * (LAYERS // len(layers))
    both, alone = (median_seconds(lambda f=f: [f(*kv) for kv in row]) / len(row) for f in (clustered, keep_all))
    return both - alone, f"{int(rounds[0])} rounds, compiled in {compiled:.1f} s"


def clustering(bandwidth: float) -> None:
    """What clustering is of the prefill."""
    del bandwidth
    duration, note = clustering_time()
    share = LAYERS * duration / PREFILL_64K
    report("clustering, 64k to 20 %, a layer", duration, "≤ 0.7 %", f"{share:.2%} of the prefill, {note}")


def k_means_time() -> float:
    """Seconds of 20 Lloyd steps of 32k keys and 400 centroids, as many layers in a row as a prefill has."""
    tokens, centroids = 32768, 400
    keys = [jax.random.normal(jax.random.key(i), (1, HEADS, tokens, DIM), jnp.bfloat16) for i in range(2)]
    first = jnp.asarray(np.random.default_rng(0).choice(tokens, centroids, replace=False), jnp.int32)
    run = jax.jit(kmeans.cluster)
    row = keys * (LAYERS // len(keys))
    return median_seconds(lambda: [run(x, first) for x in row]) / len(row)


def k_means(bandwidth: float) -> None:
    """What K-means is of a layer's prefill."""
    del bandwidth
    duration = k_means_time()
    note = f"{duration * LAYERS / PREFILL_32K:.1%} of the layer's prefill, one final assignment more than 20"
    report("kmeans, 32k keys, 400 clusters, 20 steps", duration, "≤ 6 %", note)


def gather(bandwidth: float) -> None:
    """1,024 rows per head out of a store in host memory."""
    del bandwidth
    device = jax.devices()[0]
    host, here = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", "device"))
    store = jax.device_put(rows(0, 1, HEADS, 65536, DIM), host)
    link = store.nbytes / median_seconds(lambda: jax.device_put(store, here))
    rng = np.random.default_rng(0)
    indices = [jnp.asarray(rng.choice(65536, (1, HEADS, 1024)), jnp.int32) for _ in range(8)]
    run = jax.jit(lambda store, indices: [gather_rows(store, index) for index in indices])
    expected = gather_rows(jax.device_put(store, here), indices[0], backend="xla")
    assert bool((run(store, indices)[0] == expected).all())
    duration = median_seconds(lambda: run(store, indices)) / len(indices)
    share = HEADS * 1024 * DIM * 2 / duration / link
    report("gather_rows from pinned host, 8 x 1,024 rows", duration, "≥ 60 %", f"{share:.0%} of {link / 1e9:.1f} GB/s")


SECTIONS: dict[str, Callable[[float], bool | None]] = {
    **{"checks": checks, "attention": attention, "sums": sums},
    **{"clustering": clustering, "kmeans": k_means, "gather": gather},
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default all")
    names = parser.parse_args().sections or list(SECTIONS)
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}.")
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU; jax {jax.__version__} sees {jax.devices()[0].device_kind}.")
    if "checks" in names and None in map(importlib.util.find_spec, ("hypothesis", "pytest")):
        parser.error("checks need hypothesis and pytest: install the extra `test`, or name the other sections.")
    bandwidth = read_bandwidth()
    print(f"{environment()}, {bandwidth / 1e12:.2f} TB/s read\n")
    print("| op | measured | share | target |\n|---|---|---|---|")
    if False in [SECTIONS[name](bandwidth) for name in names]:
        sys.exit(1)


if __name__ == "__main__":
    main()
