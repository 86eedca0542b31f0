"""Times reading a long prompt and decoding behind it, with Llama-3.1-8B's shapes and random weights.

    python scripts/benchmarks/benchmark_generation.py [prompt tokens, default 65536]    about two minutes on an H200

Each line is a method: the time to the first token, the time per token after it, and what compiling took. A request is
made once to compile and then REPEATS times; the median is printed.
"""

import argparse
import statistics
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_common import LLAMA, environment

import clusterkv_jax as ckv
from clusterkv_jax.models.transformer import init

REPEATS = 3
NEW_TOKENS = 289  # two intervals of clustering, in whole segments of the decode loop
BUDGET = ckv.Budget(ratio=0.2)
METHODS = {
    "CentroidKV, 20 %": ckv.CentroidKV(BUDGET),
    "CentroidKV, 20 %, prompt only": ckv.Composed(ckv.CentroidKV(BUDGET), ckv.Full()),
    "OrbitKV, 20 %": ckv.OrbitKV(BUDGET),
    "full": ckv.Full(),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="?", default=65536)
    tokens = parser.parse_args().tokens
    params = init(jax.random.key(0), LLAMA, jnp.bfloat16)
    shape = LLAMA.hidden_size, LLAMA.num_kv_heads
    surrogate = {"weights": jax.random.normal(jax.random.key(1), shape), "bias": jnp.zeros(shape[1])}
    params["layers"] = tuple({**layer, "surrogate": surrogate} for layer in params["layers"])
    model = ckv.Model(params, LLAMA, None, None, "random")
    prompt = np.random.default_rng(0).integers(0, LLAMA.vocab_size, tokens).tolist()
    print(f"{environment()}, prompt of {tokens} tokens\n")
    print("| method | first token | per token | compiling |\n|---|---|---|---|")
    for name, method in METHODS.items():
        request = partial(ckv.generate, model, [prompt], method=method, max_new_tokens=NEW_TOKENS)
        runs = [request().stats for _ in range(1 + REPEATS)]
        first, per = (statistics.median(getattr(run, what) for run in runs[1:]) for what in ("ttft_s", "tpot_s"))
        print(f"| {name} | {first:.3f} s | {per * 1e3:.3f} ms | {runs[0].compile_s:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
