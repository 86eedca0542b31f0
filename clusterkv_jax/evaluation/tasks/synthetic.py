"""Long-context tasks in RULER's wording (Hsieh et al., 2024), generated to an exact length in tokens.

Every generator is a pure function of a NumPy generator, a length, a function that counts tokens and, where the task
hides something in prose, a book. Its examples share one context, so that a context can serve many questions. The prompt
of an example is `context + question + answer_prefix`; a model continues it with `reply`. Contexts end in a newline, so
that a tokenizer with Llama-3's split gives the same tokens for the parts as for the whole.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Literal

import numpy as np

from clusterkv_jax.evaluation.tasks.haystack import Book, TokenCounter, cut, fit, insert, longest, passage

Split = Literal["all", "train", "valid"]
KINDS = ("numbers", "words", "uuids")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HELD_OUT = 5  # every fifth word of a list belongs to the validation split


@dataclass(frozen=True)
class Example:
    """One question about a context: `answers` are all demanded, `reply` is the continuation a model is trained on."""

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    reply: str
    task: str

    @property
    def prompt(self) -> str:
        """What a model that sees everything at once reads before it answers."""
        return self.context + self.question + self.answer_prefix


@dataclass(frozen=True)
class Needles:
    """What a needle task hides and asks: RULER's parameters of the same names.

    `keys` keys are hidden with `values` values each, and a question names `queries` of them; `haystack` is a book, the
    repeated noise sentence, or other needles (then the whole length is needles, and `keys` is the least number).
    `intro` False leaves out the announcement, as in a text that was never meant as a test.
    """

    haystack: Literal["book", "noise", "needles"] = "book"
    key_kind: str = "words"
    value_kind: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    intro: bool = True

    def __post_init__(self):
        for name in (self.key_kind, self.value_kind):
            if name not in KINDS:
                raise ValueError(f"Kind {name!r} is unknown; allowed: {', '.join(KINDS)}.")
        if not 1 <= self.queries <= self.keys or self.values < 1:
            raise ValueError(
                f"queries must be in 1..keys = {self.keys} and values >= 1, got {self.queries}, {self.values}."
            )


NEEDLE_TASKS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("book"),
    "niah_single_3": Needles("book", value_kind="uuids"),
    "niah_multikey_1": Needles("book", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles("book", values=4),
    "niah_multiquery": Needles("book", keys=4, queries=4),
}
TASKS = (*NEEDLE_TASKS, "vt", "cwe", "fwe")


def generate(
    task: str,
    rng: np.random.Generator,
    length: int,
    count: TokenCounter,
    book: Book | None = None,
    split: Split = "all",
) -> Example:
    """One example of a RULER task by name; the context has `length` tokens, one less where no cut hits it.

    The lists of cwe and fwe may be 1 % shorter.

    Raises ValueError for an unknown task, a needle task in prose without a book, or a length too small for the task.
    """
    if task in NEEDLE_TASKS:
        return niah(rng, length, count, NEEDLE_TASKS[task], book, split=split, task=task)[0]
    match task:
        case "vt":
            return variable_tracking(rng, length, count)[0]
        case "cwe":
            return common_words(rng, length, count)
        case "fwe":
            return frequent_words(rng, length, count)
    raise ValueError(f"task {task!r} is unknown; allowed: {', '.join(TASKS)}.")


# --- needles ---


def niah(
    rng: np.random.Generator,
    length: int,
    count: TokenCounter,
    spec: Needles,
    book: Book | None = None,
    *,
    questions: int = 1,
    split: Split = "all",
    keys: Sequence[str] = (),
    depths: Sequence[float] | None = None,
    task: str = "niah",
) -> tuple[Example, ...]:
    """Needles at uniform depths of a haystack, and questions for their values; `keys` overrides the first random keys.

    `depths`, one per needle from 0 to 1 in rising order, replaces the random ones.

    The context has `length` tokens. Questions ask different keys as long as there are enough.
    """
    hidden = _pairs(rng, spec, split, keys)
    needles = _shuffle_in_order(rng, [[_needle(spec, key, one) for one in values] for key, values in hidden.items()])
    single = spec.queries * spec.values == 1
    intro = _number(_INTRO, spec.value_kind, single) if spec.intro else ""
    if depths is not None and (len(depths) != len(needles) or list(depths) != sorted(depths)):
        raise ValueError(f"depths must be {len(needles)} rising numbers, one per needle, got {depths!r}.")
    text = _hide(rng, length, count, spec, book, intro, needles, split, depths)
    groups = _draw(rng, list(hidden), spec.queries, questions)
    return tuple(_needle_example(text, spec, names, [hidden[name] for name in names], task) for names in groups)


_INTRO = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
_INTRO_SINGLE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)


def _number(plural: str, kind: str, single: bool) -> str:
    return _INTRO_SINGLE.format(kind=kind[:-1]) if single else plural.format(kind=kind)


def _needle(spec: Needles, key: str, value: str) -> str:
    return f"One of the special magic {spec.value_kind} for {key} is: {value}."


def _pairs(rng: np.random.Generator, spec: Needles, split: Split, keys: Sequence[str]) -> dict[str, list[str]]:
    names = dict.fromkeys(keys)
    while len(names) < spec.keys:
        names[random_value(rng, spec.key_kind, split)] = None
    return {name: [random_value(rng, spec.value_kind, split) for _ in range(spec.values)] for name in names}


def _draw(rng: np.random.Generator, names: list[str], size: int, times: int) -> list[list[str]]:
    """`times` groups of `size` different names; every name is used once before any is used again."""
    order: list[str] = []
    while len(order) < size * times:
        order += [names[i] for i in rng.permutation(len(names))[: len(names) // size * size]]
    return [order[i : i + size] for i in range(0, size * times, size)]


def _needle_example(context: str, spec: Needles, names: list[str], values: list[list[str]], task: str) -> Example:
    answers = tuple(value for group in values for value in group)
    what = f"{{}} for {_listed(names)} mentioned in the provided text"
    if len(answers) == 1:
        subject = "special magic " + what.format(spec.value_kind[:-1])
        question, prefix = f"What is the {subject}?", f" The {subject} is"
    else:
        subject = "special magic " + what.format(spec.value_kind)
        question, prefix = f"What are all the {subject}?", f" The {subject} are"
    return Example(context, question, prefix, answers, f" {_listed(answers)}.", task)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]


def random_value(rng: np.random.Generator, kind: str, split: Split = "all") -> str:
    """A 7-digit number, an adjective-noun word, or a version 4 uuid."""
    match kind:
        case "numbers":
            return str(rng.integers(1_000_000, 10_000_000))
        case "words":
            return f"{_pick(rng, words('adjectives', split))}-{_pick(rng, words('nouns', split))}"
        case "uuids":
            return _uuid(rng)
    raise ValueError(f"kind {kind!r} is unknown; allowed: {', '.join(KINDS)}.")


def _uuid(rng: np.random.Generator) -> str:
    digits = list(rng.bytes(16).hex())
    digits[12], digits[16] = "4", "89ab"[rng.integers(4)]
    text = "".join(digits)
    return "-".join(text[a:b] for a, b in pairwise((0, 8, 12, 16, 20, 32)))


@cache
def words(kind: Literal["adjectives", "nouns"], split: Split = "all") -> tuple[str, ...]:
    """The packaged word lists; the train and valid splits are disjoint and together all."""
    listed = (
        resources.files("clusterkv_jax.evaluation.tasks").joinpath(f"{kind}.txt").read_text(encoding="utf-8").split()
    )
    held_out = {"all": (False, True), "train": (False,), "valid": (True,)}[split]
    return tuple(word for i, word in enumerate(listed) if (i % HELD_OUT == HELD_OUT - 1) in held_out)


def _pick(rng: np.random.Generator, items: Sequence[str]) -> str:
    return items[int(rng.integers(len(items)))]


def _hide(
    rng: np.random.Generator,
    length: int,
    count: TokenCounter,
    spec: Needles,
    source: Book | None,
    intro: str,
    needles: list[str],
    split: Split,
    depths: Sequence[float] | None = None,
) -> str:
    """The intro, then the haystack with the needles among it, cut so that the whole has `length` tokens."""
    room = length - count(intro)
    between = " " if spec.haystack == "book" else "\n"
    lengths = [count(between + needle) for needle in needles]
    if sum(lengths) + 1 > room:
        raise ValueError(f"{len(needles)} needles of {sum(lengths)} tokens do not fit into length = {length} tokens.")
    hay = _hay(rng, room - sum(lengths), count, spec, source, split)
    places = np.sort(rng.random(len(needles))) if depths is None else np.asarray(depths, np.float64)

    def assemble(target: int) -> str:
        passage = cut(hay, target - count(intro) - sum(lengths), count, between)
        return intro + between.join(insert(passage, needles, places)) + "\n"

    return fit(assemble, length, count)


def _hay(
    rng: np.random.Generator, room: int, count: TokenCounter, spec: Needles, source: Book | None, split: Split
) -> list[str]:
    """More than `room` tokens of hay, a list of sentences or lines."""
    match spec.haystack:
        case "noise":
            return [NOISE] * (room // (count(NOISE + "\n") - 1) + 2)
        case "needles":
            lines: list[str] = []
            while room >= -16:
                key, value = random_value(rng, spec.key_kind, split), random_value(rng, spec.value_kind, split)
                lines.append(_needle(spec, key, value))
                room -= count(lines[-1] + "\n")
            return lines
        case _:
            if source is None:
                raise ValueError("A haystack of prose needs a book.")
            return passage(rng, source, room + 16)


# --- variable tracking ---


def variable_tracking(
    rng: np.random.Generator, length: int, count: TokenCounter, *, chains: int = 1, hops: int = 4, task: str = "vt"
) -> tuple[Example, ...]:
    """Chains of assignments scattered in order over noise; one example per chain asks for all its variables.

    The wording keeps RULER's misspelt "assgined".
    """
    names = _distinct(rng, chains * (hops + 1), string.ascii_uppercase, 5)
    values = [str(rng.integers(10_000, 100_000)) for _ in range(chains)]
    groups = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    lines = _shuffle_in_order(rng, [_chain(group, value) for group, value in zip(groups, values, strict=True)])
    fixed = sum(count(line + "\n") for line in lines) + count(intro)
    hay = [NOISE] * (max(0, length - fixed) // (count(NOISE + "\n") - 1) + 2)
    depths = np.sort(rng.random(len(lines)))

    def assemble(target: int) -> str:
        return intro + "\n".join(insert(cut(hay, target - fixed, count, "\n"), lines, depths)) + "\n"

    text = fit(assemble, length, count)
    return tuple(_tracking_example(text, group, value, task) for group, value in zip(groups, values, strict=True))


def _tracking_example(context: str, names: list[str], value: str, task: str) -> Example:
    question = f"Question: Find all variables that are assigned the value {value} in the text above."
    prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assgined the value {value}, they are:"
    )
    return Example(context, question, prefix, tuple(names), " " + " ".join(names), task)


def _chain(names: list[str], value: str) -> list[str]:
    return [f"VAR {names[0]} = {value}"] + [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]


def _shuffle_in_order(rng: np.random.Generator, groups: list[list[str]]) -> list[str]:
    """A random interleaving that keeps each group's order."""
    turns = rng.permutation(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    streams = [iter(group) for group in groups]
    return [next(streams[turn]) for turn in turns]


def _distinct(rng: np.random.Generator, size: int, letters: str, width: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < size:
        names["".join(letters[i] for i in rng.integers(len(letters), size=width))] = None
    return list(names)


# --- aggregation ---


def common_words(
    rng: np.random.Generator,
    length: int,
    count: TokenCounter,
    *,
    often: int | None = None,
    seldom: int = 3,
    common: int = 10,
) -> Example:
    """A numbered list in which `common` words appear `often` times and others `seldom` (RULER: 30 and 3).

    `often` is 10 by default where `length` is below 4,096 tokens. The reply keeps the order of first appearance.
    """
    often = often if often is not None else 30 if length >= 4096 else 10
    intro = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    pool = words("adjectives") + words("nouns")
    drawn = [pool[i] for i in rng.permutation(len(pool))]
    top, rest = drawn[:common], drawn[common:]
    seed = int(rng.integers(2**32))

    def assemble(others: int) -> tuple[list[str], str]:
        order = np.random.default_rng(seed).permutation(
            np.repeat(top + rest[:others], [often] * common + [seldom] * others)
        )
        return list(order), intro + " ".join(f"{i}. {word}" for i, word in enumerate(order, 1)) + "\n"

    listed, text = longest(assemble, len(rest), length, count)
    answers = tuple(sorted(top, key=listed.index))
    reply = "".join(f" {i}. {word}" for i, word in enumerate(answers, 1))
    question = f"Question: What are the {common} most common words in the above list?"
    prefix = f" Answer: The top {common} words that appear most often in the list are:"
    return Example(text, question, prefix, answers, reply, "cwe")


def frequent_words(
    rng: np.random.Generator, length: int, count: TokenCounter, *, alpha: float = 2.0, width: int = 6
) -> Example:
    """Random coded words with frequencies rank^-alpha; the first is the noise "...", the next three are asked."""
    vocabulary = ["...", *_distinct(rng, max(8, length // 50), string.ascii_lowercase, width)]
    shares = np.arange(1, len(vocabulary) + 1) ** -alpha
    seed = int(rng.integers(2**32))

    def assemble(total: int) -> tuple[list[str], str]:
        counts = np.floor(shares / shares.sum() * total).astype(int)
        order = list(np.random.default_rng(seed).permutation(np.repeat(vocabulary, counts)))
        return order, _CODED + " ".join(order) + "\n"

    _, text = longest(assemble, length, length, count)
    question = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"
    answers = tuple(vocabulary[1:4])
    return Example(text, question, prefix, answers, f" {', '.join(answers)}.", "fwe")


_CODED = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
