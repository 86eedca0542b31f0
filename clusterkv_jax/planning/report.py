"""A plan as one object: what `--json` prints, and what the tables are made of. Bytes are those of one chip."""

from typing import Any

from clusterkv_jax.planning import arithmetic
from clusterkv_jax.planning.plan_types import Measures, MeshLayout, PlanRequest
from clusterkv_jax.planning.topology import GIB, Topology


def plan(question: PlanRequest, measures: Measures, topology: Topology) -> dict[str, Any]:
    """All that is said of a question, as numbers and sentences."""
    memory, chip = arithmetic.memory(measures), topology.chip
    remedies, floor = arithmetic.remedies(measures, chip), arithmetic.roofline(measures, chip)
    return {
        "model": question.model,
        "method": question.method,
        "cache_ratio": question.ratio,
        "context": question.context,
        "batch": question.batch,
        "max_new_tokens": question.new_tokens,
        "topology": topology.name,
        "chips": topology.count,
        "mesh": measures.mesh,
        "hbm": {
            "capacity": round(chip.hbm),
            "weights": round(memory.weights),
            "cache": round(memory.cache),
            "programs": round(memory.programs),
            "prefill_temporaries": round(memory.prefill),
            "decode_temporaries": round(memory.decode),
            "total": round(memory.total),
        },
        "full_cache": round(measures.full_cache),
        "fits": memory.total <= chip.hbm,
        "spare": round(chip.hbm - memory.total),
        "largest_batch": remedies.batch,
        "longest_context": remedies.context,
        "largest_ratio": remedies.ratio,
        "fewest_chips": _layout(remedies.layout),
        "collectives": [
            {"kind": one.kind, "count": one.count, "bytes": round(one.bytes)} for one in measures.collectives
        ],
        "roofline": {"read_ms": floor.read_ms, "sent_ms": floor.sent_ms, "ms_per_token": floor.total_ms},
        "notes": notes(question, measures, topology),
        "refusals": list(measures.refusals),
    }


def _layout(layout: MeshLayout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    return {"chips": layout.data * layout.model, "mesh": mesh_text({"data": layout.data, "model": layout.model})}


def mesh_text(sizes: dict[str, int]) -> str:
    """ "data=2,model=4": a mesh as `--mesh` takes it."""
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "model")


def notes(question: PlanRequest, measures: Measures, topology: Topology) -> list[str]:
    """What the numbers rest on, a sentence each."""
    found = []
    groups = measures.groups
    if question.mesh is None:
        found.append(
            f"The mesh is {mesh_text(measures.mesh)}, by the heads of the model and the batch; --mesh takes another."
        )
    if groups > measures.batch_ways:
        found.append(f"A batch of {measures.batch} is not divided by {groups}: every group of chips reads all of it.")
    if measures.whole:
        found.append(f"The mesh does not divide {' and '.join(measures.whole)}, which stay whole on every chip.")
    if measures.compiled_layers:
        few, more = measures.compiled_layers[0], measures.compiled_layers[-1]
        if more == measures.layers:
            found.append(f"The decode program of all {measures.layers} layers was compiled.")
        else:
            found.append(
                f"Decode programs of {few} and {more} layers were compiled; {measures.layers} follow the line."
            )
        at = " and ".join(f"{point.at:,.0f}" for point in measures.prefill)
        found.append(f"Prefill was compiled for {at} tokens; limits follow the line.")
    else:
        found.append(
            "Temporaries are estimated from the arrays of a layer; collectives are those of a program for as many "
            "devices of the CPU, which adds 16-bit numbers as 32-bit ones."
        )
    if measures.learned:
        found.append(f"{question.method} is planned with a linear surrogate of scores and equal shares of all heads.")
    found.append("Milliseconds are what bandwidths alone allow; each collective costs its latency too.")
    return found


def verdict(found: dict[str, Any]) -> str:
    """Whether it fits, by how much, and what would."""
    amount = abs(found["spare"]) / GIB
    if found["fits"]:
        return f"It fits, with {amount:.2f} GiB of each chip to spare."
    changes = []
    if found["largest_batch"]:
        changes.append(f"a batch of {found['largest_batch']:,}")
    if found["longest_context"]:
        changes.append(f"a context of {found['longest_context']:,}")
    if found["largest_ratio"]:
        changes.append(f"a cache ratio of {found['largest_ratio']:g}")
    if found["fewest_chips"]:
        changes.append(f"{found['fewest_chips']['chips']} such chips as --mesh {found['fewest_chips']['mesh']}")
    lacks = f"It does not fit: each chip lacks {amount:.2f} GiB."
    if not changes:
        return f"{lacks} No batch, context, ratio or number of chips alone would fit."
    *some, last = changes
    return f"{lacks} Any of these alone would fit: {', '.join(some)}{' or ' if some else ''}{last}."
