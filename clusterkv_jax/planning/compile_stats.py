"""From a question to measures: programs are traced, compiled for the mesh, and asked what they allocate.

A TPU's compiler needs no TPU. For GPUs only collectives are read from a program, which is compiled for as many devices
of the CPU; what a CPU's program allocates says nothing about a GPU's, so temporaries are estimated by arithmetic.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from clusterkv_jax.blocks.linear import TOKENS_AT_ONCE
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.layers import KVCache, groups
from clusterkv_jax.decoding.appending import append_to_layer
from clusterkv_jax.methods import Full, Method
from clusterkv_jax.methods.driver import LayerPrompt
from clusterkv_jax.methods.gating import back_to_budget
from clusterkv_jax.methods.prefill_compression import layers_in_a_row, most_at_once, prompt_shapes
from clusterkv_jax.methods.request import LayerPlan
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.planning.abstract_request import ProgramCall, ProgramJob, chip_bytes, placed
from clusterkv_jax.planning.arithmetic import along, of_all_layers
from clusterkv_jax.planning.collectives import per_step
from clusterkv_jax.planning.devices import devices_of
from clusterkv_jax.planning.plan_types import Measures, MeshLayout, PlanRequest, Sample
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.planning.topology import Topology, choose_mesh, parse_topology
from clusterkv_jax.presets import preset
from clusterkv_jax.runtime.sharding import check_divides, fitted_mesh, mesh_axes, named_mesh, partition, whole_axes

# Layers of the two decode programs whose difference is what a layer takes, where a program of all is refused.
FEW, MORE = 2, 4
MOST_CHIPS = 256
SHORTEST = 512
ALIGNED = 1024
OnStage = Callable[[str], None]


def requested_method(question: PlanRequest, share: float = 1.0) -> Method:
    """The method of a question, with this share of its ratio. Raises ValueError for one that cannot be planned."""
    budget = None if question.ratio is None else Budget(ratio=question.ratio * share)
    method = preset(question.method, budget)
    name = type(method).__name__
    if method.storage == "host":
        raise ValueError(f"A plan counts the chips' memory, and {name} with store='host' keeps its rows elsewhere.")
    if "repetition" in method.inputs(0):
        raise ValueError(
            f"A plan knows a model by its config.json alone, and {name} repeats a prompt by its tokenizer; take "
            "another --method."
        )
    return method


def compiled_measures(question: PlanRequest, progress: OnStage = lambda doing: None) -> Measures:
    """Everything that a plan is made of, for the topology of the question, in a process that can compile for it.

    Raises ValueError, in one sentence, for what cannot be planned.
    """
    config, topology = model_config(question.model), parse_topology(question.topology)
    sizes, text = choose_mesh(config, topology.count, question.batch, question.mesh)
    mesh = fitted_mesh(named_mesh(text, devices_of(topology)), config.num_kv_heads)
    check_divides(abstract(config), mesh)
    asked: Any = {"weights": question.weights, "gate": question.gate}
    sizes_asked = question.batch, question.context, question.new_tokens
    job = ProgramJob(config, requested_method(question), mesh, *sizes_asked, **asked)
    progress(f"tracing {question.context:,} tokens")
    _check(job)
    jobs = [job, replace(job, context=second_context(job))]
    full = replace(job, method=Full(), gate=None)
    ratios = {} if question.ratio is None else {question.ratio * share: share for share in (1.0, 0.5)}
    prefill, decode = (_for_tpu if topology.chip.platform == "tpu" else _for_gpu)(job, topology, progress)
    weights, cache = decode.pop("weights"), decode.pop("cache")
    return Measures(
        mesh=sizes,
        groups=_groups(mesh),
        batch_ways=_batch_ways(mesh, question.batch),
        batch=question.batch,
        context=question.context,
        positions=config.max_positions,
        layers=config.num_layers,
        weights=chip_bytes(job.params) * weights,
        step_reads=step_reads(job, weights, cache),
        hidden=chip_bytes(job.hidden),
        cache=tuple(Sample(at.context, chip_bytes(at.cache) * cache) for at in jobs),
        prefill=tuple(prefill),
        full_cache=chip_bytes(full.cache) * cache,
        by_ratio=tuple(
            Sample(ratio, chip_bytes(replace(job, method=requested_method(question, share)).cache) * cache)
            for ratio, share in ratios.items()
        ),
        whole=whole_axes(abstract(config), mesh),
        layouts=tuple(layouts(job)),
        learned="scores" in job.method.inputs(0),
        **decode,
    )


def _check(job: ProgramJob) -> None:
    """Traces the plan's own request, so that what is wrong with it is said of it and not of another."""
    if job.context > job.config.max_positions:
        raise ValueError(f"--context {job.context} exceeds the model's {job.config.max_positions} positions.")
    _ = job.cache


def second_context(job: ProgramJob) -> int:
    """Another context, for the slope: three quarters, so that long prompts are read in parts in both; or twice where
    that would be short.
    """
    less = job.context * 3 // 4 // ALIGNED * ALIGNED
    return less if less >= SHORTEST else min(2 * job.context, job.config.max_positions)


def halves(job: ProgramJob) -> Iterator[ProgramJob]:
    """The same job with its context, and with ever shorter ones, for compilers that refuse the longer."""
    yield job
    context = job.context // 2
    while context >= SHORTEST:
        yield replace(job, context=context)
        context //= 2


def few_and_more(config: ModelConfig) -> tuple[int, ...]:
    """The layers of two decode programs whose difference is of whole turns of the model's kinds of layers."""
    count, kinds = config.num_layers, [layer in config.sliding_layers for layer in range(config.num_layers)]
    turn = next(size for size in range(1, count + 1) if kinds == (kinds[:size] * count)[:count])
    unit = turn * -(-FEW // turn)
    return tuple(sorted({min(size, count) for size in (unit, MORE // FEW * unit)}))


def _groups(mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in mesh_axes("batch", mesh))


def _batch_ways(mesh: Mesh, batch: int) -> int:
    return _groups(mesh) if batch % _groups(mesh) == 0 else 1


# --- TPUs: compiled ---


def _for_tpu(job: ProgramJob, topology: Topology, progress: OnStage) -> tuple[list[Sample], dict[str, Any]]:
    """Temporaries of prefill at two contexts, and what the decode programs tell."""
    refusals: list[str] = []
    for at in halves(job):
        points, code = [], 0.0
        for near in (at, replace(at, context=second_context(at))):
            doing = f"prefill of {near.batch} x {near.context:,} tokens"
            progress(f"compiling {doing} for {topology.name}")
            try:
                compiled, program = prefill_temporaries(near)
            except jax.errors.JaxRuntimeError as error:
                refusals.append(_refusal(error, doing))
                break
            points.append(Sample(near.context, compiled))
            code = max(code, program)
        if len(points) == 2:
            decode = decode_measures(job, topology, progress, refusals)
            return points, decode | {"programs": decode["programs"] + code, "refusals": tuple(refusals)}
    raise ValueError(f"{topology.name} cannot read even a short prompt: {refusals[-1][:-1]}.")


def prefill_temporaries(job: ProgramJob) -> tuple[float, float]:
    """The most that a program of prefill needs beside parameters and caches, and the size of all programs.

    Of layers with different plans, the one that leaves the largest cache is compiled and the one that leaves the
    smallest.
    """
    distinct = list({id(call): call for call in job.calls}.values())
    if job.reading_bytes:
        return gated_temporaries(job, distinct)
    layers = [call for call in distinct if _plan(call)]
    others = [call for call in distinct if not _plan(call)]
    ends = [pick(layers, key=lambda call: chip_bytes(call.out[0])) for pick in (max, min)]
    chosen = list({id(call): call for call in ends}.values())
    needs, code = [], 0.0
    for call in [*others, *chosen]:
        memory = call.lowered.compile().memory_analysis()
        needs.append(needed(job, call, memory))
        programs = len(layers) / len(chosen) if call in chosen else 1
        code += programs * memory.generated_code_size_in_bytes
    return max(needs), code


def gated_temporaries(job: ProgramJob, calls: Sequence[ProgramCall]) -> tuple[float, float]:
    """The same with a gate, by the programs of a chunk, of which one gives a layer's rows new memory."""
    of_chunk = [call for call in calls if call.program in (append_to_layer, back_to_budget)]
    memories = [call.lowered.compile().memory_analysis() for call in of_chunk]
    code = sum(memory.generated_code_size_in_bytes for memory in memories)
    needs = (x.temp_size_in_bytes + x.output_size_in_bytes - x.alias_size_in_bytes for x in memories)
    return beyond_cache(job) + max(needs), code


def beyond_cache(job: ProgramJob) -> float:
    """Bytes that the caches have while a gate reads, beyond those that they become."""
    return max(0, job.reading_bytes - chip_bytes(job.cache))


def needed(job: ProgramJob, call: ProgramCall, memory: Any) -> float:
    """What is in memory while a program of prefill runs, beside parameters and the caches of all layers."""
    needs = memory.temp_size_in_bytes + memory.output_size_in_bytes
    if _plan(call):  # what was read of the layer is there beside the hidden states, and the cache is counted already
        read = next(x for x in call.args if isinstance(x, LayerPrompt))
        return needs - chip_bytes(call.out[:2]) + chip_bytes(read) + chip_bytes(job.hidden)
    # Hidden states that are handed on in place are among the results; those that are only read are not.
    reads = any(getattr(x, "shape", None) == job.hidden.shape for x in call.args)
    return needs + (chip_bytes(job.hidden) if reads and not memory.alias_size_in_bytes else 0)


def decode_measures(job: ProgramJob, topology: Topology, progress: OnStage, refusals: list[str]) -> dict[str, Any]:
    """What the decode program of all layers tells, or where the compiler refuses it, the line through few layers."""
    count = job.config.num_layers
    progress(f"compiling decode of all {count} layers for {topology.name}")
    try:
        whole = job.decode(count).compile()
    except jax.errors.JaxRuntimeError as error:
        refusals.append(_refusal(error, f"decoding {job.batch} x {job.context:,} tokens"))
        return decode_by_few_layers(job, topology, progress, refusals)
    return _extrapolated(job, (count,), [whole])


def decode_by_few_layers(job: ProgramJob, topology: Topology, progress: OnStage, refusals: list[str]) -> dict[str, Any]:
    """What decode programs of few layers tell of that of all; the context is halved where the compiler refuses it."""
    layers = few_and_more(job.config)
    for at in halves(job):
        found = []
        try:
            for count in layers:
                progress(f"compiling decode of {count} layers for {topology.name}")
                found.append(at.decode(count).compile())
        except jax.errors.JaxRuntimeError as error:
            refusals.append(
                _refusal(error, f"decoding {at.batch} x {at.context:,} tokens in {layers[len(found)]} layers")
            )
            continue
        return _extrapolated(at, layers, found)
    raise ValueError(f"{topology.name} cannot decode even {layers[0]} layers: {refusals[-1][:-1]}.")


def _extrapolated(job: ProgramJob, layers: tuple[int, ...], found: list[Any]) -> dict[str, Any]:
    memories = [one.memory_analysis() for one in found]
    few, more, total = layers[0], layers[-1], job.config.num_layers

    def line(name):
        return along(getattr(memories[0], name), getattr(memories[-1], name), few, more, total)

    steps = [per_step(one.as_text(), job.mesh.size) for one in found]
    params, cache = _first(job, more)
    last = memories[-1]
    return {
        "compiled_layers": layers,
        "decode": line("temp_size_in_bytes"),
        "programs": line("generated_code_size_in_bytes"),
        "collectives": of_all_layers(steps[0], steps[-1], (few, more, total)),
        # By how much the compiler's layouts exceed the shapes.
        "weights": (last.argument_size_in_bytes - last.alias_size_in_bytes) / chip_bytes(params),
        "cache": last.alias_size_in_bytes / chip_bytes(cache),
    }


def _first(job: ProgramJob, layers: int) -> tuple[Any, KVCache]:
    """Parameters and cache of the first layers."""
    params = {**job.params, "layers": job.params["layers"][:layers]}
    return params, replace(job.cache, layers=job.cache.layers[:layers], state=job.cache.state[:layers])


def _refusal(error: Exception, doing: str) -> str:
    """What the compiler says of a program that exceeds the chip's memory; any other error is raised again."""
    text = " ".join(str(error).split())
    if not text.startswith("RESOURCE_EXHAUSTED"):
        raise error
    return f"The compiler refuses {doing}: {text.removeprefix('RESOURCE_EXHAUSTED: ').split('. ')[0].rstrip('.')}."


# --- GPUs: arithmetic ---


def _for_gpu(job: ProgramJob, topology: Topology, progress: OnStage) -> tuple[list[Sample], dict[str, Any]]:
    """The same, of temporaries that are estimated."""
    layers = few_and_more(job.config)
    progress(f"compiling decode for {topology.count} devices of the CPU, for its collectives")
    steps = [per_step(job.decode(count).compile().as_text(), job.mesh.size) for count in layers]
    logits = job.batch / _batch_ways(job.mesh, job.batch) * job.config.vocab_size * 4
    jobs = job, replace(job, context=second_context(job))
    return [Sample(at.context, chip_bytes(at.hidden) + estimated(at) + beyond_cache(at)) for at in jobs], {
        "compiled_layers": (),
        # The logits, and the cache of a layer that is compressed.
        "decode": logits + max(map(chip_bytes, job.cache.layers)),
        "programs": 0.0,
        "collectives": of_all_layers(steps[0], steps[-1], (layers[0], layers[-1], job.config.num_layers)),
        "weights": 1.0,
        "cache": 1.0,
    }


def estimated(job: ProgramJob) -> float:
    """Temporaries of a layer's prefill beside hidden states, by its arrays: those of every token, those of as many
    tokens as go through projections and MLP at once, and rows of layers before it that wait to be compressed with it.
    """
    config = job.config

    def held(name: str, size: int) -> int:
        spec = partition((name,), (size,), job.mesh)
        return NamedSharding(job.mesh, spec).shard_shape((size,))[0]

    tokens = chip_bytes(job.hidden) / config.hidden_size / job.hidden.dtype.itemsize
    queries = held("heads", config.num_heads) * config.head_dim
    keys = held("kv_heads", config.num_kv_heads) * config.head_dim
    # A token has a row for each of its experts.
    found = {config.experts_of(layer) for layer in range(config.num_layers)}
    widths = [
        held("mlp", config.intermediate_size) + config.hidden_size
        if one is None
        else one.per_token * (held("mlp", one.intermediate_size) + config.hidden_size)
        for one in found
    ]
    # Queries and what they attend to; keys and values, and both in the order of a cache.
    arrays = tokens * (2 * queries + 4 * keys)
    here = job.hidden.dtype.itemsize * (arrays + min(tokens, TOKENS_AT_ONCE) * 2 * max(widths))
    return here + _waiting(job)


def _waiting(job: ProgramJob) -> float:
    """Bytes of what the other layers of a workspace hold."""
    plan = next(filter(None, map(_plan, job.calls)), None)
    if plan is None or job.mesh.size > 1:
        return 0.0
    layer = job.config.of_layer(job.config.global_layers[0])
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(prompt_shapes(layer, plan.inputs, job.hidden)))
    return (most_at_once(plan, size, layers_in_a_row(job.config)) - 1) * size


# --- shapes ---


def _plan(call: ProgramCall) -> LayerPlan | None:
    """The plan of a layer, of a program that compresses one."""
    return next((x for x in call.args if isinstance(x, LayerPlan)), None)


def step_reads(job: ProgramJob, weights: float, cache: float) -> float:
    """Bytes that a decode step reads: parameters but for the table of embeddings, of which it takes a row, and for
    experts that no token chooses, where all choose others; of the cache all, or of a method that keeps more than it
    attends to, the rows of its budget and its index.
    """
    table = 0 if job.config.tie_embeddings else chip_bytes(job.params["embed"])
    # With a gate a layer has another plan before, by which it is read.
    plans = [plan for call in job.calls if (plan := _plan(call))][-len(job.cache.layers) :]
    rows = 0.0
    for layer, state, plan in zip(job.cache.layers, job.cache.state, plans, strict=True):
        rows += chip_bytes(state)
        for group, planned in zip(groups(layer), plan.groups, strict=False):
            share = 1.0 if job.method.forgets else min(1.0, planned.most_rows / planned.capacity)
            rows += chip_bytes(group) * share
    return (chip_bytes(job.params) - table - _idle(job)) * weights + rows * cache


def _idle(job: ProgramJob) -> float:
    """Bytes of experts that no token of a step chooses."""
    experts = job.config.experts
    if experts is None:
        return 0.0
    tokens = job.batch / _batch_ways(job.mesh, job.batch)
    held = [chip_bytes(layer["experts"]) for layer in job.params["layers"] if "experts" in layer]
    return sum(held) * max(0.0, 1 - tokens * experts.per_token / experts.count)


def layouts(job: ProgramJob) -> Iterator[MeshLayout]:
    """What a chip holds on other meshes of two axes, by the shapes alone."""
    powers = [2**i for i in range(MOST_CHIPS.bit_length())]
    for model in (size for size in powers if job.config.num_heads % size == 0):
        split = math.gcd(model, job.config.num_kv_heads)
        for data in (size for size in powers if size * model <= MOST_CHIPS and job.batch % size == 0):
            mesh: Any = AbstractMesh((data, split, model // split), ("data", "model", "slots"))
            weights = chip_bytes(job.params_on(mesh))
            cache = chip_bytes(placed((job.cache.layers, job.cache.state), job.method, mesh))
            yield MeshLayout(
                data, model, weights, cache, math.prod(job.hidden.shape) * job.hidden.dtype.itemsize / data
            )
