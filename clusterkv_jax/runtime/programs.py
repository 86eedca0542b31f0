"""Compiled programs: kept while there is room, and compiled before a request runs.

A program takes memory mappings, a hundred or more on a CPU. Linux grants a process 65,530, and the compiler crashes
without them. So programs that `jit` makes are dropped, the least recently used first, before half of them are in use.

A program is compiled for the shapes of its arguments alone, so that what one returns, and the next one takes, need not
exist. A call of the same program with such arguments then compiles nothing, and a first token takes what a first token
takes.
"""

import contextlib
import inspect
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from clusterkv_jax.runtime.dispatch import platform
from clusterkv_jax.runtime.sharding import ambient_mesh, on_one_device

Function = TypeVar("Function", bound=Callable[..., Any])
_log = logging.getLogger(__name__)

_MAPPINGS, _MOST_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
# jax keeps the programs of a function, and all of them as long as the function: so each has a copy of its own here, by
# what distinguishes it, the least recently used first.
_kept: OrderedDict[Any, Any] = OrderedDict()
_lock = threading.Lock()
# Whose compiling a block of `compilation` counts: its thread's, and that of threads it waits for.
_aside: ContextVar["_Aside | None"] = ContextVar("aside", default=None)

# What jax calls tracing, compiling, and finding a program in its compilation cache.
_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"

# For the compiler of GPUs. On one, launches of a step that need nothing from each other may run side by side. On
# several a step's graphs end at collectives, so two launches have to make a graph.
ON_ONE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
ON_SEVERAL = {"xla_gpu_graph_min_graph_size": 2}

# Where nothing is traced; jax takes options of a program alone, not of one inside another.
_ALONE = get_opaque_trace_state(convention="jit")


def jit(
    *, static_argnames: tuple[str, ...] = (), donate_argnames: tuple[str, ...] = (), decodes: bool = False
) -> Callable[[Function], Function]:
    """`jax.jit`, as a decorator, for what is called with many methods and shapes: `make_room` may drop its programs.

    A dropped program is compiled again when it is called again. Results do not change. A program that `decodes` has
    many short launches.
    """
    return lambda function: _droppable(function, static_argnames, donate_argnames, decodes)


def _droppable(function: Any, static_argnames: tuple[str, ...], donate_argnames: tuple[str, ...], decodes: bool) -> Any:
    signature = inspect.signature(function)

    def program(args: Any, kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        static = tuple(arguments.pop(name, None) for name in static_argnames)
        leaves, tree = jax.tree.flatten(arguments)
        own = _compiler_options() if decodes else {}
        key = function, static, tuple(own), tree, _described(leaves, by_value=False)
        with _lock:
            if (kept := _kept.get(key)) is not None:
                _kept.move_to_end(key)
                return kept
        make_room()
        options: Any = {"compiler_options": own} if own else {}
        fresh = jax.jit(partial(function), static_argnames=static_argnames, donate_argnames=donate_argnames, **options)
        with _lock:
            return _kept.setdefault(key, fresh)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return program(args, kwargs)(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return program(args, kwargs).lower(*args, **kwargs)

    vars(call)["lower"] = lower
    return call


def _compiler_options() -> dict[str, Any]:
    """Those of a program of its own for GPUs, which has many short launches, as far as the compiler takes them."""
    if platform() != "gpu" or get_opaque_trace_state(convention="jit") != _ALONE:
        return {}
    options = ON_ONE if on_one_device() else ON_SEVERAL
    return options if _compiler_takes(tuple(options.items())) else {}


@cache
def _compiler_takes(options: tuple[tuple[str, Any], ...]) -> bool:
    """Options come and go with compilers."""
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=dict(options)).lower().compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True


def make_room(limit: int | None = None) -> None:
    """Drop programs, the least recently used half at a time, while the process has more than `limit` memory mappings.

    `limit` is half of what Linux grants by default. Other systems have none, and nothing is dropped there.
    """
    if not _MAPPINGS.exists():
        return
    limit = int(_MOST_MAPPINGS.read_text()) // 2 if limit is None else limit
    while (count := mappings()) > limit and _kept:
        with _lock:
            oldest = [_kept.popitem(last=False) for _ in range((len(_kept) + 1) // 2)]
        _log.info("%d memory mappings are more than %d: dropping %d programs.", count, limit, len(oldest))
        del oldest


def mappings() -> int:
    """The process's memory mappings, of which Linux grants `vm.max_map_count`; 0 on other systems."""
    return _MAPPINGS.read_bytes().count(b"\n") if _MAPPINGS.exists() else 0


@dataclass
class Compilation:
    """Seconds in which a program was traced, lowered or compiled, how many programs came of it, and how many of them a
    cache on disk had ready.
    """

    seconds: float = 0.0
    programs: int = 0
    cached: int = 0


@dataclass(frozen=True)
class _Aside:
    """Threads that compile for a block, and the programs that they compile."""

    threads: set[int]
    programs: list[Future[Any]]

    def compiled(self, lowered: Any) -> Any:
        self.threads.add(threading.get_ident())
        return lowered.compile()


@contextlib.contextmanager
def compilation() -> Iterator[Compilation]:
    """What compiling takes inside the block, tracing included; waits for what a `compiler` still compiles. What other
    threads compile for themselves, another replica's say, is not counted.

    A program's error is raised at the block's end. After an error, or an interrupt, no other program is begun.
    """
    total, spans, lock = Compilation(), [], threading.Lock()
    aside = _Aside({threading.get_ident()}, [])

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if threading.get_ident() in aside.threads and event in (_TRACED, _LOWERED, _COMPILED):
            end = time.monotonic()
            with lock:
                spans.append((end - duration_secs, end))
                total.seconds = covered(spans)
                total.programs += event == _COMPILED

    def on_event(event: str, **_: str | int) -> None:
        with lock:
            total.cached += event == _FOUND and threading.get_ident() in aside.threads

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    token = _aside.set(aside)
    try:
        yield total
        for program in aside.programs:
            program.result()
    finally:
        for program in aside.programs:
            program.cancel()
        _aside.reset(token)
        jax.monitoring.unregister_event_duration_listener(on_duration)
        jax.monitoring.unregister_event_listener(on_event)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of all spans of time (begin, end) together; what several share counts once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def compiler(on_program: Callable[[str], None] = lambda name: None) -> Callable[..., Any]:
    """compile(program, *args, **static): compiles a jitted program and returns the shapes of its results.

    Arguments may be arrays, shapes, or static. A program is compiled once for equal arguments. `on_program` is called
    with the name of each program that is about to be compiled. Inside of `compilation`, which waits for them, a CPU's
    programs are compiled by threads while the next ones are traced.
    """
    results: dict[Any, Any] = {}
    aside = _aside.get() if platform() == "cpu" and ambient_mesh() is None else None
    threads = ThreadPoolExecutor(os.cpu_count())  # none before the first program

    def compile(program: Any, *args: Any, **static: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, static))
        key = program, tree, _described(leaves)
        if key not in results:
            on_program(program.__name__.lstrip("_"))
            lowered = program.lower(*args, **static)
            if aside is None:
                results[key] = _shapes(lowered.out_info, lowered.compile())
            else:
                aside.programs.append(threads.submit(aside.compiled, lowered))
                results[key] = _shapes(lowered.out_info, None)
        return results[key]

    return compile


def _described(leaves: Sequence[Any], *, by_value: bool = True) -> tuple[Any, ...]:
    """Arguments by what distinguishes programs: arrays by their shapes, all else by its value, or by its type alone."""
    other = (lambda leaf: leaf) if by_value else type
    # Arrays of jax look both up there, in Python: a call of a thousand arrays would take half a millisecond more.
    looked_up = [getattr(leaf, "aval", leaf) for leaf in leaves]
    shapes = (leaf.shape if hasattr(leaf, "shape") else other(leaf) for leaf in looked_up)
    return *shapes, *(getattr(leaf, "dtype", None) for leaf in looked_up)


def _shapes(out: Any, compiled: Any) -> Any:
    """Results without contents; over a mesh, laid out as the compiled program leaves them."""
    if ambient_mesh() is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), out, compiled.output_shardings
    )
