"""Retrieval grids: a needle at every depth of texts of several lengths, and LongEval's lines."""

from dataclasses import replace

import numpy as np

from clusterkv_jax.evaluation.tasks import synthetic
from clusterkv_jax.evaluation.tasks.cases import Case
from clusterkv_jax.evaluation.tasks.haystack import Book, TokenCounter
from clusterkv_jax.evaluation.tasks.ruler import QUESTION_ROOM, from_example, room_beside
from clusterkv_jax.evaluation.tasks.synthetic import Needles

DEPTHS = tuple(round(i / 10, 1) for i in range(11))
_LINES_BEFORE = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
_LINES_AFTER = (
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number. "
    "The <REGISTER_CONTENT> in line {key} is"
)


def needle(depth: float, number: int, length: int, count: TokenCounter, books: tuple[Book, ...], seed: int) -> Case:
    """One number hidden at a depth of a book (Kamradt's grid, in RULER's wording)."""
    rng = np.random.default_rng([seed, length, round(1000 * depth), number])
    room = room_beside(64, length, "niah")
    (example,) = synthetic.niah(
        rng, room, count, Needles("book"), books[number % len(books)], split="valid", depths=(depth,)
    )
    name = f"niah/{length}/{depth}/{number}"
    case = from_example(example, name, {"length": length, "depth": depth})
    return replace(case, max_new_tokens=64)


def lines(number: int, length: int, count: TokenCounter, seed: int, questions: int = 4) -> list[Case]:
    """LongEval's (Li et al., 2023) line retrieval: one record and `questions` questions, at even depths."""
    rng = np.random.default_rng([seed, length, number])
    room = length - 16 - QUESTION_ROOM - count(_LINES_BEFORE)
    record: dict[str, tuple[str, int]] = {}
    while True:
        key = synthetic.random_value(rng, "words", "valid")
        line = f"line {key}: REGISTER_CONTENT is <{rng.integers(1, 50_000)}>\n"
        room -= count(line)
        if room < 0:
            break
        record.setdefault(key, (line, len(record)))
    if len(record) < questions:
        raise ValueError(f"length = {length} tokens is too small for {questions} lines.")
    context = _LINES_BEFORE + "".join(line for line, _ in record.values())
    targets = [list(record)[int((i + rng.random()) * len(record) / questions)] for i in range(questions)]
    return [
        _line(context, key, *record[key], len(record), f"lines/{length}/{number}/{i}", length)
        for i, key in enumerate(targets)
    ]


def _line(context: str, key: str, line: str, place: int, size: int, name: str, length: int) -> Case:
    question, prefix = _LINES_AFTER.format(key=key).split(" The <", 1)
    return Case(
        id=name,
        task="lines",
        context=context,
        question=question,
        answer_prefix=" The <" + prefix,
        answers=(line.split("<")[1].split(">")[0],),
        metric="final_number",
        max_new_tokens=16,
        facts={"length": length, "depth": round(place / size, 3)},
    )
