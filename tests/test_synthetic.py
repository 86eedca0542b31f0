"""Generated tasks: RULER's wording, exact lengths, answers that are really in the text."""

import re
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from clusterkv_jax.evaluation.tasks import synthetic
from clusterkv_jax.evaluation.tasks.haystack import Book, book
from clusterkv_jax.evaluation.tasks.synthetic import TASKS, Needles


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from importlib import resources

    return Tokenizer.from_file(str(resources.files("clusterkv_jax.models") / "demo" / "tokenizer.json"))


@pytest.fixture(scope="module")
def count(tokenizer):
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def prose(count) -> Book:
    rng = np.random.default_rng(0)
    listed = synthetic.words("nouns")
    sentences = (" ".join(rng.choice(listed, rng.integers(3, 30))).capitalize() + "." for _ in range(400))
    return book("\n".join(sentences), lambda texts: [count(text) for text in texts])


def make(task: str, seed: int, length: int, count, prose: Book) -> synthetic.Example:
    return synthetic.generate(task, np.random.default_rng(seed), length, count, prose)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [700, 1500])
def test_context_has_the_length_asked_for(task, length, count, prose):
    sizes = [count(make(task, seed, length, count, prose).context) for seed in range(3)]
    if task in ("cwe", "fwe"):
        assert all(0.97 * length <= size <= length for size in sizes)
    else:
        assert all(length - 1 <= size <= length for size in sizes)


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_example(task, count, prose):
    assert make(task, 3, 700, count, prose) == make(task, 3, 700, count, prose)
    assert make(task, 3, 700, count, prose) != make(task, 4, 700, count, prose)


@pytest.mark.parametrize("task", TASKS)
def test_tokens_of_the_parts_are_tokens_of_the_whole(task, tokenizer, count, prose):
    example = make(task, 1, 700, count, prose)
    parts = (example.context, example.question, example.answer_prefix, example.reply)
    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).ids]
    assert ids == tokenizer.encode("".join(parts), add_special_tokens=False).ids


def test_single_needle_in_rulers_words(count, prose):
    example = make("niah_single_2", 0, 700, count, prose)
    (value,) = example.answers
    (key,) = re.findall(rf"One of the special magic numbers for ([a-z]+-[a-z]+) is: {value}\.", example.context)
    assert re.fullmatch(r"[1-9]\d{6}", value)
    assert example.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
    )
    assert example.question == f"What is the special magic number for {key} mentioned in the provided text?"
    assert example.answer_prefix == f" The special magic number for {key} mentioned in the provided text is"
    assert example.reply == f" {value}."


def test_multi_needles_in_rulers_words(count, prose):
    values = make("niah_multivalue", 0, 700, count, prose)
    assert values.context.startswith("Some special magic numbers are hidden within the following text.")
    assert values.question.startswith("What are all the special magic numbers for ")
    assert list(values.answers) == re.findall(r"is: (\d{7})\.", values.context), "values come in the text's order"
    queries = make("niah_multiquery", 0, 700, count, prose)
    *keys, last = re.findall(r"[a-z]+-[a-z]+", queries.question)
    assert f" for {', '.join(keys)}, and {last} mentioned" in queries.question
    hidden = dict(re.findall(r"for (\S+) is: (\d{7})\.", queries.context))
    assert queries.answers == tuple(hidden[key] for key in (*keys, last))


def test_needle_haystack_is_all_needles(count, prose):
    example = make("niah_multikey_3", 0, 1500, count, prose)
    lines = example.context.splitlines()[1:-1]
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert len(lines) > 10
    assert all(re.fullmatch(rf"One of the special magic uuids for {uuid} is: {uuid}\.", line) for line in lines)


def test_needle_depths_are_uniform(count, prose):
    depths = []
    for seed in range(200):
        example = make("niah_single_1", seed, 700, count, prose)
        depths.append(example.context.index("One of") / len(example.context))
    histogram, _ = np.histogram(depths, bins=4, range=(0, 1))
    assert histogram.min() > 25


def test_chosen_keys_and_several_questions_of_one_context(count, prose):
    spec = Needles("book", keys=5)
    rng = np.random.default_rng(0)
    examples = synthetic.niah(rng, 900, count, spec, prose, questions=5, keys=["amber-lantern"])
    assert len({example.context for example in examples}) == 1
    assert len({example.question for example in examples}) == 5
    assert sum("amber-lantern" in example.question for example in examples) == 1


def test_variable_tracking_answers_follow_the_chain(count, prose):
    examples = synthetic.variable_tracking(np.random.default_rng(0), 1500, count, chains=3, hops=4)
    for example in examples:
        (value,) = re.findall(r"value (\d{5}) in", example.question)
        names = re.findall(rf"VAR (\w{{5}}) = {value}\n", example.context)
        while following := re.findall(rf"VAR (\w{{5}}) = VAR {names[-1]}\n", example.context):
            names += following
        assert example.answers == tuple(names)
        assert len(names) == 5
        assert f", 5 variables are assgined the value {value}, they are:" in example.answer_prefix


def test_common_words_are_the_common_ones(count, prose):
    example = make("cwe", 0, 1500, count, prose)
    listed = re.findall(r"\d+\. (\S+)", example.context)
    assert {word for word, _ in Counter(listed).most_common(10)} == set(example.answers)
    assert list(example.answers) == sorted(example.answers, key=listed.index)


def test_frequent_words_are_in_order_of_frequency(count, prose):
    example = make("fwe", 0, 1500, count, prose)
    coded = Counter(re.findall(r"\b[a-z]{6}\b|\.\.\.", example.context.split("coded words. ")[1]))
    assert [word for word, _ in coded.most_common(4)] == ["...", *example.answers]


def test_training_and_validation_words_are_disjoint():
    for kind in ("adjectives", "nouns"):
        train, valid = synthetic.words(kind, "train"), synthetic.words(kind, "valid")
        assert not set(train) & set(valid)
        assert set(train) | set(valid) == set(synthetic.words(kind))
        assert len(valid) > 100


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c, p: synthetic.generate("niah", np.random.default_rng(0), 700, c, p),
            "unknown; allowed: niah_single_1",
        ),
        (lambda c, p: synthetic.generate("niah_single_2", np.random.default_rng(0), 700, c), "needs a book"),
        (lambda c, p: synthetic.generate("niah_multikey_1", np.random.default_rng(0), 60, c, p), "do not fit"),
        (lambda c, p: synthetic.generate("cwe", np.random.default_rng(0), 60, c), "too small"),
        (lambda c, p: Needles(keys=2, queries=3), "queries must be in 1..keys = 2"),
        (lambda c, p: Needles(value_kind="colours"), "'colours' is unknown; allowed: numbers, words, uuids"),
    ],
)
def test_bad_input_is_named(call, message, count, prose):
    with pytest.raises(ValueError, match=message):
        call(count, prose)
