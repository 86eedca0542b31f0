"""Compiles TPU kernels for v5e, v5p and v6e and prints what it found as JSON; run by test_tpu_compile.

Usage: python tests/compile/tpu_kernel_programs.py ordinary|others
Each kernel is compiled for one of them in ordinary runs, and neighbours in the list for different ones.
A process of its own, as tpu_decode_program. Shapes are those of Llama-3.1-8B: 8 KV heads of 128, 4 query heads each,
whole on one device and split over the devices of the topology.
"""

import json
import sys
from functools import partial

import described
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from clusterkv_jax.kernels.accumulated_attention import accumulated_attention
from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.kernels.kmeans import lloyd
from clusterkv_jax.kernels.quantised import CODES, Quantised, row_bytes
from clusterkv_jax.planning.devices import tpu_devices

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
KV_HEADS, QUERY_HEADS, DIM = described.LLAMA.num_kv_heads, described.LLAMA.num_heads, described.LLAMA.head_dim
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


def attention(batch, tokens, slots, *, probs=False, soft_cap=None):
    def op(q, keys, values, degree, length):
        options = {"soft_cap": soft_cap, "return_lse": True, "return_probs": probs}
        return biased_attention(q, keys, values, degree, length, **options)

    rows = ((batch, KV_HEADS, slots, DIM), BF16)
    by_head = P(None, "x")
    q = ((batch, tokens, QUERY_HEADS, DIM), BF16)
    others = [rows, rows, ((batch, KV_HEADS, slots), F32), ((batch, KV_HEADS), I32)]
    out = (P(None, None, "x"), P(None, None, "x"), *((by_head,) if probs else ()))
    return op, [(*q, P(None, None, "x")), *((*x, by_head) for x in others)], out


def attention_of_codes(name, tokens, *, probs=False):
    def op(q, keys, key_scales, values, value_scales, degree, length):
        rows = Quantised(keys, key_scales), Quantised(values, value_scales)
        return biased_attention(q, *rows, degree, length, return_lse=True, return_probs=probs)

    slots, by_head = 13184, P(None, "x")
    of_slots = (1, KV_HEADS, slots)
    codes, scales = ((*of_slots, row_bytes(name, DIM) - 4), CODES[name]), (of_slots, F32)
    others = [codes, scales, codes, scales, (of_slots, F32), ((1, KV_HEADS), I32)]
    q = ((1, tokens, QUERY_HEADS, DIM), BF16, P(None, None, "x"))
    out = (P(None, None, "x"), P(None, None, "x"), *((by_head,) if probs else ()))
    return op, [q, *((*x, by_head) for x in others)], out


def accumulated(tokens, *, dtype=BF16):
    shapes = [((1, heads, tokens, DIM), dtype) for heads in (QUERY_HEADS, KV_HEADS)]
    operands = [*((*x, P(None, "x")) for x in shapes), ((1,), I32, P())]
    return accumulated_attention, operands, P(None, "x")


def matching(rows, width, chunk, *, bias=False, dtype=BF16):
    def op(features, length, bias=None):
        return chunked_matching(features, chunk=chunk, length=length, bias=bias)

    shapes = [((1, KV_HEADS, rows, width), dtype), ((1, KV_HEADS), I32)]
    shapes += [((1, KV_HEADS, rows), F32)] if bias else []
    return op, [(*x, P(None, "x")) for x in shapes], (P(None, "x"),) * 2


def kmeans(rows, centroids):
    shapes = [((1, KV_HEADS, rows, DIM), BF16), ((1, KV_HEADS, centroids, DIM), F32), ((1, KV_HEADS), I32)]
    return lloyd, [(*x, P(None, "x")) for x in shapes], (P(None, "x"),) * 4


PROGRAMS = {
    "decode step": partial(attention, 16, 1, 13184),
    "decode step with a soft cap": partial(attention, 16, 1, 13184, soft_cap=50.0),
    "question with probabilities": partial(attention, 1, 64, 13184, probs=True),
    "decode step of int8": partial(attention_of_codes, "int8", 1),
    "decode step of float8": partial(attention_of_codes, "float8_e4m3", 1),
    "decode step of int4": partial(attention_of_codes, "int4", 1),
    "question of int4 with probabilities": partial(attention_of_codes, "int4", 64, probs=True),
    "sums of a 32k prompt": partial(accumulated, 32768),
    "sums of a short prompt, float32": partial(accumulated, 1000, dtype=F32),
    "matching of a 64k prompt": partial(matching, 65472, DIM, 256),
    "matching with values and degrees": partial(matching, 16384, 2 * DIM, 256, bias=True),
    "matching of small chunks, float32": partial(matching, 5000, 2 * DIM, 16, bias=True, dtype=F32),
    "kmeans of a 32k prompt": partial(kmeans, 32752, 409),
}
SPLIT = ("decode step",)  # over all devices of the topology; the others run whole on one


def compile_one(devices, op, operands, out_specs) -> dict[str, float]:
    """The op in shard_map over `devices`, each with its own KV heads."""
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    args = [described.array(mesh, *operand) for operand in operands]
    in_specs = tuple(spec for _, _, spec in operands)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(op, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        compiled = jax.jit(mapped).lower(*args).compile()
    (cost, *_) = costs if isinstance(costs := compiled.cost_analysis(), list) else [costs]
    return {
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "operands": sum(x.size * x.dtype.itemsize for x in args) / len(devices),
    }


if __name__ == "__main__":
    results = {}
    for place, name in enumerate(TOPOLOGIES):
        devices = tpu_devices(name)
        for number, (program, make) in enumerate(PROGRAMS.items()):
            if (number % len(TOPOLOGIES) == place) != (sys.argv[1] == "ordinary"):
                continue
            count = len(devices) if program in SPLIT else 1
            results[f"{program} on {count} {name}"] = compile_one(devices[:count], *make())
    print(json.dumps(results))
