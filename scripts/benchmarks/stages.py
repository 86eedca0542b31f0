"""Where a request of a server spends its time: seconds of the functions that it passes through, by name."""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clusterkv_jax.serve import Server, chat, compaction, responses

_one_more = jax.jit(lambda x: x + 1)


def wait_for_device() -> None:
    """Until the device has done what it was told before."""
    _one_more(jnp.zeros(())).block_until_ready()


def stages_of(server: Server) -> list[tuple[str, Any, str, bool]]:
    """The functions by what they do: where each stands, and whether the device works for it.

    None of them calls another one, so that their seconds add up.
    """
    core = server.engine._core
    return [
        *(("template and tokens", module, "of_conversation", False) for module in (chat, compaction, responses)),
        ("prompt read", core.prefiller, "of_prompt", True),
        ("context read", core.prefiller, "read", True),
        ("context held", core.prefiller, "of_context", True),
        ("into its slot", core.runner, "insert", True),
        ("question", core.runner, "append_questions", True),
        ("first token", core.runner, "sample_first", True),
        ("decode", core.runner, "decode", True),
        ("left behind", core.runner, "left_behind", True),
        ("compacted", core, "compact", True),
    ]


@contextlib.contextmanager
def recorded(stages: Sequence[tuple[str, Any, str, bool]]) -> Iterator[dict[str, float]]:
    """Seconds of each stage, the device's work included; whoever clears them begins anew."""
    taken: dict[str, float] = defaultdict(float)
    wait_for_device()  # compiles
    before = [(where, name, getattr(where, name)) for _, where, name, _ in stages]

    def timed(stage: str, function: Callable[..., Any], on_device: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                if on_device:
                    wait_for_device()
                taken[stage] += time.perf_counter() - begin

        return run

    for (stage, where, name, on_device), (*_, function) in zip(stages, before, strict=True):
        setattr(where, name, timed(stage, function, on_device))
    try:
        yield taken
    finally:
        for where, name, function in before:
            setattr(where, name, function)
