"""`python -m clusterkv_jax.benchmark.worker`: a side of a benchmark, which times what it is told to, line by line.

A process of its own, since a device's memory goes back when its process ends. The first line from standard input says
what is asked and which side this is, each other one names a cell and a repeat; each is answered in JSON.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from clusterkv_jax.benchmark.grid import OURS, Cell, GridRequest


def main() -> None:
    """Answer until standard input ends."""
    # What libraries print must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message):
        return print(json.dumps(message), file=answers, flush=True)

    begin = json.loads(sys.stdin.readline())
    hello, measure = opened(begin["side"], msgspec.convert(begin["asked"], GridRequest))
    say(hello)
    if measure is None:
        return
    for line in sys.stdin:
        turn = json.loads(line)
        say(answer(measure, msgspec.convert(turn["cell"], Cell), turn["repeat"]))


def opened(side: str, asked: GridRequest) -> tuple[dict[str, Any], Callable[[Cell, int], dict[str, Any]] | None]:
    """What the side says of itself and how it times a cell; why it cannot, and None."""
    warnings.filterwarnings("ignore")
    try:
        if side == OURS:
            return open_ours(asked)
        from clusterkv_jax.benchmark import torch_baselines

        return torch_baselines.open_side(side, asked)
    except Exception as error:  # whatever it is, the other sides are of interest
        return {"failed": sentence(error)}, None


def open_ours(asked: GridRequest) -> tuple[dict[str, Any], Callable[[Cell, int], dict[str, Any]]]:
    """What this library is here, and how it times a cell: requests that come and go, or batches."""
    from clusterkv_jax.benchmark import own_runner, serving

    model = own_runner.the_model(asked)
    measure = (
        partial(serving.measure, model, asked)
        if asked.requests
        else partial(own_runner.measure, model, asked.new_tokens)
    )
    return own_runner.hello(), measure


def answer(measure: Callable[[Cell, int], dict[str, Any]], cell: Cell, repeat: int) -> dict[str, Any]:
    """A timing, or why there is none."""
    try:
        return measure(cell, repeat)
    except Exception as error:  # whatever it is, the other cells are of interest
        return {"failed": sentence(error)}


def sentence(error: Exception) -> str:
    """What went wrong, on one line."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    known = isinstance(error, (ValueError, MemoryError, OSError))
    return text if known else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
