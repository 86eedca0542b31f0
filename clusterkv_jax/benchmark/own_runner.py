"""Requests timed with this library, as `generate` answers them."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from clusterkv_jax.benchmark.common import random_prompt
from clusterkv_jax.benchmark.grid import Cell, GridRequest
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.layers import KVCache, occupancy, take_sequences
from clusterkv_jax.checkpoints.in_codes import code_shapes, kind_of
from clusterkv_jax.checkpoints.loading import Model, load
from clusterkv_jax.decoding import SEGMENT, DecodeState, decode_loop
from clusterkv_jax.generation import generate
from clusterkv_jax.generation.batch import Batch, make_batch
from clusterkv_jax.generation.stages import prefill_batch
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.recompression import due
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params, abstract
from clusterkv_jax.planning.shapes import model_config, packaged_shapes
from clusterkv_jax.presets import completed, preset
from clusterkv_jax.runtime.extras import versions
from clusterkv_jax.runtime.prng import seed_key
from clusterkv_jax.runtime.sharding import check_divides, fitted_mesh, named_mesh, on_mesh, param_shardings, replicated
from clusterkv_jax.sampling import Sampling

VERSIONS = ("clusterkv-jax", "jax")
# Bytes that are read at a time to find the bandwidth, and how often; elsewhere a GiB 32 times.
READS = {"cpu": (2**27, 2)}


def hello() -> dict[str, Any]:
    """What this side is."""
    return {
        "device": the_device(),
        "platform": jax.default_backend(),
        "versions": {"python": platform.python_version(), **versions(VERSIONS)},
    }


def the_device() -> str:
    """What this side runs on; a CPU by its cores, as many as this process may use."""
    if jax.default_backend() != "cpu":
        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} {platform.machine()} core{'' if cores == 1 else 's'}"


def the_model(asked: GridRequest) -> Model:
    """The model with its weights, or random ones where a packaged shape has none; it never ends a text.

    Random weights are given positions for all that is asked.
    """
    mesh = None if asked.mesh is None else named_mesh(asked.mesh)
    if asked.model not in packaged_shapes():
        model = load(asked.model, mesh=mesh, weights=asked.weights)
        return replace(model, config=replace(model.config, eos_ids=()))
    config = model_config(asked.model)
    positions = max(config.max_positions, max(asked.lengths) + asked.new_tokens)
    config = replace(config, eos_ids=(), max_positions=positions)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.dtype(config.dtype)
    check_host_memory(asked.model, config, dtype)
    return Model(random_params(config, dtype, mesh, asked.weights), config, None, mesh, asked.model)


def check_host_memory(name: str, config: ModelConfig, dtype: Any) -> None:
    """Raise MemoryError where a CPU has no room for the weights: the system would end the process without a word."""
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return
    need = sum(math.prod(spec.shape) for spec in jax.tree.leaves(abstract(config))) * jnp.dtype(dtype).itemsize
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > most:
        raise MemoryError(
            f"{name} has {need / 2**30:.0f} GiB of weights in {jnp.dtype(dtype)}, more than the {most / 2**30:.0f} GiB "
            "of this machine; on a CPU --model demo is a model that fits."
        )


def random_params(config: ModelConfig, dtype: Any, mesh: Mesh | None = None, weights: str | None = None) -> Params:
    """Random weights, and a surrogate of learned scores in each layer, born on their devices.

    Products are in codes where `weights` is "int8" or "int4"; those of experts alone where it is "mxfp4".
    """
    specs = abstract(config)
    fitted = None if mesh is None else fitted_mesh(mesh, config.num_kv_heads)
    if fitted is not None:
        check_divides(specs, fitted)
    shardings = jax.tree.map(lambda _: None, specs) if fitted is None else param_shardings(specs, fitted)
    keys = iter(jax.random.split(seed_key(0), len(jax.tree.leaves(specs))))

    @cache
    def generator(shape: tuple[int, ...], init: Any, sharding: Any) -> Any:
        """Equal shapes share one."""
        return jax.jit(lambda key: init(key, shape, dtype), out_shardings=sharding)

    def draw(path: Any, spec: Any, sharding: Any) -> Any:
        shapes = code_shapes(spec, path[-1].key, kind_of(path[-1].key, weights), fitted)
        if shapes is not None:
            return codes_generator(shapes)(next(keys))
        init = jax.nn.initializers.ones if len(spec.shape) == 1 else _normal
        return generator(spec.shape, init, sharding)(next(keys))

    params = jax.tree.map_with_path(draw, specs, shardings)
    shape = config.hidden_size, config.num_kv_heads
    surrogate = {"weights": jax.random.normal(seed_key(1), shape), "bias": jnp.zeros(shape[1])}
    if fitted is not None:  # or each call of a program would copy it to the other devices
        surrogate = jax.device_put(surrogate, replicated(fitted))
    return params | {"layers": tuple({**layer, "surrogate": surrogate} for layer in params["layers"])}


@cache
def codes_generator(shapes: QuantisedWeights) -> Callable[[jax.Array], QuantisedWeights]:
    """Of a key, random codes of the size of other random weights, as wide as these shapes and where they say."""
    # Of codes that are all as likely. A power of two, as mxfp4 has, is within a factor of sqrt(2).
    spread = {"int8": 255 / 12**0.5, "int4": 15 / 12**0.5, "mxfp4": 2.9}[shapes.kind]
    scale = shapes.inputs**-0.5 / spread
    scale = 127 + round(math.log2(scale)) if shapes.kind == "mxfp4" else scale

    def draw(key: jax.Array) -> QuantisedWeights:
        bits = jax.random.bits(key, shapes.codes.shape, jnp.uint8)
        codes = jax.lax.bitcast_convert_type(bits, shapes.codes.dtype)
        scales = jnp.full(shapes.scales.shape, scale, shapes.scales.dtype)
        return replace(shapes, codes=codes, scales=scales, offsets=None if shapes.offsets is None else scales / 2)

    return jax.jit(draw, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (shape[-1] ** -0.5 * jax.random.normal(key, shape, dtype)).astype(dtype)


def measure(model: Model, new_tokens: int, cell: Cell, repeat: int) -> dict[str, Any]:
    """One request of a cell. Repeat 0 compiles, and tells what does not change from one to the next.

    A batch is one prompt, read once, whose cache is copied for each sequence: so does `generate` with equal prompts.

    Raises ValueError for a cell that is impossible, MemoryError for one that does not fit.
    """
    method, prompts = the_method(model, cell), [random_prompt(model.config.vocab_size, cell.length)] * cell.batch
    request = partial(generate, model, prompts, method=method, max_new_tokens=new_tokens)
    earlier = peak_bytes()
    stats = request().stats
    times = {"ttft_s": stats.ttft_s, "tpot_s": stats.tpot_s}
    if repeat:
        return times | {"bandwidth": read_bandwidth()}
    peak = peak_bytes()
    with on_mesh(model.mesh, model.config.num_kv_heads):
        cache_bytes, clustering = _steps(model, method, prompts, new_tokens)
    return times | {
        "compile_s": stats.compile_s,
        "cache_bytes": cache_bytes,
        "full_cache_bytes": stats.full_cache_bytes,
        "read_bytes": step_weights(model) + cache_bytes,
        "peak_bytes": peak,
        "earlier_peak_bytes": earlier,
        "clustering_s": clustering,
    }


def the_method(model: Model, cell: Cell) -> Method:
    """A cell's method with its budget, its type of stored rows, and what only the model knows."""
    budget = None if cell.budget is None else _budget(cell.budget)
    stored: dict[str, Any] = {} if cell.cache_dtype is None else {"cache_dtype": cell.cache_dtype}
    return completed(model, preset(cell.method, budget, **stored))


def _budget(text: float | int) -> Budget:
    return Budget(tokens=text) if isinstance(text, int) else Budget(ratio=text)


def step_weights(model: Model) -> int:
    """Bytes of weights on a device that a decode step reads: the table of embeddings only where it is the head too."""
    read = {name: part for name, part in model.params.items() if name != "embed" or model.config.tie_embeddings}
    return device_bytes(read)


def device_bytes(tree: Any) -> int:
    """Bytes of arrays on the first device, host memory left out."""
    leaves = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind in (None, "device", "unpinned_host")]
    return sum(x.addressable_shards[0].data.nbytes for x in leaves)


def peak_bytes() -> int | None:
    """The most memory that this process ever held on a device, where the platform counts it."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def read_bandwidth() -> float:
    """Bytes a second of reading arrays larger than caches on one device, by XLA's maximum of them."""
    size, reads = READS.get(jax.default_backend(), (2**30, 32))
    stack = jnp.ones((2, size // 512, 128), jnp.float32)
    run = partial(_biggest, stack, reads)
    jax.block_until_ready(run())
    return reads * stack[0].nbytes / statistics.median(_seconds(run) for _ in range(3))


@partial(jax.jit, static_argnames=("reads",))
def _biggest(stack: Float[Array, "2 rows columns"], reads: int) -> Float[Array, ""]:
    if reads == len(stack):
        return jnp.max(stack)  # a CPU reads on one core inside a loop

    def body(i: Any, top: Array) -> Array:
        return jnp.maximum(top, jnp.max(jax.lax.dynamic_index_in_dim(stack, i % 2)))

    return jax.lax.fori_loop(0, reads, body, jnp.array(-jnp.inf, stack.dtype))


def _steps(model: Model, method: Method, prompts: list[list[int]], new_tokens: int) -> tuple[int, float | None]:
    """Bytes of the batch's cache on a device, and seconds of clustering per decode step.

    Steps are timed one by one until the second clustering: a step that clusters takes longer than the median of the
    others. None for a method that clusters, but not in so many steps.
    """
    batch = make_batch(model, prompts, max_new_tokens=new_tokens)
    # Until it is there: the next timing would wait for it.
    cache = jax.block_until_ready(_read(model, method, batch))
    size = device_bytes((cache.layers, cache.state))
    if method.storage == "host":
        return size, None
    if due(method, cache) is None:
        return size, 0.0
    return size, clustering_seconds(*_timed_steps(model, method, cache, new_tokens - 1))


def clustering_seconds(times: list[float], rows: list[int]) -> float | None:
    """Seconds of clustering per step, by each step's time and the rows held after it; None where it never clusters."""
    clusters = [i for i in range(1, len(rows)) if rows[i] < rows[i - 1]]
    if not clusters:
        return None
    others = [time for i, time in enumerate(times) if i not in clusters]
    usual, last = statistics.median(others), clusters[-1]
    return sum(max(0.0, times[i] - usual) for i in clusters) / (last + 1)


def _timed_steps(model: Model, method: Method, cache: KVCache, most: int) -> tuple[list[float], list[int]]:
    size = cache.position.shape[0]
    state = DecodeState(cache, jnp.zeros(size, jnp.int32), jnp.zeros(size, bool))
    loop = partial(decode_loop, sampling=Sampling(), eos_ids=(), steps=SEGMENT)
    times, rows, drops = [], [], 0
    while len(times) < most and drops < 2:
        numbers = seed_key(0), jnp.int32(len(times) + 1), jnp.int32(1)
        begin = time.perf_counter()
        state, *_ = jax.block_until_ready(loop(model.params, model.config, method, state, *numbers))
        times.append(time.perf_counter() - begin)
        rows.append(sum(int(np.sum(layer)) for layer in occupancy(state.cache)))
        drops += len(rows) > 1 and rows[-1] < rows[-2]
    return times, rows


def _read(model: Model, method: Method, batch: Batch) -> KVCache:
    """The cache that `generate` decodes from, by the same programs."""
    cache, _ = prefill_batch(model, method, batch, seed_key(0))
    return take_sequences(cache, jnp.zeros(len(batch.texts), jnp.int32)) if len(batch.texts) > 1 else cache


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin
