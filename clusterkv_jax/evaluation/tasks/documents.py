"""RULER's question answering: a document that answers a question among documents that do not.

qa_1 takes paragraphs and questions from SQuAD, qa_2 from HotpotQA, in the layouts they are published in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from clusterkv_jax.evaluation.tasks.haystack import TokenCounter, longest
from clusterkv_jax.evaluation.tasks.synthetic import Example

_ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


class _Text(TypedDict):
    text: str


class _Problem(TypedDict):
    question: str
    answers: list[_Text]


class _Paragraph(TypedDict):
    context: str
    qas: list[_Problem]


class _Article(TypedDict):
    paragraphs: list[_Paragraph]


class SquadFile(TypedDict):
    """SQuAD's JSON file."""

    data: list[_Article]


class _Texts(TypedDict):
    text: list[str]


class SquadRow(TypedDict):
    """A row of SQuAD on the hub."""

    context: str
    question: str
    answers: _Texts


class _Titled(TypedDict):
    title: list[str]
    sentences: list[list[str]]


class HotpotRow(TypedDict):
    """A row of HotpotQA: pairs of a title and sentences in its file, titles and sentences apart on the hub."""

    question: str
    answer: str
    context: list[tuple[str, list[str]]] | _Titled


@dataclass(frozen=True)
class Question:
    """A question, its right answers, and the numbers of the documents that are needed for it."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """All documents of a data set once, and the questions about them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def from_squad(content: SquadFile | Sequence[SquadRow]) -> Library:
    """SQuAD's JSON file, or the hub's rows (context, question, answers); unanswerable questions are left out."""
    if isinstance(content, Mapping):
        paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
        triples = [
            (paragraph["context"], qa["question"], [answer["text"] for answer in qa["answers"]])
            for paragraph in paragraphs
            for qa in paragraph["qas"]
        ]
    else:
        triples = [(row["context"], row["question"], list(row["answers"]["text"])) for row in content]
    return _library([([context], question, answers) for context, question, answers in triples if answers])


def from_hotpot(content: Sequence[HotpotRow]) -> Library:
    """HotpotQA's distractor JSON file, or the hub's rows, whose context holds titles and sentences apart."""
    triples = []
    for number, row in enumerate(content):
        context = row["context"]
        if isinstance(context, Mapping):
            titles, texts = context["title"], context["sentences"]
            if len(titles) != len(texts):
                raise ValueError(f"Row {number} of HotpotQA has {len(titles)} titles for {len(texts)} documents.")
            pairs = zip(titles, texts, strict=True)
        else:
            pairs = context
        documents = [f"{title}\n{''.join(sentences)}" for title, sentences in pairs]
        triples.append((documents, row["question"], [row["answer"]]))
    return _library(triples)


def _library(triples: Sequence[tuple[Sequence[str], str, Sequence[str]]]) -> Library:
    numbers = {text: i for i, text in enumerate(dict.fromkeys(d for documents, _, _ in triples for d in documents))}
    questions = tuple(
        Question(question, tuple(dict.fromkeys(answers)), tuple(numbers[d] for d in documents))
        for documents, question, answers in triples
    )
    return Library(tuple(numbers), questions)


def fitting(source: Library, length: int, count: TokenCounter, task: str) -> Library:
    """The library with those questions alone whose own documents fit into `length` tokens.

    Raises ValueError where none does.
    """
    fit = tuple(q for q in source.questions if count(_text(source, q.documents)) <= length)
    if not fit:
        raise ValueError(f"length = {length} tokens is too small for the documents of any question of {task}.")
    return replace(source, questions=fit)


def question(
    rng: np.random.Generator, length: int, count: TokenCounter, source: Library, number: int, task: str
) -> Example:
    """Question `number` over as many documents, in random order, as fit into `length` tokens.

    Raises ValueError where not even the documents that the question needs fit.
    """
    wording = source.questions[number % len(source.questions)]
    others = [int(i) for i in rng.permutation(len(source.documents)) if int(i) not in wording.documents]
    seed = int(rng.integers(2**32))

    def assemble(extra: int) -> tuple[list[int], str]:
        order = np.random.default_rng(seed).permutation([*wording.documents, *others[:extra]]).tolist()
        return order, _text(source, order)

    if count(assemble(0)[1]) > length:
        raise ValueError(f"length = {length} tokens is too small for the documents of question {number} of {task}.")
    # The bare minimum may be all that fits, which `longest` never tries.
    text = assemble(0)[1] if not others or count(assemble(1)[1]) > length else _fill(assemble, others, length, count)
    return Example(
        text, f"{_ORDER}\n\nQuestion: {wording.text}", " Answer:", wording.answers, f" {wording.answers[0]}", task
    )


def _text(source: Library, numbers: Sequence[int]) -> str:
    listed = [f"Document {place}:\n{source.documents[i]}" for place, i in enumerate(numbers, 1)]
    return f"{_ORDER}\n\nThe following are given documents.\n\n" + "\n\n".join(listed) + "\n\n"


def _fill(assemble, others: Sequence[int], length: int, count: TokenCounter) -> str:
    return longest(assemble, len(others), length, count, item=200)[1]
