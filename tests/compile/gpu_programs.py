"""Compiles the GPU kernels and the clustering of a prompt for an H100 that is not there; run by test_gpu_compile.

Prints as JSON what each program holds: Triton kernels, barriers, launches of a decode step, loops, bytes of
temporaries, of arguments, of results in host memory and of aliased arguments.
A process of its own: the GPU's compiler reads its settings from the environment once.

Usage: python tests/compile/gpu_programs.py
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
# Threads of the GPU's compiler crash now and then on a busy host; two cores gain nothing by them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_force_compilation_parallelism=1"

import jax
import jax.numpy as jnp
import numpy as np
from compiled_text import launches, most_operands, most_results
from described import LLAMA
from described import array as on_mesh
from jax.experimental import topologies

import clusterkv_jax as ckv
from clusterkv_jax.blocks.experts import mixture
from clusterkv_jax.cache.host_store import place
from clusterkv_jax.cache.kinds import with_groups
from clusterkv_jax.cache.layers import groups, take_sequences
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.kernels.accumulated_attention import accumulated_attention
from clusterkv_jax.kernels.append_rows import append_rows
from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.kernels.gather_rows import gather_rows
from clusterkv_jax.kernels.group_rows import group_rows
from clusterkv_jax.kernels.head_products import head_products
from clusterkv_jax.kernels.index_scores import index_scores
from clusterkv_jax.kernels.kmeans import lloyd
from clusterkv_jax.kernels.quantised import CODES, Quantised, row_bytes
from clusterkv_jax.kernels.quantised_linear import quantised_linear
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.kernels.row_merge import row_merge
from clusterkv_jax.kernels.row_products import row_products
from clusterkv_jax.kernels.select_rows import select_rows
from clusterkv_jax.kernels.step_in_groups import step_in_groups
from clusterkv_jax.kernels.top_rows import top_rows
from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights
from clusterkv_jax.methods.driver import LayerPrompt, compress_layer
from clusterkv_jax.methods.plan import planned_layer, plans_of_width
from clusterkv_jax.methods.prefill_compression import Workspace, _compress_layers, put_into
from clusterkv_jax.models.config import ClampedSwiglu, Experts
from clusterkv_jax.models.decoder import attention_in
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.runtime.programs import ON_ONE

BATCH, HEADS, QUERY_HEADS, DIM = 1, LLAMA.num_kv_heads, LLAMA.num_heads, LLAMA.head_dim
SLOTS, PROMPT, CENTROIDS, RECALLED = 13312, 65536, 400, 1024
SHARES = tuple(tuple(0.2 + 0.3 * ((3 * head + layer) % HEADS) for head in range(HEADS)) for layer in range(2))


BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
SHARE = ckv.Budget(ratio=0.2)
CACHE, ROWS = (BATCH, HEADS, SLOTS, DIM), (BATCH, HEADS, SLOTS)


def programs(array):
    """Every op by name: the function, its arguments as `array(shape, dtype)` describes them, what it donates."""
    parts = attention, appending, stepping, matching, clustering, recalling, products, prompts, decoding, experts
    return {name: program for part in parts for name, program in part(array).items()}


def codes(array, name, slots=SLOTS, heads=HEADS):
    """Rows of heads in codes."""
    scales = array((BATCH, heads, slots), F32)
    return Quantised(array((*scales.shape, row_bytes(name, DIM) - 4), CODES[name]), scales)


def attention(array):
    """Of a token and of a question, to rows of each type; and summed over a prompt."""

    def to(rows, tokens=1, dtype=BF16, **options):
        q = array((BATCH, tokens, QUERY_HEADS, DIM), dtype)
        run = partial(biased_attention, return_lse=True, return_probs=tokens == 1, **options)
        return run, (q, rows, rows, array(ROWS, F32), array((BATCH, HEADS), I32)), ()

    def accumulated(dtype, tokens):
        q, keys = (array((BATCH, heads, tokens, DIM), dtype) for heads in (QUERY_HEADS, HEADS))
        return accumulated_attention, (q, keys, array((BATCH,), I32)), ()

    rows = array(CACHE, BF16)
    return {
        "attention": to(rows),
        "attention of a question": to(rows, 64),
        "attention of a chunk": to(rows, 512),
        "attention with a soft cap": to(rows, soft_cap=50.0),
        "attention of int4 with a soft cap": to(codes(array, "int4"), soft_cap=50.0),
        "attention float32": to(array(CACHE, F32), dtype=F32),
        **{f"attention of {name}": to(codes(array, name)) for name in CODES},
        "attention of a question of int4": to(codes(array, "int4"), 64),
        "attention of int8 float32": to(codes(array, "int8"), dtype=F32),
        "accumulated attention": accumulated(BF16, 32768),
        "accumulated attention float32": accumulated(F32, 4096),
    }


def appending(array):
    """Rows behind those of the cache."""

    def to(rows, new, tokens=1):
        own = array((BATCH, tokens), I32), array((BATCH, tokens), bool)
        beside = array(ROWS, F32), array(ROWS, I32), array((BATCH, HEADS), I32)
        return append_rows, (rows, rows, *beside, new, new, *own), (0, 1, 2, 3)

    new, of_a_question = (array((BATCH, HEADS, tokens, DIM), BF16) for tokens in (1, 64))
    function, args, donated = to(array(CACHE, BF16), new)
    with_scores = *args, array(ROWS, F32), array((BATCH, HEADS, 1), F32)
    return {
        "append": (function, args, donated),
        "append a question": to(array(CACHE, BF16), of_a_question, 64),
        "append float16": to(array(CACHE, jnp.float16), new),
        "append with scores": (function, with_scores, (*donated, len(args))),
        **{f"append {name}": to(codes(array, name), codes(array, name, 1)) for name in CODES},
    }


def stepping(array):
    """A token into three groups of heads."""

    def into(rows_of):
        new, groups = rows_of(1, HEADS), [(SLOTS, 1), (4000, HEADS - 2), (100, 1)]
        rows = [rows_of(slots, heads) for slots, heads in groups]
        beside = [[array((BATCH, heads, slots), dtype) for dtype in (F32, I32, F32)] for slots, heads in groups]
        buffers = tuple((x, x, *more) for x, more in zip(rows, beside, strict=True))
        token = array((BATCH, 1, QUERY_HEADS, DIM), BF16), new, new, array((BATCH, 1), I32), array((BATCH, 1), bool)
        lengths = tuple(array((BATCH, heads), I32) for _, heads in groups)
        args = *token, array((BATCH, HEADS, 1), F32), buffers, lengths
        return partial(step_in_groups, heads=((2,), (0, 1, 3, 4, 5, 7), (6,))), args, (6,)

    return {
        "step in groups": into(lambda slots, heads: array((BATCH, heads, slots, DIM), BF16)),
        **{f"step in groups of {name}": into(partial(codes, array, name)) for name in CODES},
    }


def matching(array):
    """Partners of rows, by keys alone and with values; and rows merged where they lie."""
    bias, listed, length = array(ROWS, F32), array(ROWS, I32), array((BATCH, HEADS), I32)

    def alone(features, chunk, bias):
        def run(f, bias, rows, n):
            return chunked_matching(f, chunk=chunk, bias=bias, index=rows, length=n)

        return run, (features, bias, listed, length), ()

    def paired(rows):
        def run(k, v, w, bias, listed, n):
            return chunked_matching(k, values=v, key_weight=w, bias=bias, index=listed, length=n, chunk=256)

        return run, (rows, rows, array(length.shape, F32), bias, listed, length), ()

    def merging(rows):
        edges = array((BATCH, HEADS, SLOTS // 2), I32), array((BATCH, HEADS, SLOTS // 2), F32)
        merge = partial(row_merge, chunk=256)
        return merge, (rows, rows, bias, listed, length, *edges, array((BATCH,), I32)), (0, 1, 2, 3)

    wide = (*ROWS, 2 * DIM)
    return {
        "matching": alone(array(CACHE, BF16), 256, bias),
        "matching float32": alone(array(wide, F32), 512, bias),
        "matching of keys and values": paired(array(CACHE, BF16)),
        "matching of wide keys and values": paired(array(wide, BF16)),
        "matching of keys and values float32": paired(array(CACHE, F32)),
        **{f"matching of {name}": alone(codes(array, name), 256, None) for name in CODES},
        "matching of keys and values of int4": paired(codes(array, "int4")),
        **{f"merge {name}": merging(codes(array, name)) for name in CODES},
    }


def clustering(array):
    """Steps of K-means, and rows in the order of their labels or moved up."""
    prompt, labels = array((BATCH, HEADS, PROMPT, DIM), BF16), array((BATCH, HEADS, PROMPT), I32)
    narrow, many = array((2, 1, 4104, 64), jnp.float16), array((2, 1, 1000, 64), F32)
    moved = array((32, HEADS, SLOTS, DIM), jnp.int8), array((32, HEADS, SLOTS), I32)
    return {
        "kmeans": (lloyd, (prompt, array((BATCH, HEADS, CENTROIDS, DIM), F32)), ()),
        "kmeans, many centroids": (lloyd, (narrow, many), ()),
        "rows by label": (partial(group_rows, count=CENTROIDS), (labels,), ()),
        "gather": (gather_rows, (prompt, array((BATCH, HEADS, RECALLED), I32)), ()),
        "rows that move up": (partial(gather_rows, in_place=True), moved, (0,)),
        "top rows": (top_rows, (array((BATCH, HEADS, PROMPT), F32), array((BATCH,), I32)), ()),
    }


def recalling(array):
    """Scores of an index, the rows that they select, and attention to these."""
    group, length = QUERY_HEADS // HEADS, array((BATCH,), I32)
    query, index = array((BATCH, HEADS, group, DIM), BF16), (BATCH, HEADS, CENTROIDS, DIM)
    clusters, rows = array((BATCH, HEADS, CENTROIDS), I32), array((BATCH, HEADS, PROMPT), I32)
    selecting = array((BATCH, HEADS, group, CENTROIDS), F32), clusters, clusters, rows, length
    pages = array((BATCH, HEADS, PROMPT // 16), I32)
    paged = array((BATCH, HEADS, group, PROMPT // 16), F32), pages, pages, None, length
    prompt, recalled = array((BATCH, HEADS, PROMPT, DIM), BF16), array((BATCH, HEADS, group, RECALLED), I32)
    attending = query, prompt, prompt, recalled, length, array((BATCH, HEADS), I32)
    select, attend = partial(select_rows, count=RECALLED), partial(recalled_attention, unlisted=320)

    def of_a_batch(args):
        return [array((16, *x.shape[1:]), x.dtype) for x in args]

    return {
        "index scores": (index_scores, (query, array(index, BF16)), ()),
        "index scores of a batch": (index_scores, of_a_batch((query, array(index, BF16))), ()),
        "index scores float32": (index_scores, (query, array(index, F32)), ()),
        "select": (partial(select, sinks=16), selecting, ()),
        "select for a batch": (partial(select, sinks=16), of_a_batch(selecting), ()),
        "select pages": (select, paged, ()),
        "recalled attention": (attend, attending, ()),
        "recalled attention with a soft cap": (partial(attend, soft_cap=50.0), attending, ()),
    }


def products(array):
    """Few rows through weights."""

    def rows(count, inputs, outputs, dtype=BF16):
        return row_products, (*(array(x, dtype) for x in ((count, inputs), (inputs, outputs), (count, outputs))),), ()

    def gated(count, inputs, outputs, gate, dtype=BF16):
        weights = array((inputs, outputs), dtype)
        return partial(row_products, gate=gate), (array((count, inputs), dtype), weights, None, weights), ()

    def of_heads(dtype, tokens, inputs=4096):
        counts = QUERY_HEADS, HEADS, HEADS
        weights = tuple(array((count, DIM, inputs), dtype) for count in counts)
        biases = tuple(array((count, DIM), dtype) for count in counts)
        return array((tokens, inputs), dtype), weights, biases, (array((tokens, DIM // 2), F32),) * 2

    def of_codes(kind, dtype, rows, inputs, outputs, groups, offsets=False):
        codes = array((inputs // (2 if kind in PACKED else 1), outputs), dtype)
        scales = array((groups, outputs), jnp.uint8 if kind == "mxfp4" else jnp.float16)
        parts = codes, scales, scales if offsets else None
        weights = QuantisedWeights(*parts, kind=kind, shape=(inputs, outputs), names=("model", "mlp"))
        return quantised_linear, (array((rows, inputs), BF16), weights), ()

    surrogate = array((HEADS, 4096), F32), array((HEADS,), F32)
    return {
        "product of int8": of_codes("int8", jnp.int8, 1, 14336, 4096, 1),
        "product of int4": of_codes("int4", jnp.uint8, 1, 4096, 14336, 32, offsets=True),
        "product of fp8": of_codes("fp8", jnp.float8_e4m3fn, 16, 4096, 4096, 32),
        "product of mxfp4": of_codes("mxfp4", jnp.uint8, 16, 2880, 2880, 90),
        "row products": rows(16, 4096, 2048),
        "row products of half a model": rows(16, 7168, 4096),
        "gated row products": gated(3, 4096, 14336, "gelu_tanh", jnp.float16),
        "gated row products of half a model": gated(16, 4096, 7168, "silu"),
        "head products": (head_products, of_heads(BF16, 16), ()),
        "head products float16": (head_products, of_heads(jnp.float16, 1), ()),
        "head products with scores": (head_products, (*of_heads(BF16, 1), array((4096,), BF16), surrogate), ()),
    }


def prompts(array):
    """A layer of a prompt: projected with scores, put among others, and compressed alone or with them."""
    rows, length = array((BATCH, HEADS, PROMPT, DIM), BF16), array((BATCH,), I32)
    number = array((BATCH, HEADS, PROMPT), F32)
    read = LayerPrompt(None, rows, rows, length, scores=number, squares=(number, number))
    workspace = Workspace(jax.tree.map(lambda x: array((2, *x.shape), x.dtype), read), array((), I32))

    def first_layer(method):
        counts = {"reserve": 384, "step_tokens": 1, "max_new_tokens": 384}
        request, plans = plans_of_width(LLAMA, method, BF16, PROMPT, **counts)
        return planned_layer(LLAMA, method, request, np.full(BATCH, PROMPT), plans, 0)

    def compressing(method):
        plan, budgets = first_layer(method)

        def run(k, v, lengths, key):
            return compress_layer(method, LayerPrompt(None, k, v, lengths), budgets, plan, key)

        return run, (rows, rows, length, random_key(array)), ()

    def compressing_at_once(method):
        plan, budgets = first_layer(method)
        return partial(_compress_layers, method, plan.groups[0], (budgets,) * 2), (workspace,), (0,)

    def put(workspace, keys, values, beside):
        """As projections make rows: token after token."""
        keys, values = (jnp.swapaxes(x, 1, 2) for x in (keys, values))
        return put_into(workspace, replace(beside, keys=keys, values=values))

    by_token = array((BATCH, PROMPT, HEADS, DIM), BF16)
    weights = jax.tree.map(lambda spec: array(spec.shape, BF16), abstract(LLAMA)["layers"][0])
    hidden, positions = array((BATCH, 32768, LLAMA.hidden_size), BF16), array((BATCH, 32768), I32)
    return {
        "cluster": compressing(ckv.CentroidKV(SHARE)),
        "cluster by gravity": compressing(ckv.GravityKV(SHARE)),
        "project and score": (
            lambda weights, *args: attention_in(weights, LLAMA, *args, weights["surrogate"]),
            (weights | {"surrogate": surrogate_of(array, LLAMA)}, hidden, positions),
            (),
        ),
        "a layer among two": (
            put,
            (workspace, by_token, by_token, replace(read, keys=None, values=None, squares=None)),
            (0,),
        ),
        "cluster two layers": compressing_at_once(ckv.OrbitKV(SHARE)),
    }


def random_key(array):
    """A key of random numbers."""
    return array((), jax.eval_shape(lambda: jax.random.key(0)).dtype)


def surrogate_of(array, config):
    """A linear one."""
    return {
        "weights": array((config.hidden_size, config.num_kv_heads), F32),
        "bias": array((config.num_kv_heads,), F32),
    }


def decoding(array):
    """Steps of two layers by methods, types of rows and models."""
    of = partial(decode_of, array)
    recall = ckv.ClusterKV(ckv.Budget(tokens=RECALLED), dense_layers=0)
    windows = {"window": 4096, "sliding_layers": (0,), "local_rope": LLAMA.rope, "soft_cap": 50.0}
    described = {
        "decode": of(ckv.CentroidKV(SHARE)),
        "decode a batch": of(ckv.CentroidKV(SHARE), batch=24),
        "decode by scores": of(ckv.OrbitKV(SHARE)),
        "decode by shares": of(ckv.OrbitKV(replace(SHARE, shares=SHARES))),
        "decode of int8": of(ckv.CentroidKV(SHARE, cache_dtype="int8")),
        "decode with pages": of(ckv.AdaKV(SHARE)),
        "decode of int4 with pages": of(ckv.AdaKV(SHARE, cache_dtype="int4")),
        "decode with recall": of(recall),
        "decode with sink logits": of(ckv.CentroidKV(SHARE), window=128, sliding_layers=(0,), sink_logits=True),
        "decode with windows": of(ckv.CentroidKV(SHARE), **windows),
        "decode with experts": of(ckv.CentroidKV(SHARE), model_config("qwen3-30b-a3b"), max_positions=2 * PROMPT),
    }
    # From 0.11 on a described argument cannot be moved to the host within the program that takes it.
    if jax.__version_info__ < (0, 11):
        described["decode with recall from the host"] = of(replace(recall, store="host"))
    return described


def decode_of(array, method, model=LLAMA, batch=BATCH, **changes):
    """A call of the decode loop."""
    config = replace(model, vocab_size=32768, intermediate_size=1024, num_layers=2, **changes)

    def decode(params, cache, token, ended, key, number):
        # A described device has one memory, so that a host store has to be moved there within the program.
        both = zip(cache.layers, cache.state, strict=True)
        layers = [with_groups(layer, list(map(place, groups(layer), state))) for layer, state in both]
        cache = replace(cache, layers=tuple(layers))
        fixed = {"sampling": ckv.Sampling(), "eos_ids": (), "steps": 32}
        state = DecodeState(cache, token, ended)
        return decode_loop(params, config, method, state, key, number, number, **fixed)

    params = jax.tree.map(lambda spec: array(spec.shape, BF16), abstract(config))
    if "scores" in method.inputs(0):
        surrogate = surrogate_of(array, config)
        params = params | {"layers": tuple(layer | {"surrogate": surrogate} for layer in params["layers"])}
    inputs = (array((BATCH, PROMPT), I32), array((BATCH,), I32))
    caches, _ = jax.eval_shape(
        lambda p, *inputs: ckv.prefill(p, config, method, *inputs, max_new_tokens=384), params, *inputs
    )
    caches = jax.eval_shape(lambda caches: take_sequences(caches, jnp.zeros(batch, I32)), caches)
    caches = jax.tree.map(lambda x: array(x.shape, x.dtype), caches)
    state = params, caches, array((batch,), I32), array((batch,), bool), random_key(array), array((), I32)
    return decode, state, () if getattr(method, "store", None) == "host" else (1, 2, 3)


def experts(array):
    """Tokens through the experts of Qwen3-30B-A3B and of gpt-oss."""

    def through(experts, inputs, tokens, **biases):
        count, inner = experts.count, experts.intermediate_size
        shapes = {"router": (count, inputs), "down": (count, inner, inputs), **biases}
        shapes |= dict.fromkeys(("gate", "up"), (count, inputs, inner))
        weights = {name: array(shape, BF16) for name, shape in shapes.items()}
        return lambda w, x: mixture(w, experts, jax.nn.silu, x), (weights, array((*tokens, inputs), BF16)), ()

    def coded(inputs, outputs):
        codes, scales = array((128, inputs // 2, outputs), jnp.uint8), array((128, inputs // 128, outputs), jnp.float16)
        names = ("experts", "model", "mlp")
        return QuantisedWeights(codes, scales, scales, "int4", (128, inputs, outputs), (1,), names)

    def of_codes(weights, x):
        return mixture(weights, Experts(128, 8, 768), jax.nn.silu, x)

    in_codes = {"router": array((128, 2048), BF16), "gate": coded(2048, 768), "up": coded(2048, 768)}
    in_codes["down"] = coded(768, 2048)
    of_qwen = partial(through, Experts(128, 8, 768), 2048)
    of_gpt_oss = partial(through, Experts(32, 4, 2880, bias=True, clamp=ClampedSwiglu()), 2880)
    biases = {f"{name}_bias": (32, 2880) for name in ("gate", "up", "down")}
    return {
        "experts of a token": of_qwen((1, 1)),
        "experts of a batch": of_qwen((16, 1)),
        "experts in codes": (of_codes, (in_codes, array((1, 1, 2048), BF16)), ()),
        "experts of a prompt": of_qwen((1, 4096)),
        "experts with biases": of_gpt_oss((8, 1), router_bias=(32,), **biases),
    }


def compile_all() -> dict[str, dict[str, Any]]:
    """Every program compiled for one H100, and what fills shared memory for a GPU with less of it too."""
    target = Path(__file__).with_name("h100.txtpb").read_text()
    small = target.replace("NVIDIA H100 80GB HBM3", "NVIDIA L4").replace("major: 9 }", "major: 8 minor: 9 }")
    small = re.sub(r"(shared_memory_per_(?:core|block_optin)): \d+", r"\1: 101376", small)
    hopper = compile_for(target, lambda name: True)
    few = compile_for(small, lambda name: name == "kmeans" or name.startswith("matching of wide keys"))
    return hopper | {f"{name}, little shared memory": program for name, program in few.items()}


def compile_for(target: str, includes: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
    """The programs wanted by their names, compiled for the GPU that `target` describes."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1 x 1 x 1", target_config=target
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("x",))

    results = {}
    with jax.set_mesh(mesh):
        described = programs(partial(on_mesh, mesh))
    for name, (function, args, donated) in described.items():
        if not includes(name):
            continue
        with jax.set_mesh(mesh):
            options = ON_ONE if name.startswith("decode") else None  # as `decode_loop` is compiled
            compiled = jax.jit(function, donate_argnums=donated).lower(*args).compile(options)
        memory = compiled.memory_analysis()
        results[name] = {
            "kernels": len(re.findall(r"triton", compiled.as_text())),
            "names": sorted(set(re.findall(r'name = \\?"(\w+)', compiled.as_text()))),
            "waits": bool(re.findall("barrier", compiled.as_text())),
            "launches": launches(compiled.as_text()),
            "operands": most_operands(compiled.as_text()),
            "results": most_results(compiled.as_text()),
            "products": len(re.findall(r"gemm_fusion\S* = ", compiled.as_text())),
            "loops": len(re.findall(r" while\(", compiled.as_text())),
            "temporary": memory.temp_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "host": memory.host_output_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
        }
    return results


if __name__ == "__main__":
    print(json.dumps(compile_all()))
