"""Processes that serve one model together: what process 0 tells goes through jax.distributed, which it holds."""

import itertools
import signal
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

# Texts that are kept for those who are behind: no program of theirs is as far behind as that.
KEPT = 1000
_FOREVER_MS = 10**9


def join(address: str | None, count: int | None, index: int | None) -> None:
    """Meet the other processes. On TPU pods and under SLURM, jax finds them without arguments.

    A process that ends takes the others with it, and whoever has started them starts them again.

    Raises ValueError where nothing says who they are.
    """
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is for the server
    try:
        jax.distributed.initialize(address, count, index)
    except ValueError as error:
        raise ValueError(
            "Nothing here says which processes work together; give --coordinator-address HOST:PORT, --num-processes "
            "and --process-id."
        ) from error
    # uvicorn alone looks at SIGTERM: it lets answers end in process 0, which then tells the others to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def teller() -> Callable[[str], None]:
    """What process 0 tells the others by."""
    client: Any = distributed.global_state.client
    numbers = itertools.count()

    def tell(text: str) -> None:
        number = next(numbers)
        client.key_value_set(_name(number), text)
        if number >= KEPT:
            client.key_value_delete(_name(number - KEPT))

    return tell


def hearer() -> Callable[[], str]:
    """What the others hear process 0 by: text after text, each as soon as it is there."""
    client: Any = distributed.global_state.client
    numbers = itertools.count()
    return lambda: client.blocking_key_value_get(_name(next(numbers)), _FOREVER_MS)


def _name(number: int) -> str:
    return f"clusterkv/calls/{number}"
