"""Examples that a report shows: the question, what was expected, and what each method answered."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterkv_jax.evaluation.report.table import budget_name

_OF_A_TASK, _TASKS, _ANSWERS = 2, 30, 12
_LETTERS = 240


@dataclass(frozen=True)
class ShownExample:
    """One question and its answers, as (method, budget, text, score in per cent); texts are cut where they are long."""

    task: str
    id: str
    question: str
    expected: str
    answers: tuple[tuple[str, str, str, float], ...]


def examples(lines: Sequence[Mapping[str, Any]]) -> Iterator[ShownExample]:
    """A few of every task, first those whose answers are least alike; none of lines that do not say their question."""
    by_example: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line.get("expected"):
            by_example.setdefault((line["task"], line["id"]), []).append(line)
    by_task: dict[str, list[list[Mapping[str, Any]]]] = {}
    for (task, _), answers in by_example.items():
        by_task.setdefault(task, []).append(answers)
    for found in list(by_task.values())[:_TASKS]:
        yield from map(_example, sorted(found, key=_likeness)[:_OF_A_TASK])


def _likeness(answers: Sequence[Mapping[str, Any]]) -> float:
    """The lowest score less the highest: below 0 where one method is right and another is not."""
    scores = [line["score"] for line in answers]
    return min(scores) - max(scores)


def _example(answers: Sequence[Mapping[str, Any]]) -> ShownExample:
    ordered = sorted(answers, key=lambda line: line["method"] != "full")[:_ANSWERS]
    first = ordered[0]
    shown = tuple(
        (line["method"], budget_name(line["budget"]), excerpt(line["output"]), 100 * line["score"]) for line in ordered
    )
    return ShownExample(
        first["task"], first["id"], excerpt(first.get("question", "")), excerpt(" | ".join(first["expected"])), shown
    )


def excerpt(text: str) -> str:
    """A text as a page shows it: without its middle where it is long."""
    text = text.strip()
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS // 2]} … {text[-_LETTERS // 2 :]}"
