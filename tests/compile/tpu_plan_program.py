"""Plans a model for a TPU, and compiles directly what the plan says something about; run by test_tpu_plan.

Prints as JSON the plan's measures, what the compiler tells of the program of all layers and of another context, and
what the programs of few layers say of that of all.
A process of its own, as tpu_decode_program.

Usage: python tests/compile/tpu_plan_program.py FOLDER TOPOLOGY METHOD CONTEXT
"""

import json
import sys
from dataclasses import asdict, replace

from clusterkv_jax.planning import compile_stats
from clusterkv_jax.planning.abstract_request import ProgramJob, chip_bytes
from clusterkv_jax.planning.collectives import per_step
from clusterkv_jax.planning.devices import devices_of
from clusterkv_jax.planning.plan_types import PlanRequest
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.planning.topology import choose_mesh, parse_topology
from clusterkv_jax.runtime.sharding import fitted_mesh, named_mesh


def whole_programs(question: PlanRequest) -> dict[str, float]:
    """The decode program of all layers, and every program of prefill, by their own memory_analysis()."""
    config, topology = model_config(question.model), parse_topology(question.topology)
    _, text = choose_mesh(config, topology.count, question.batch, question.mesh)
    mesh = fitted_mesh(named_mesh(text, devices_of(topology)), config.num_kv_heads)
    method = compile_stats.requested_method(question)
    job = ProgramJob(config, method, mesh, question.batch, question.context, question.new_tokens)
    decode = job.decode(config.num_layers).compile()
    memory = decode.memory_analysis()
    line = compile_stats.decode_by_few_layers(job, topology, lambda doing: None, [])
    other = replace(job, context=question.context * 3 // 2)
    read, compress = other.calls[1:3]
    reading, compression = (call.lowered.compile().memory_analysis() for call in (read, compress))
    held, cache = chip_bytes(read.out), chip_bytes(compress.out[:2])
    return {
        "arguments": memory.argument_size_in_bytes,
        "cache": memory.alias_size_in_bytes,
        "decode": memory.temp_size_in_bytes,
        "decode by few layers": line["decode"],
        "collectives by few layers": sum(one.count for one in line["collectives"]),
        "programs": memory.generated_code_size_in_bytes,
        "collectives": sum(one.count for one in per_step(decode.as_text(), mesh.size)),
        "prefill of a longer context": max(
            reading.temp_size_in_bytes + reading.output_size_in_bytes,
            compression.temp_size_in_bytes + compression.output_size_in_bytes - cache + held,
        ),
    }


if __name__ == "__main__":
    asked = PlanRequest(sys.argv[1], sys.argv[3], 0.2, int(sys.argv[4]), 1, 256, sys.argv[2], None)
    print(json.dumps({"plan": asdict(compile_stats.compiled_measures(asked)), "direct": whole_programs(asked)}))
