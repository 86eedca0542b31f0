"""Compiles a small decoder of each family for a TPU of four chips and prints what it found as JSON.

Usage: python tests/compile/tpu_family_programs.py CONFIGURATIONS, an object in JSON by the name of the family
"""

import json
import re
import sys
from typing import Any

from tpu_decode_program import COLLECTIVE, largest_array

import clusterkv_jax as ckv
from clusterkv_jax.models import registry
from clusterkv_jax.planning.abstract_request import ProgramJob, chip_bytes
from clusterkv_jax.planning.devices import tpu_devices
from clusterkv_jax.runtime.sharding import fitted_mesh, named_mesh

# Heads as wide as a tile of a TPU, and as a published model's.
WIDE = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
WIDE |= {"head_dim": 128, "kv_channels": 128, "seq_length": 4096}


def compiled(published: dict[str, Any]) -> dict[str, float]:
    """The decode loop of all layers, whose cache the chips share."""
    config = registry.from_hf(published | {name: value for name, value in WIDE.items() if name in published})
    devices = tpu_devices("v5e:2x2")
    mesh = fitted_mesh(named_mesh("data=2,model=2", devices), config.num_kv_heads)
    job = ProgramJob(config, ckv.CentroidKV(ckv.Budget(ratio=0.2)), mesh, batch=2, context=2048, new_tokens=256)
    program = job.decode(config.num_layers).compile()
    text = program.as_text()
    return {
        "cache": chip_bytes(job.cache),
        "alias": program.memory_analysis().alias_size_in_bytes,
        "conditionals": len(re.findall(r"\bconditional\(", text)),
        "largest collective": max(map(largest_array, COLLECTIVE.findall(text)), default=0),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
    }


if __name__ == "__main__":
    print(json.dumps({family: compiled(published) for family, published in json.loads(sys.argv[1]).items()}))
