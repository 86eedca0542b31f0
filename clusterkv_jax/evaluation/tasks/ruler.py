"""RULER (Hsieh et al., 2024): 13 tasks generated at any length, or its published rows.

A case's context has the length asked for, less its new tokens and room for its question, as RULER counts. Metrics and
new tokens are RULER's.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypedDict

import numpy as np
from msgspec import Meta

from clusterkv_jax.evaluation.tasks import documents, synthetic
from clusterkv_jax.evaluation.tasks.cases import Case
from clusterkv_jax.evaluation.tasks.haystack import Book, TokenCounter
from clusterkv_jax.evaluation.tasks.synthetic import Example
from clusterkv_jax.storage import schema

QUESTIONS = ("qa_1", "qa_2")
TASKS = (*synthetic.TASKS, *QUESTIONS)
GROUPS = {"needles": tuple(synthetic.NEEDLE_TASKS)}
QUESTION_ROOM = 128
# Where the question and the answer prefix of an original row begin; the last place counts.
_ASKS = (
    "What is the special magic ",
    "What are all the special magic ",
    "Question: Find all variables ",
    "Question: What are the 10 most common words",
    "Question: Do not provide any explanation.",
    "Answer the question based on the given documents.",
)
_PREFIXES = (" The special magic ", " Answer:")


def new_tokens(task: str) -> int:
    """Tokens generated for a task."""
    return {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}.get(task, 128)


def metric(task: str) -> str:
    """RULER's match for a task."""
    return "string_match_part" if task in QUESTIONS else "string_match_all"


def room_beside(answer: int, length: int, task: str) -> int:
    """Tokens of a context that leaves room for a question and this answer within `length`; ValueError if it is none."""
    room = length - answer - QUESTION_ROOM
    if room < 1:
        raise ValueError(
            f"length = {length} tokens is too small for {task}, whose question and answer take {length - room}."
        )
    return room


def generated(
    task: str,
    numbers: range,
    length: int,
    count: TokenCounter,
    books: Sequence[Book],
    library: documents.Library | None,
    seed: int,
) -> Iterator[Case]:
    """Cases of a task by their numbers; each depends on seed, length and number alone.

    Needle keys and values are those that no training of this project has used. Of the question tasks, the questions are
    taken whose own documents fit, which depends on the tokenizer.
    """
    room = room_beside(new_tokens(task), length, task)
    if task in QUESTIONS:
        if library is None:
            raise ValueError(f"task {task} needs questions with documents.")
        library = documents.fitting(library, room, count, task)
    for number in numbers:
        rng = np.random.default_rng([seed, TASKS.index(task), length, number])
        book = books[number % len(books)] if books else None
        if library is not None and task in QUESTIONS:
            example = documents.question(rng, room, count, library, number, task)
        else:
            example = synthetic.generate(task, rng, room, count, book, split="valid")
        yield from_example(example, f"{task}/{length}/{number}", {"length": length})


def from_example(example: Example, name: str, facts: Mapping[str, Any]) -> Case:
    """The case of a generated example; the depth of a single needle is a fact."""
    at = example.context.find(example.answers[0])
    single = example.task.startswith("niah") and len(example.answers) == 1
    depth = {"depth": round(at / len(example.context), 3)} if single else {}
    return Case(
        id=name,
        task=example.task,
        context=example.context,
        question=example.question,
        answer_prefix=example.answer_prefix,
        answers=example.answers,
        metric=metric(example.task),
        max_new_tokens=new_tokens(example.task),
        facts={**depth, **facts},
    )


# --- published rows ---


RightAnswers = Annotated[list[str | int], Meta(min_length=1)]


class RulerRecord(TypedDict, total=False):
    """A row whole as RULER writes it (input, outputs), or divided (context, question, answer_prefix, answer), whose
    answer may be a list written as Python.
    """

    task: str
    index: int | str
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    input: str
    outputs: RightAnswers | str
    context: str
    question: str
    answer_prefix: str
    answer: RightAnswers | str


def published(rows: Sequence[Mapping[str, Any]], length: int, task: str | None = None) -> list[Case]:
    """Cases of rows divided as in `simonjegou/ruler` or whole as RULER writes them; `task` where rows do not say it."""
    return [_published(row, number, length, row.get("task", task)) for number, row in enumerate(rows)]


def _published(row: Mapping[str, Any], number: int, length: int, task: Any) -> Case:
    if task not in TASKS:
        raise ValueError(f"Row {number} is of task {schema.shown(repr(task))}; allowed: {', '.join(TASKS)}.")
    whole, divided = ("input", "outputs"), ("context", "question", "answer_prefix", "answer")
    fields = whole if "input" in row else divided
    if missing := [name for name in fields if name not in row]:
        raise ValueError(f"Row {number} of {task} has no field {missing[0]!r}; it has {', '.join(row) or 'none'}.")
    *texts, answers = (row[name] for name in fields)
    context, question, prefix = divide(texts[0]) if fields is whole else texts
    answers = _listed(answers, f"The answer of row {number} of {task}") if isinstance(answers, str) else answers
    return Case(
        id=f"{task}/{length}/{row.get('index', number)}",
        task=task,
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=tuple(map(str, answers)),
        metric=metric(task),
        max_new_tokens=row.get("max_new_tokens", new_tokens(task)),
        facts={"length": length},
    )


def _listed(text: str, where: str) -> list[str | int]:
    """A list written as Python."""
    try:
        value = ast.literal_eval(text) if len(text) <= 64 * schema.KIB else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = None
    if value is None:
        raise ValueError(f"{where} must be a list of texts, got {schema.shown(repr(text))}.")
    return schema.checked(value, RightAnswers, where)


def divide(text: str) -> tuple[str, str, str]:
    """Context, question and answer prefix of an original prompt; joined they are the prompt."""
    start = max(text.rfind(ask) for ask in _ASKS)
    ends = [at for at in (text.find(prefix, max(start, 0)) for prefix in _PREFIXES) if at >= 0]
    if start < 0 or not ends:
        raise ValueError(f"A prompt that ends in {text[-60:]!r} holds no question of RULER's wording.")
    return text[:start], text[start : min(ends)], text[min(ends) :]


def papers_subset(size: int, share: float = 0.2) -> list[int]:
    """The rows that the CentroidKV paper evaluates: what pandas' `sample(frac=share, random_state=42)` takes."""
    legacy = np.random.RandomState(42)
    return legacy.choice(size, round(share * size), replace=False).tolist()
