"""The programs of a request, compiled before it runs: so that a first token takes what a first token takes.

A program is compiled for the shapes of its arguments alone, so that what one returns, and the next one takes, need not
exist. A call of the same program with such arguments then compiles nothing.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from clusterkv_jax.sharding import ambient_mesh

# What jax calls compiling, and finding a program in its compilation cache; tracing is not among them.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"


@dataclass
class Compilation:
    """Seconds spent lowering and compiling, the programs that came of it, and how many a cache on disk had ready."""

    seconds: float = 0.0
    programs: int = 0
    cached: int = 0


@contextlib.contextmanager
def compilation() -> Iterator[Compilation]:
    """What compiling takes inside the block, tracing left out."""
    total = Compilation()

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event in (_LOWERED, _COMPILED):
            total.seconds += duration_secs
            total.programs += event == _COMPILED

    def on_event(event: str, **_: str | int) -> None:
        total.cached += event == _FOUND

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    try:
        yield total
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
        jax.monitoring.unregister_event_listener(on_event)


def compiler(on_program: Callable[[str], None] = lambda name: None) -> Callable[..., Any]:
    """compile(program, *args, **static): compiles a jitted program and returns the shapes of its results.

    Arguments may be arrays, shapes, or static. A program is compiled once for equal arguments. `on_program` is called
    with the name of each program that is about to be compiled.
    """
    results: dict[Any, Any] = {}

    def compile(program: Any, *args: Any, **static: Any) -> Any:
        key = program, _described((args, static))
        if key not in results:
            on_program(program.__name__.lstrip("_"))
            lowered = program.lower(*args, **static)
            results[key] = _shapes(lowered.out_info, lowered.compile())
        return results[key]

    return compile


def _described(args: Any) -> tuple[Any, ...]:
    """Arguments by what distinguishes programs: arrays by their shapes."""
    leaves, tree = jax.tree.flatten(args)
    return tree, *((leaf.shape, str(leaf.dtype)) if hasattr(leaf, "shape") else leaf for leaf in leaves)


def _shapes(out: Any, compiled: Any) -> Any:
    """Results without contents; over a mesh, laid out as the compiled program leaves them."""
    if ambient_mesh() is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), out, compiled.output_shardings
    )
