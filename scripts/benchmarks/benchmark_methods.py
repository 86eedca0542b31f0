"""Times what each method adds to a prompt's prefill, at Llama-3.1-8B's shapes with random weights and keys.

    python scripts/benchmarks/benchmark_methods.py                    32k tokens, batch 1, a fifth kept
    python scripts/benchmarks/benchmark_methods.py --tokens 65536

One layer's attention alone, and one layer's compression alone, each the median of several timings after a warm-up, a
timing being that of programs in a row until the last one's results are there. A program compresses the keys of four
layers, as what the host spends on a program is longer than some methods take for one. A model's prefill is the layers'
sum; where layers reuse what others chose (ChunkKV), the mean over a group of layers. Two published claims are checked
at the end: reuse over 4 layers makes ChunkKV's compression at least 2.5 times as fast, and H2O's prefill takes at most
twice SnapKV's.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from benchmark_common import LLAMA, environment, median_seconds
from jaxtyping import Array

import clusterkv_jax as ckv
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.chassis import Prompt, compress_layer
from clusterkv_jax.methods.plan import plan_layer, rows_of_request
from clusterkv_jax.methods.request import Request
from clusterkv_jax.models import transformer
from clusterkv_jax.models.causal_attention import causal_attention
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.transformer import Params

RATIO, REUSE = 0.2, 4
IN_FLIGHT = 4  # programs sent before waiting, as a prefill does
LAYERS = 4  # compressed by one program
BUDGET = ckv.Budget(ratio=RATIO, base="prompt")
METHODS = {
    "Full": ckv.Full(),
    "SnapKV": ckv.SnapKV(BUDGET),
    "PyramidKV": ckv.PyramidKV(BUDGET),
    "AdaKV": ckv.AdaKV(BUDGET),
    "ChunkKV": ckv.ChunkKV(BUDGET),
    f"ChunkKV, reuse {REUSE}": ckv.ChunkKV(BUDGET, reuse_layers=REUSE),
    "H2O": ckv.H2O(BUDGET),
    "StreamingLLM": ckv.StreamingLLM(BUDGET),
    "CaM": ckv.CaM(BUDGET),
    "CentroidKV": ckv.CentroidKV(BUDGET),
    "GravityKV": ckv.GravityKV(BUDGET),
    "Chelsea": ckv.Chelsea(BUDGET),
}


def llama(scale: int) -> ModelConfig:
    """Llama-3.1-8B with `REUSE` layers, hidden and feed-forward sizes divided by `scale`."""
    hidden, mlp = LLAMA.hidden_size // scale, LLAMA.intermediate_size // scale
    return replace(LLAMA, vocab_size=128, hidden_size=hidden, intermediate_size=mlp, num_layers=REUSE)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median time of `run`, each the mean of several in a row."""
    return median_seconds(lambda: [run() for _ in range(IN_FLIGHT)], repeats) / IN_FLIGHT


@partial(jax.jit, static_argnames=("config",))
def read_layer(weights: Params, config: ModelConfig, hidden: Array) -> Array:
    """A layer over the whole prompt: projections, attention, MLP."""
    positions = jnp.broadcast_to(jnp.arange(hidden.shape[1], dtype=jnp.int32), hidden.shape[:2])
    q, k, v = transformer.qkv(weights, config, hidden, positions)
    return transformer.finish(weights, config, hidden, causal_attention(q, k, v))


def compress_layers(method: Method, plan: Any) -> Callable[..., list[tuple[Any, Any]]]:
    """The program that makes layers' caches, and what each selects."""

    def one(tensors: Sequence[Array], budgets: Array, key: Array, selection: Any) -> tuple[Any, Any]:
        keys = tensors[1]
        prompt = Prompt(*tensors, lengths=jnp.full(keys.shape[0], keys.shape[2], jnp.int32))
        layer, _, selected = compress_layer(method, prompt, budgets, plan, key, selection)
        return layer, selected

    # Without static arguments, which the host would look at again at every call, longer than some programs take.
    return jax.jit(lambda layers, *rest: [one(tensors, *rest) for tensors in layers])


def random_weights(config: ModelConfig) -> Params:
    """One layer's, bf16."""
    return transformer.init(jax.random.key(0), replace(config, num_layers=1), jnp.bfloat16)["layers"][0]


def compression_time(method: Method, config: ModelConfig, layers: Sequence[Sequence[Array]], repeats: int) -> float:
    """Seconds per layer, mean over `REUSE` layers: the others may reuse what the first selects."""
    batch, kv_heads, tokens, _ = layers[0][1].shape
    request = Request(np.asarray([tokens]), REUSE, kv_heads, reserve=128, row_bytes=516, rope=config.rope)
    times, selection = [], None
    for number in range(REUSE):
        plan = plan_layer(method, number, request)
        budgets = rows_of_request(method, plan, np.full(batch, tokens), number, request)
        before = None if plan.selects else selection
        run = partial(compress_layers(method, plan), layers, budgets, jax.random.key(number), before)
        selection = run()[0][1] if plan.selects else selection
        times.append(seconds(run, repeats) / len(layers))
    return statistics.mean(times)


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 32768,
    repeats: Annotated[int, typer.Option(help="Timings of each number.")] = 10,
    scale: Annotated[int, typer.Option(help="Divide hidden and feed-forward sizes, for a dry run.")] = 1,
) -> None:
    """Print the table, then the two claims."""
    config = llama(scale)
    print(f"{environment()}; {tokens:,} tokens, batch 1, {RATIO:.0%} kept\n")
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    hidden = draw(jax.random.key(0), (1, tokens, config.hidden_size))
    layer = seconds(partial(read_layer, random_weights(config), config, hidden), repeats)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    shapes = [(1, count, tokens, config.head_dim) for count in heads]
    layers = [[draw(jax.random.key(3 * n + i), shape) for i, shape in enumerate(shapes)] for n in range(LAYERS)]
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in layers[0])
    attention = seconds(partial(jax.jit(causal_attention), q, k, v), repeats)
    print(f"a layer without compression: {layer * 1e3:.2f} ms, of which attention {attention * 1e3:.2f} ms\n")
    print("| method | compression, ms a layer | of the layer |\n|---|---|---|")
    times = {}
    for name, method in METHODS.items():
        times[name] = compression_time(method, config, layers, repeats)
        print(f"| {name} | {times[name] * 1e3:.2f} | {times[name] / layer:.1%} |", flush=True)
    faster = times["ChunkKV"] / times[f"ChunkKV, reuse {REUSE}"]
    longer = (layer + times["H2O"]) / (layer + times["SnapKV"])
    print(f"\nChunkKV's compression with reuse {REUSE}: {faster:.2f} times as fast as without (aim: 2.5 or more)")
    print(f"H2O's prefill: {longer:.2f} times SnapKV's (aim: 2 or less)")


if __name__ == "__main__":
    typer.run(main)
