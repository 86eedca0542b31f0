"""Times decoding with ClusterKV beside the full cache, with Llama-3.1-8B's shapes and random weights.

    python scripts/benchmarks/benchmark_recall.py 32768 65536 131072       batch 1, a context after the other
    python scripts/benchmarks/benchmark_recall.py 32768 --batch 16         one context, copied for each row
    python scripts/benchmarks/benchmark_recall.py 131072 --store host      rows in host memory, and their traffic
    python scripts/benchmarks/benchmark_recall.py 262144 --store host --alone  without the full cache: its memory
    python scripts/benchmarks/benchmark_recall.py 512 --tiny               a toy, for a CPU

Both methods read the same random tokens with the same program sizes. TPOT is that of the decode loop, compiled and
warmed up before, over --steps steps. Clustering's share is what prefill takes longer than with the full cache, without
compiling; those of selection and of attention to what it chose are the times of their kernels in a profile of the same
loop, on a GPU, without what overlaps the kernel before; waits between kernels belong to none.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_common import LLAMA, environment, timed

import clusterkv_jax as ckv
from clusterkv_jax.cache import nbytes, take_sequences
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.host_store import host_bytes, traffic
from clusterkv_jax.models import transformer
from clusterkv_jax.models.config import ModelConfig, Rope

LONG_LLAMA = replace(LLAMA, max_positions=262144)
TINY = ModelConfig("llama", 512, 64, 128, 4, 4, 2, 16, 4096, Rope(1e4, 16))


class Times(NamedTuple):
    """Seconds of a kernel: those that do not overlap the kernel before it on its stream, and all of them.

    A launch begins before the kernel before it has ended, so that the latter sum to more than the time that passes.
    """

    alone: float = 0.0
    whole: float = 0.0


def prefill(params: Any, config: ModelConfig, method: Any, tokens: jax.Array) -> tuple[float, Any]:
    """The time of the second of two prefills, the first one compiles; the cache of the second."""
    lengths = jnp.full(1, tokens.shape[1], jnp.int32)
    run = partial(ckv.prefill, params, config, method, tokens, lengths, max_new_tokens=512)
    timed(run)
    time, (cache, _) = timed(run)
    return time, cache


def decode(params: Any, config: ModelConfig, method: Any, cache: Any, steps: int, most: int) -> tuple[float, Any]:
    """Seconds that `steps` steps of a decode loop compiled for `most` take, and the cache after them."""
    batch = cache.position.shape[0]
    # Made anew: what came out of a program with host memory would compile another one.
    state = DecodeState(cache, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool))
    rest = (jax.random.key(0), jnp.int32(1), jnp.int32(steps))
    loop = partial(decode_loop, sampling=ckv.Sampling(), eos_ids=(), steps=most)
    time, (state, *_) = timed(lambda: loop(params, config, method, state, *rest))
    return time, state.cache


def kernel_seconds(run: Callable[[], Any]) -> dict[str, Times]:
    """How long each GPU kernel runs, all its launches together, by its name in a profile."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    gpus = [plane for plane in profile.planes if plane.name.startswith("/device:GPU")]
    streams = [line for plane in gpus for line in plane.lines if line.name.startswith("Stream")]
    return summed([[(event.name, event.start_ns, event.end_ns) for event in stream.events] for stream in streams])


def summed(streams: Sequence[Sequence[tuple[str, float, float]]]) -> dict[str, Times]:
    """Of (name, start, end) in nanoseconds: what each name takes."""
    totals: dict[str, Times] = defaultdict(Times)
    for stream in streams:
        before = 0.0
        for name, start, end in sorted(stream, key=lambda event: event[1]):
            alone, whole = totals[name]
            totals[name] = Times(alone + max(0.0, end - max(start, before)) / 1e9, whole + (end - start) / 1e9)
            before = max(before, end)
    return totals


def peak_memory() -> str:
    """The most device memory that this process has held so far, where the platform counts it."""
    stats = jax.devices()[0].memory_stats() or {}
    return f"peak {stats['peak_bytes_in_use'] / 2**30:.1f} GiB" if "peak_bytes_in_use" in stats else "peak unknown"


def measure(params: Any, config: ModelConfig, methods: dict[str, Any], context: int, batch: int, steps: int) -> None:
    """Lines of the table for one context; what comes after the first method is compared with it."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(config.vocab_size, size=(1, context)), jnp.int32)
    whole = None
    for name, method in methods.items():
        ttft, cache = prefill(params, config, method, tokens)
        if batch > 1:
            cache = take_sequences(cache, jnp.zeros(batch, jnp.int32))
        size = nbytes(cache) / 2**30
        loop = partial(decode, params, config, method, most=steps)
        _, cache = loop(cache, 2)  # compiles
        time, cache = loop(cache, steps)
        tpot = time / steps
        line = f"| {context} x {batch} | {name} | {ttft:.3f} | {tpot * 1e3:.2f} | {size:.2f} |"
        if whole is not None:
            line += f" TPOT {whole[1] / tpot:.2f} x; clustering {1 - whole[0] / ttft:.1%} of prefill;"
        whole = whole or (ttft, tpot)
        if method.holds in ("index", "host"):
            line += of_host(cache) if method.holds == "host" else of_step(partial(loop, cache), min(16, steps), tpot)
        print(f"{line} {peak_memory()}", flush=True)
        del cache  # or the next method's prefill would stand beside it


def of_host(cache: Any) -> str:
    """What a host store holds and what was moved of it."""
    counts = traffic(cache)
    hits = f"hit rate {counts['row_hit_rate']:.1%} of rows, {counts['cluster_hit_rate']:.1%} of clusters"
    moves = f"{counts['moved_bytes'] / 2**20:.0f} MiB moved"
    return f" {host_bytes(cache) / 2**30:.2f} GiB of it on the host, {moves}, {hits};"


def of_step(loop: Callable[[int], Any], steps: int, tpot: float) -> str:
    """What selection and attention to its rows take of a step, by the kernels in a profile of so many."""
    if jax.default_backend() != "gpu":
        return " selection is told from the rest of a step on a GPU only;"
    kernels = kernel_seconds(lambda: loop(steps))

    def of(*ops: str) -> Times:
        times = [time for name, time in kernels.items() if name.startswith(ops)]
        return Times(*(sum(part) / steps * 1e3 for part in zip(*times, strict=True)))

    scores, choice, attend = of("index_scores"), of("select_rows"), of("recalled_attention")
    if not (scores.alone and choice.alone):
        return " no kernel that selects was seen;"
    select, overlapping = scores.alone + choice.alone, scores.whole + choice.whole
    return (
        f" selection {select:.3f} ms = {select / tpot / 1e3:.2%} ({overlapping:.3f} ms with what overlaps the kernels "
        f"before), attention {attend.alone:.2f}, everything on the device {of('').alone:.2f} ms of a step;"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contexts", nargs="+", type=int, metavar="context", help="tokens of the prompt")
    parser.add_argument("--batch", type=int, default=1, help="rows that decode together")
    parser.add_argument("--budget", type=int, default=1024, help="rows that a step recalls")
    parser.add_argument("--steps", type=int, default=64, help="steps that are timed")
    parser.add_argument("--store", choices=("device", "host"), default="device", help="where ClusterKV's rows are")
    parser.add_argument("--cached-steps", type=int, default=1, help="steps whose rows stay on the device")
    parser.add_argument("--alone", action="store_true", help="without the full cache beside it")
    parser.add_argument("--tiny", action="store_true", help="a toy model in float32")
    options = parser.parse_args()
    config, dtype = (TINY, jnp.float32) if options.tiny else (LONG_LLAMA, jnp.bfloat16)
    params = jax.block_until_ready(transformer.init(jax.random.key(0), config, dtype))
    method = ckv.ClusterKV(ckv.Budget(tokens=options.budget), store=options.store, cached_steps=options.cached_steps)
    print(f"{environment()}, {method}\n")
    print("| context x batch | method | prefill s | TPOT ms | cache GiB |\n|---|---|---|---|---|")
    methods = {"clusterkv": method} if options.alone else {"full": ckv.Full(), "clusterkv": method}
    for context in options.contexts:
        measure(params, config, methods, context, options.batch, options.steps)


if __name__ == "__main__":
    main()
