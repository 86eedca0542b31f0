"""Two runs of the same examples, answer by answer: mean differences with paired intervals, what was won and lost."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from clusterkv_jax.evaluation import records
from clusterkv_jax.evaluation.batching import AnswerKey
from clusterkv_jax.evaluation.records import NLL, Record

EVERY_TASK = "all"
_WITHIN = 1e-5  # of a score; what differs less is rounding
_SAMPLES, _AT_ONCE = 10_000, 500


@dataclass(frozen=True)
class ComparedRun:
    """A folder of results and, where one row of it is meant, its method and budget."""

    folder: Path
    method: str | None = None
    budget: str | None = None


@dataclass(frozen=True)
class Pair:
    """Two answers to one example."""

    first: Record
    second: Record

    @property
    def row(self) -> str:
        """What is compared: method and budget, or the two of both sides."""
        first, second = (f"{line['method']}@{line['budget']}" for line in (self.first, self.second))
        return first if first == second else f"{first} and {second}"

    @property
    def gain(self) -> float:
        """How much better the second answer is; cross-entropies are better where they are lower."""
        return (self.second["score"] - self.first["score"]) * (-1 if self.first["metric"] == NLL else 1)

    @property
    def same(self) -> bool:
        """Whether both have the same text and, but for rounding, the same score."""
        return self.first["output"] == self.second["output"] and not self.decided

    @property
    def decided(self) -> bool:
        """Whether one side is better, by more than rounding."""
        return not math.isclose(self.first["score"], self.second["score"], rel_tol=_WITHIN)


@dataclass(frozen=True)
class Difference:
    """Pairs of one row and task: both means, the second less the first with its 95 % interval, and what was won, lost
    and answered alike by the second.
    """

    row: str
    task: str
    pairs: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    won: int
    lost: int
    same: int


def side(text: str) -> ComparedRun:
    """FOLDER, or FOLDER:METHOD@BUDGET for one row of it."""
    folder, separator, row = text.rpartition(":")
    method, at, budget = row.rpartition("@")
    if not separator or not at or Path(text).exists():
        return ComparedRun(Path(text))
    return ComparedRun(Path(folder), method, budget)


def paired(first: ComparedRun, second: ComparedRun) -> tuple[list[Pair], tuple[int, int]]:
    """What both sides answer, the same rows of two folders or one row of each, and how many answers either has alone.

    Raises ValueError where that is nothing, or was asked otherwise, and where one side alone names a row.
    """
    if (first.method is None) != (second.method is None):
        raise ValueError("A row, as in FOLDER:snapkv@0.25, is named on both sides or on none.")
    ours, theirs = answers(first), answers(second)
    if first.method is not None:  # rows of different names are held against each other by their examples
        ours, theirs = ({("", "", key[2]): line for key, line in side.items()} for side in (ours, theirs))
    shared = [key for key in ours if key in theirs]
    names = f"{first.folder} and {second.folder}"
    if not shared:
        raise ValueError(f"{names} have no method, budget and example in common.")
    for key in shared:
        if ours[key]["prompt"] != theirs[key]["prompt"] or ours[key]["metric"] != theirs[key]["metric"]:
            raise ValueError(
                f"{names} asked {key[2]} otherwise: other texts, seeds or tokenizers, or --query-aware in one of them."
            )
    return [Pair(ours[key], theirs[key]) for key in shared], (len(ours) - len(shared), len(theirs) - len(shared))


def answers(which: ComparedRun) -> dict[AnswerKey, Record]:
    """The lines of a folder's results (.gz too), or of one row of it; a torn last line is left out."""
    found: dict[AnswerKey, Record] = {}
    for where, line in records.read_answers(records.results_file(which.folder)):
        key = line["method"], line["budget"], line["id"]
        if key in found:
            raise ValueError(f"{where} answers {key[0]} with budget {key[1]} of example {key[2]} a second time.")
        found[key] = line
    if which.method is None:
        return found
    rows = dict.fromkeys(f"{method}@{budget}" for method, budget, _ in found)
    if f"{which.method}@{which.budget}" not in rows:
        raise ValueError(f"{which.folder} has no {which.method}@{which.budget}; it has {', '.join(rows)}.")
    return {key: line for key, line in found.items() if key[:2] == (which.method, which.budget)}


def differences(pairs: Sequence[Pair]) -> Iterator[Difference]:
    """One for every row and task, and one for all tasks of a row that has several."""
    groups: dict[str, dict[str, list[Pair]]] = {}
    for pair in pairs:
        groups.setdefault(pair.row, {}).setdefault(pair.first["task"], []).append(pair)
    for row, tasks in groups.items():
        yield from (_difference(row, task, of_task) for task, of_task in tasks.items())
        if len(tasks) > 1:
            yield _difference(row, EVERY_TASK, [pair for of_task in tasks.values() for pair in of_task])


def interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """The 95 % interval of their mean: percentiles of the means of samples drawn with replacement (Efron, 1979).

    Samples are drawn as counts of the different values: of scores that are 0 or 1 there are few.
    """
    rng = np.random.default_rng(0)
    different, counts = np.unique(values, return_counts=True)
    shares = counts / len(values)
    drawn = (rng.multinomial(len(values), shares, _AT_ONCE) @ different for _ in range(_SAMPLES // _AT_ONCE))
    low, high = np.percentile(np.concatenate(list(drawn)) / len(values), [2.5, 97.5])
    return float(low), float(high)


def _difference(row: str, task: str, pairs: Sequence[Pair]) -> Difference:
    first = np.asarray([pair.first["score"] for pair in pairs], float)
    second = np.asarray([pair.second["score"] for pair in pairs], float)
    low, high = interval(second - first)
    decided = [pair.gain for pair in pairs if pair.decided]
    return Difference(
        row=row,
        task=task,
        pairs=len(pairs),
        first=float(first.mean()),
        second=float(second.mean()),
        difference=float((second - first).mean()),
        low=low,
        high=high,
        won=sum(gain > 0 for gain in decided),
        lost=sum(gain < 0 for gain in decided),
        same=sum(pair.same for pair in pairs),
    )
