"""Compiles one layer's prefill for a TPU, method by method, and prints its memory as JSON; run by test_tpu_compile.

Usage: python tests/compile/tpu_prefill_programs.py TOKENS [PARTS [METHOD ...]]
A process of its own, as tpu_decode_program. Prefill is a host loop over two programs, one that reads a layer and one
that compresses it: beside their own memory there are the parameters and the caches of the layers that are done.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import described

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import groups
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.planning.abstract_request import ProgramJob, chip_bytes
from clusterkv_jax.planning.devices import tpu_devices
from clusterkv_jax.presets import list_presets, preset
from clusterkv_jax.runtime.sharding import named_mesh

CONFIG = replace(described.LLAMA, num_layers=2)
SHARE = ckv.Budget(ratio=0.2, base="prompt")


def method_of(name: str) -> Any:
    """A preset with a fifth of the prompt."""
    return preset(name, SHARE if list_presets()[name].takes_budget else None)


def compile_layer(name: str, config: ModelConfig, tokens: int) -> dict[str, float]:
    """Layer 0 of a model over one prompt of `tokens` tokens, a fifth of it kept."""
    mesh = named_mesh("model=1", tpu_devices("v5p:2x2x1")[:1])
    read, compress = ProgramJob(config, method_of(name), mesh, 1, tokens, 128).calls[1:3]
    layer, rows = compress.out[0], chip_bytes(read.out[1])
    reading, compression = (call.lowered.compile().memory_analysis() for call in (read, compress))
    return {
        "cache": chip_bytes([(g.keys, g.values, g.degree) for g in groups(layer)]),
        "slots": sum(g.keys.shape[1] * g.keys.shape[2] for g in groups(layer)) / config.num_kv_heads,
        "full_cache": 2 * tokens * config.num_kv_heads * config.head_dim * 2,
        # Gate and up of the MLP; queries, what they attended to, and normalised hidden states: bf16.
        "activations": 2 * tokens * (2 * config.intermediate_size + 3 * config.hidden_size),
        "temporary": rows + max(reading.temp_size_in_bytes, compression.temp_size_in_bytes),
        "alias": reading.alias_size_in_bytes,
    }


def budgeted() -> list[str]:
    """Presets but those with shares, which are those of one model, and what needs the model's words or scores."""
    presets = {name: method_of(name) for name in list_presets()}
    others = [n for n, x in presets.items() if not x.inputs(0) & {"repetition", "scores"}]
    return [name for name in others if not getattr(presets[name], "budget", SHARE).shares]


def part(config: ModelConfig, parts: int) -> ModelConfig:
    """A model of one in so many heads and hidden units, which compiles sooner."""
    names = ("num_heads", "num_kv_heads", "hidden_size", "intermediate_size")
    return replace(config, **{name: getattr(config, name) // parts for name in names})


if __name__ == "__main__":
    tokens, parts = int(sys.argv[1]), int((*sys.argv[2:], 1)[0])
    config = part(CONFIG, parts)
    print(json.dumps({name: compile_layer(name, config, tokens) for name in sys.argv[3:] or budgeted()}))
