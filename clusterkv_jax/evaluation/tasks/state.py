"""State that the model itself writes: it solves a problem step by step, and each step needs what earlier ones wrote.

running_sum  adds numbers one by one; a step needs the sum before it
assignments  copies variables; a step needs the value of any variable before it
sorting      inserts numbers into a list one by one; a step needs the whole list before it

The problem stands in the prompt behind worked examples. What is compressed while the model writes is its own work, so
that a budget a little above the prompt's rows measures just that. A task's name ends in its number of steps, and the
last one must be right.
"""

import string
from collections.abc import Callable, Iterator

import numpy as np

from clusterkv_jax.evaluation.tasks.cases import Case
from clusterkv_jax.evaluation.tasks.haystack import TokenCounter
from clusterkv_jax.generation.batch import bucket

# What is given, and the steps of the solution.
StateProblem = tuple[str, list[str]]
STEPS = (2, 4, 8, 16, 24)
SHOWN = (2, 4, 2, 3, 5)  # steps of the worked examples


def running_sum(rng: np.random.Generator, steps: int) -> StateProblem:
    """Numbers below ten, and their sums up to each."""
    numbers = rng.integers(1, 10, steps)
    sums = np.cumsum(numbers)
    solved = [f"{before} + {more} = {total}" for before, more, total in zip(sums - numbers, numbers, sums, strict=True)]
    return _joined(numbers), solved


def assignments(rng: np.random.Generator, steps: int) -> StateProblem:
    """Variables, each a number or a copy of an earlier one, and their values; the last is a copy."""
    asked, values = [], []
    for number, name in enumerate(string.ascii_lowercase[:steps]):
        copies = number and (number == steps - 1 or rng.random() < 0.5)
        before = int(rng.integers(number)) if copies else None
        values.append(int(rng.integers(10, 100)) if before is None else values[before])
        asked.append((name, values[-1] if before is None else string.ascii_lowercase[before]))
    solved = [f"{name} = {value}" for (name, _), value in zip(asked, values, strict=True)]
    return "; ".join(f"{name} = {what}" for name, what in asked), solved


def sorting(rng: np.random.Generator, steps: int) -> StateProblem:
    """Different numbers below a hundred, and the sorted lists of the first one, the first two and so on."""
    numbers = rng.permutation(np.arange(1, 100))[:steps]
    return _joined(numbers), [_joined(np.sort(numbers[:end])) for end in range(1, steps + 1)]


KINDS: dict[str, tuple[Callable[[np.random.Generator, int], StateProblem], str, str]] = {
    "running_sum": (running_sum, "Numbers", "Sums"),
    "assignments": (assignments, "Variables", "Values"),
    "sorting": (sorting, "Numbers", "Sorted one by one"),
}
GROUPS = {kind: tuple(f"{kind}_{steps}" for steps in STEPS) for kind in KINDS}
TASKS = tuple(task for tasks in GROUPS.values() for task in tasks)


def cases(task: str, numbers: range, count: TokenCounter, seed: int) -> Iterator[Case]:
    """Cases of a task by their numbers; each depends on seed, kind, steps and number alone."""
    kind, steps = task.rsplit("_", 1)
    make, asks, solves = KINDS[kind]
    place = list(KINDS).index(kind)
    shots = np.random.default_rng([seed, place])
    shown = [(make(shots, size), f"{asks}:", f"{solves}:") for size in SHOWN]
    context = "".join(f"{a} {given}\n{b}{_solution(solved)}\n\n" for (given, solved), a, b in shown)
    for number in numbers:
        given, solved = make(np.random.default_rng([seed, place, int(steps), number]), int(steps))
        yield Case(
            id=f"{task}/{number}",
            task=task,
            context=f"{context}{asks}: {given}\n",
            answer_prefix=f"{solves}:",
            answers=(solved[-1],),
            max_new_tokens=bucket(count(_solution(solved)) + 16, 64),
            stop=("\n",),
            chat=False,
        )


def _solution(solved: list[str]) -> str:
    return f" {'; '.join(solved)}."


def _joined(numbers: np.ndarray) -> str:
    return " ".join(map(str, numbers))
