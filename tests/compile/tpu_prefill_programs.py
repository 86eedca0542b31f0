"""Compiles one layer's prefill for a TPU, method by method, and prints its memory as JSON; run by test_tpu_compile.

Usage: python tests/compile/tpu_prefill_programs.py TOKENS [METHOD ...]
A process of its own, as tpu_decode_program. Prefill is a host loop over two programs, one that reads a layer and one
that compresses it: beside their own memory there are the parameters and the caches of the layers that are done.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import described

import clusterkv_jax as ckv
from clusterkv_jax.cache import groups
from clusterkv_jax.planning.described import Job, chip_bytes
from clusterkv_jax.planning.devices import tpu_devices
from clusterkv_jax.presets import list_presets, preset
from clusterkv_jax.sharding import named_mesh

CONFIG = replace(described.LLAMA, num_layers=2)
SHARE = ckv.Budget(ratio=0.2, base="prompt")


def method_of(name: str) -> Any:
    """A preset with a fifth of the prompt."""
    return preset(name, SHARE if list_presets()[name].takes_budget else None)


def compile_layer(name: str, tokens: int) -> dict[str, float]:
    """Layer 0 of Llama-3.1-8B over one prompt of `tokens` tokens, a fifth of it kept."""
    mesh = named_mesh("model=1", tpu_devices("v5p:2x2x1")[:1])
    read, compress = Job(CONFIG, method_of(name), mesh, 1, tokens, 128).calls[1:3]
    layer, rows = compress.out[0], chip_bytes(read.out[1])
    reading, compression = (call.lowered.compile().memory_analysis() for call in (read, compress))
    return {
        "cache": chip_bytes([(g.keys, g.values, g.degree) for g in groups(layer)]),
        "slots": sum(g.keys.shape[1] * g.keys.shape[2] for g in groups(layer)) / CONFIG.num_kv_heads,
        "full_cache": 2 * tokens * CONFIG.num_kv_heads * CONFIG.head_dim * 2,
        # Gate and up of the MLP; queries, what they attended to, and normalised hidden states: bf16.
        "activations": 2 * tokens * (2 * CONFIG.intermediate_size + 3 * CONFIG.hidden_size),
        "temporary": rows + max(reading.temp_size_in_bytes, compression.temp_size_in_bytes),
        "alias": reading.alias_size_in_bytes,
    }


if __name__ == "__main__":
    # Presets with shares are those of one model, and what has a model repeat its prompt needs the model's words.
    presets = {name: method_of(name) for name in list_presets()}
    others = [n for n, x in presets.items() if not x.needs(0) & {"repetition", "scores"}]
    names = sys.argv[2:] or [name for name in others if not getattr(presets[name], "budget", SHARE).shares]
    print(json.dumps({name: compile_layer(name, int(sys.argv[1])) for name in names}))
