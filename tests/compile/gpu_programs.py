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
from described import LLAMA
from described import array as on_mesh
from jax.experimental import topologies

import clusterkv_jax as ckv
from clusterkv_jax.cache import groups, take_sequences
from clusterkv_jax.decoding import DecodeState, _projected, decode_loop
from clusterkv_jax.host_store import place
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
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.kernels.row_merge import row_merge
from clusterkv_jax.kernels.row_products import row_products
from clusterkv_jax.kernels.select_rows import select_rows
from clusterkv_jax.kernels.step_in_groups import step_in_groups
from clusterkv_jax.kernels.top_rows import top_rows
from clusterkv_jax.methods.chassis import Prompt, compress_layer, with_groups
from clusterkv_jax.methods.compressing import Workspace, _compress_layers, put_into
from clusterkv_jax.methods.plan import planned_layer, plans_of_width
from clusterkv_jax.models.config import ClampedSwiglu, Experts
from clusterkv_jax.models.experts import mixture
from clusterkv_jax.models.transformer import abstract
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.programs import ON_ONE

BATCH, HEADS, QUERY_HEADS, DIM = 1, LLAMA.num_kv_heads, LLAMA.num_heads, LLAMA.head_dim
SLOTS, PROMPT, CENTROIDS, RECALLED = 13312, 65536, 400, 1024
SHARES = tuple(tuple(0.2 + 0.3 * ((3 * head + layer) % HEADS) for head in range(HEADS)) for layer in range(2))


def programs(array):
    """Every op by name: the function, its arguments as `array(shape, dtype)` describes them, what it donates."""
    bf16, i32 = jnp.bfloat16, jnp.int32
    cache = array((BATCH, HEADS, SLOTS, DIM), bf16)
    degree, length = array((BATCH, HEADS, SLOTS), jnp.float32), array((BATCH, HEADS), i32)

    def attention(dtype, tokens):
        rows = array(cache.shape, dtype)
        q = array((BATCH, tokens, QUERY_HEADS, DIM), dtype)
        return partial(biased_attention, return_lse=True, return_probs=tokens == 1), (q, rows, rows, degree, length)

    def of_codes(name, slots=SLOTS, heads=HEADS):
        scales = array((BATCH, heads, slots), jnp.float32)
        return Quantised(array((*scales.shape, row_bytes(name, DIM) - 4), CODES[name]), scales)

    def attention_of_codes(name, tokens, dtype=bf16):
        q, rows = array((BATCH, tokens, QUERY_HEADS, DIM), dtype), of_codes(name)
        return partial(biased_attention, return_lse=True, return_probs=tokens == 1), (q, rows, rows, degree, length)

    def appending_codes(name):
        rows, new = of_codes(name), of_codes(name, 1)
        own = array((BATCH, 1), i32), array((BATCH, 1), bool)
        return append_rows, (rows, rows, degree, array(degree.shape, i32), length, new, new, *own), (0, 1, 2, 3)

    def accumulated(dtype, tokens):
        q, keys = (array((BATCH, heads, tokens, DIM), dtype) for heads in (QUERY_HEADS, HEADS))
        return accumulated_attention, (q, keys, array((BATCH,), i32))

    def appending(dtype, tokens):
        rows, new = array(cache.shape, dtype), array((BATCH, HEADS, tokens, DIM), bf16)
        own = array((BATCH, tokens), i32), array((BATCH, tokens), bool)
        return append_rows, (rows, rows, degree, array(degree.shape, i32), length, new, new, *own), (0, 1, 2, 3)

    def appending_scores():
        function, args, donated = appending(bf16, 1)
        return function, (*args, degree, array((BATCH, HEADS, 1), jnp.float32)), (*donated, len(args))

    def stepping(name):
        new = [array((BATCH, HEADS, 1, DIM), bf16)] * 2 if name is None else [of_codes(name, 1)] * 2
        groups = [(SLOTS, 1), (4000, HEADS - 2), (100, 1)]
        row = lambda count, slots, dtype: array((BATCH, count, slots), dtype)  # noqa: E731
        rows = [array((BATCH, n, c, DIM), bf16) if name is None else of_codes(name, c, n) for c, n in groups]
        beside = [(row(n, c, jnp.float32), row(n, c, i32), row(n, c, jnp.float32)) for c, n in groups]
        buffers = tuple((x, x, *more) for x, more in zip(rows, beside, strict=True))
        token = array((BATCH, 1, QUERY_HEADS, DIM), bf16), *new, array((BATCH, 1), i32), array((BATCH, 1), bool)
        lengths = tuple(array((BATCH, n), i32) for _, n in groups)
        args = *token, array((BATCH, HEADS, 1), jnp.float32), buffers, lengths
        return partial(step_in_groups, heads=((2,), (0, 1, 3, 4, 5, 7), (6,))), args, (6,)

    def matching(dtype, width, chunk):
        features = array((BATCH, HEADS, SLOTS, width), dtype)
        match = lambda f, bias, rows, n: chunked_matching(f, chunk=chunk, bias=bias, index=rows, length=n)  # noqa: E731
        return match, (features, degree, array(degree.shape, i32), length)

    def paired(dtype, width=DIM):
        rows, heads = array((BATCH, HEADS, SLOTS, width), dtype), array(length.shape, jnp.float32)
        match = lambda k, v, w, bias, listed, n: chunked_matching(  # noqa: E731
            k, values=v, key_weight=w, bias=bias, index=listed, length=n, chunk=256
        )
        return match, (rows, rows, heads, degree, array(degree.shape, i32), length)

    def matching_codes(name):
        rows, listed = of_codes(name), array(degree.shape, i32)
        return lambda f, rows, n: chunked_matching(f, chunk=256, index=rows, length=n), (rows, listed, length), ()

    def merging_codes(name):
        rows, listed = of_codes(name), array(degree.shape, i32)
        edges = array((BATCH, HEADS, SLOTS // 2), i32), array((BATCH, HEADS, SLOTS // 2), jnp.float32)
        merge = partial(row_merge, chunk=256)
        return merge, (rows, rows, degree, listed, length, *edges, array((BATCH,), i32)), (0, 1, 2, 3)

    def first_layer(method):
        counts = {"reserve": 384, "step_tokens": 1, "max_new_tokens": 384}
        request, plans = plans_of_width(LLAMA, method, bf16, PROMPT, **counts)
        return planned_layer(LLAMA, method, request, np.full(BATCH, PROMPT), plans, 0)

    def compressing(method):
        plan, budgets = first_layer(method)
        run = lambda k, v, lengths, key: compress_layer(method, Prompt(None, k, v, lengths), budgets, plan, key)  # noqa: E731
        key = array((), jax.eval_shape(lambda: jax.random.key(0)).dtype)
        return run, (prompt, prompt, array((BATCH,), i32), key), ()

    def workspace_of(layers):
        number = array((BATCH, HEADS, PROMPT), jnp.float32)
        read = Prompt(None, prompt, prompt, array((BATCH,), i32), scores=number, squares=(number, number))
        return read, Workspace(jax.tree.map(lambda x: array((layers, *x.shape), x.dtype), read), array((), i32))

    def projecting():
        layer = abstract(LLAMA)["layers"][0]
        weights = jax.tree.map(lambda spec: array(spec.shape, bf16), layer)
        shapes = {"weights": (LLAMA.hidden_size, HEADS), "bias": (HEADS,)}
        weights["surrogate"] = {name: array(shape, jnp.float32) for name, shape in shapes.items()}
        hidden, positions = array((BATCH, 32768, LLAMA.hidden_size), bf16), array((BATCH, 32768), i32)
        return lambda *args: _projected(args[0], LLAMA, *args[1:]), (weights, hidden, positions), ()

    def putting(layers):
        """As projections make rows: token after token."""
        read, workspace = workspace_of(layers)
        rows = array((BATCH, PROMPT, HEADS, DIM), bf16)

        def put(workspace, keys, values, beside):
            keys, values = (jnp.swapaxes(x, 1, 2) for x in (keys, values))
            return put_into(workspace, replace(beside, keys=keys, values=values))

        return put, (workspace, rows, rows, replace(read, keys=None, values=None, squares=None)), (0,)

    def compressing_at_once(method, layers):
        plan, budgets = first_layer(method)
        _, workspace = workspace_of(layers)
        run = lambda workspace: _compress_layers(method, plan.groups[0], (budgets,) * layers, workspace)  # noqa: E731
        return run, (workspace,), (0,)

    def decoding(method, model=LLAMA, batch=BATCH, **changes):
        config = replace(model, vocab_size=32768, intermediate_size=1024, num_layers=2, **changes)

        def decode(params, cache, token, ended, key, number):
            # A described device has one memory, so that a host store has to be moved there within the program.
            both = zip(cache.layers, cache.state, strict=True)
            layers = [with_groups(layer, list(map(place, groups(layer), state))) for layer, state in both]
            cache = replace(cache, layers=tuple(layers))
            fixed = {"sampling": ckv.Sampling(), "eos_ids": (), "steps": 32}
            state = DecodeState(cache, token, ended)
            return decode_loop(params, config, method, state, key, number, number, **fixed)

        params = jax.tree.map(lambda spec: array(spec.shape, bf16), abstract(config))
        if "scores" in method.needs(0):
            shapes = {"weights": (config.hidden_size, config.num_kv_heads), "bias": (config.num_kv_heads,)}
            surrogate = {name: array(shape, jnp.float32) for name, shape in shapes.items()}
            params = params | {"layers": tuple(layer | {"surrogate": surrogate} for layer in params["layers"])}
        inputs = (array((BATCH, PROMPT), i32), array((BATCH,), i32))
        caches, _ = jax.eval_shape(
            lambda p, *inputs: ckv.prefill(p, config, method, *inputs, max_new_tokens=384), params, *inputs
        )
        caches = jax.eval_shape(lambda caches: take_sequences(caches, jnp.zeros(batch, i32)), caches)
        caches = jax.tree.map(lambda x: array(x.shape, x.dtype), caches)
        key = array((), jax.eval_shape(lambda: jax.random.key(0)).dtype)
        state = (params, caches, array((batch,), i32), array((batch,), bool), key, array((), i32))
        return decode, state, () if getattr(method, "store", None) == "host" else (1, 2, 3)

    def with_cap(function, args):
        return partial(function, soft_cap=50.0), args, ()

    def of_heads(dtype, tokens, inputs=4096):
        counts = QUERY_HEADS, HEADS, HEADS
        weights = tuple(array((count, DIM, inputs), dtype) for count in counts)
        biases = tuple(array((count, DIM), dtype) for count in counts)
        return array((tokens, inputs), dtype), weights, biases, (array((tokens, DIM // 2), jnp.float32),) * 2

    share = ckv.Budget(ratio=0.2)
    prompt = array((BATCH, HEADS, PROMPT, DIM), bf16)
    centroids = array((BATCH, HEADS, CENTROIDS, DIM), jnp.float32)
    by_both, (_, _, *beside) = paired(bf16)
    narrow, many = array((2, 1, 4104, 64), jnp.float16), array((2, 1, 1000, 64), jnp.float32)
    group = QUERY_HEADS // HEADS
    scores = array((BATCH, HEADS, group, CENTROIDS), jnp.float32)
    clusters, rows = [array((BATCH, HEADS, CENTROIDS), i32)] * 2, array((BATCH, HEADS, PROMPT), i32)
    selecting = (scores, *clusters, rows, array((BATCH,), i32))
    batched = lambda x: array((16, *x.shape[1:]), x.dtype)  # noqa: E731
    page_scores, pages = (
        array((BATCH, HEADS, group, PROMPT // 16), jnp.float32),
        array((BATCH, HEADS, PROMPT // 16), i32),
    )
    one_query, recalled = array((BATCH, HEADS, group, DIM), bf16), array((BATCH, HEADS, group, RECALLED), i32)
    recall = ckv.ClusterKV(ckv.Budget(tokens=RECALLED), dense_layers=0)
    described = {
        "attention": (*attention(bf16, 1), ()),
        "attention of a question": (*attention(bf16, 64), ()),
        "attention with a soft cap": with_cap(*attention(bf16, 1)),
        "attention of int4 with a soft cap": with_cap(*attention_of_codes("int4", 1)),
        "attention float32": (*attention(jnp.float32, 1), ()),
        **{f"attention of {name}": (*attention_of_codes(name, 1), ()) for name in CODES},
        "attention of a question of int4": (*attention_of_codes("int4", 64), ()),
        "attention of int8 float32": (*attention_of_codes("int8", 1, jnp.float32), ()),
        "accumulated attention": (*accumulated(bf16, 32768), ()),
        "accumulated attention float32": (*accumulated(jnp.float32, 4096), ()),
        "append": appending(bf16, 1),
        "append a question": appending(bf16, 64),
        "append float16": appending(jnp.float16, 1),
        "append with scores": appending_scores(),
        **{f"append {name}": appending_codes(name) for name in CODES},
        "matching": (*matching(bf16, DIM, 256), ()),
        "matching float32": (*matching(jnp.float32, 2 * DIM, 512), ()),
        "matching of keys and values": (*paired(bf16), ()),
        "matching of wide keys and values": (*paired(bf16, 2 * DIM), ()),
        "matching of keys and values float32": (*paired(jnp.float32), ()),
        **{f"matching of {name}": matching_codes(name) for name in CODES},
        "matching of keys and values of int4": (by_both, (of_codes("int4"), of_codes("int4"), *beside), ()),
        **{f"merge {name}": merging_codes(name) for name in CODES},
        "kmeans": (lloyd, (prompt, centroids), ()),
        "kmeans, many centroids": (lloyd, (narrow, many), ()),
        "index scores": (index_scores, (one_query, array(centroids.shape, bf16)), ()),
        "index scores of a batch": (index_scores, (batched(one_query), batched(array(centroids.shape, bf16))), ()),
        "index scores float32": (index_scores, (one_query, centroids), ()),
        "select": (partial(select_rows, count=RECALLED, sinks=16), selecting, ()),
        "select for a batch": (partial(select_rows, count=RECALLED, sinks=16), [batched(x) for x in selecting], ()),
        "select pages": (
            partial(select_rows, count=RECALLED),
            (page_scores, pages, pages, None, array((BATCH,), i32)),
            (),
        ),
        "recalled attention": (
            partial(recalled_attention, unlisted=320),
            (one_query, prompt, prompt, recalled, array((BATCH,), i32), length),
            (),
        ),
        "recalled attention with a soft cap": with_cap(
            partial(recalled_attention, unlisted=320),
            (one_query, prompt, prompt, recalled, array((BATCH,), i32), length),
        ),
        "rows by label": (partial(group_rows, count=CENTROIDS), (rows,), ()),
        "gather": (gather_rows, (prompt, array((BATCH, HEADS, RECALLED), i32)), ()),
        "rows that move up": (
            partial(gather_rows, in_place=True),
            (array((32, HEADS, SLOTS, DIM), jnp.int8), array((32, HEADS, SLOTS), i32)),
            (0,),
        ),
        "top rows": (top_rows, (array((BATCH, HEADS, PROMPT), jnp.float32), array((BATCH,), i32)), ()),
        "cluster": compressing(ckv.CentroidKV(share)),
        "cluster by gravity": compressing(ckv.GravityKV(share)),
        "project and score": projecting(),
        "a layer among two": putting(2),
        "cluster two layers": compressing_at_once(ckv.OrbitKV(share), 2),
        "decode": decoding(ckv.CentroidKV(share)),
        "decode a batch": decoding(ckv.CentroidKV(share), batch=24),
        "decode by scores": decoding(ckv.OrbitKV(share)),
        "decode by shares": decoding(ckv.OrbitKV(ckv.Budget(ratio=0.2, shares=SHARES))),
        "step in groups": stepping(None),
        "row products": (
            row_products,
            (array((16, 4096), bf16), array((4096, 2048), bf16), array((16, 2048), bf16)),
            (),
        ),
        "gated row products": (
            partial(row_products, gate="gelu_tanh"),
            (array((3, 4096), jnp.float16), array((4096, 14336), jnp.float16), None, array((4096, 14336), jnp.float16)),
            (),
        ),
        "gated row products of half a model": (
            partial(row_products, gate="silu"),
            (array((16, 4096), bf16), array((4096, 7168), bf16), None, array((4096, 7168), bf16)),
            (),
        ),
        "row products of half a model": (
            row_products,
            (array((16, 7168), bf16), array((7168, 4096), bf16), array((16, 4096), bf16)),
            (),
        ),
        "head products": (head_products, of_heads(bf16, 16), ()),
        "head products float16": (head_products, of_heads(jnp.float16, 1), ()),
        "head products with scores": (
            head_products,
            (
                *of_heads(bf16, 1),
                array((4096,), bf16),
                (array((HEADS, 4096), jnp.float32), array((HEADS,), jnp.float32)),
            ),
            (),
        ),
        **{f"step in groups of {name}": stepping(name) for name in CODES},
        "decode of int8": decoding(ckv.CentroidKV(share, cache_dtype="int8")),
        "decode with pages": decoding(ckv.AdaKV(share)),
        "decode of int4 with pages": decoding(ckv.AdaKV(share, cache_dtype="int4")),
        "decode with recall": decoding(recall),
        "decode with sink logits": decoding(ckv.CentroidKV(share), window=128, sliding_layers=(0,), sink_logits=True),
        "decode with windows": decoding(
            ckv.CentroidKV(share), window=4096, sliding_layers=(0,), local_rope=LLAMA.rope, soft_cap=50.0
        ),
        "decode with experts": decoding(ckv.CentroidKV(share), model_config("qwen3-30b-a3b"), max_positions=2 * PROMPT),
    }
    sizes = {"router": (128, 2048), "gate": (128, 2048, 768), "up": (128, 2048, 768), "down": (128, 768, 2048)}
    weights = {name: array(shape, bf16) for name, shape in sizes.items()}
    mix = lambda w, x: mixture(w, Experts(128, 8, 768), jax.nn.silu, x)  # noqa: E731
    described["experts of a token"] = (mix, (weights, array((1, 1, 2048), bf16)), ())
    described["experts of a batch"] = (mix, (weights, array((16, 1, 2048), bf16)), ())
    described["experts of a prompt"] = (mix, (weights, array((1, 4096, 2048), bf16)), ())
    biases = {"router_bias": (32,), "gate_bias": (32, 2880), "up_bias": (32, 2880), "down_bias": (32, 2880)}
    sizes = {"router": (32, 2880), **dict.fromkeys(("gate", "up", "down"), (32, 2880, 2880)), **biases}
    own = {name: array(shape, bf16) for name, shape in sizes.items()}
    clamped = Experts(32, 4, 2880, bias=True, clamp=ClampedSwiglu())
    biased = lambda w, x: mixture(w, clamped, jax.nn.silu, x)  # noqa: E731
    described["experts with biases"] = (biased, (own, array((8, 1, 2880), bf16)), ())
    # From 0.11 on a described argument cannot be moved to the host within the program that takes it.
    if jax.__version_info__ < (0, 11):
        described["decode with recall from the host"] = decoding(replace(recall, store="host"))
    return described


def launches(program: str) -> int:
    """Kernels and copies of a decode step: of the computation that attends."""
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\{\n)", program)
    steps = [text for text in computations if re.search("(biased_attention|step_in_groups)_attend", text)]
    return sum(len(re.findall(r" (?:fusion|custom-call|copy)\(", text)) for text in steps)


def most_operands(program: str) -> int:
    """Of a matrix product with what is fused into it."""
    return max((text.count("%") for text in re.findall(r"gemm_fusion\S* = \S+ fusion\((.*?)\)", program)), default=0)


def most_results(program: str) -> int:
    """Of a launch that XLA fuses."""
    return max((text.count("[") for text in re.findall(r" = \((.*?)\) fusion\(", program)), default=0)


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
