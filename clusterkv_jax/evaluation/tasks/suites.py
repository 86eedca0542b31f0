"""The suites by name: what `clusterkv evaluate --suite` takes, each a function from options to cases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from clusterkv_jax.evaluation.tasks import (
    documents,
    gsm8k,
    longbench,
    perplexity,
    retrieval,
    ruler,
    sources,
    state,
    turns,
)
from clusterkv_jax.evaluation.tasks.cases import Case, counter
from clusterkv_jax.evaluation.tasks.haystack import Book, book
from clusterkv_jax.text.tokenizer import encode

# No model reads more; a text of many times as many would not fit into memory.
MOST_TOKENS = 2**24


@dataclass(frozen=True)
class Options:
    """What a suite may be told.

    Attributes:
        tasks: of the suite's; all by default.
        lengths: tokens of a generated example, question and answer included.
        limit: most examples of each task (and length, depth or book); the suite's own number by default.
        data: a local file or folder, or "hub"; by default the hub for suites that are nothing but a data set.
        books: a local book or folder of books to hide things in, or to read, or "hub" for PG19's test books; two books
            of the package by default.
        seed: of everything generated.
    """

    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (4096,)
    limit: int | None = None
    data: str | None = None
    books: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Suite:
    """A suite's tasks and its cases: build(options, chosen tasks, tokenizer, the model's positions).

    `from_data` are tasks that ask about documents of a data set, while the others are made of what the package holds.
    `groups` are names that stand for several tasks.
    """

    description: str
    tasks: tuple[str, ...]
    build: Callable[[Options, tuple[str, ...], Any, int], list[Case]]
    from_data: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """Tasks in place of their groups' names, each once."""
        return tuple(dict.fromkeys(task for name in names for task in self.groups.get(name, (name,))))


def cases(name: str, options: Options, tokenizer: Any, positions: int) -> list[Case]:
    """All cases of a suite, in a fixed order.

    Raises ValueError for an unknown suite or task, a length beyond the model, and data that is not there.
    """
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is unknown; allowed: {', '.join(SUITES)}.")
    suite = SUITES[name]
    options = replace(options, tasks=suite.chosen(options.tasks))
    for task in options.tasks:
        if suite.tasks and task not in suite.tasks:
            allowed = ", ".join((*suite.groups, *suite.tasks))
            raise ValueError(f"task {task!r} is not in suite {name}; allowed: {allowed}.")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"limit must be at least 1, got {options.limit}.")
    without = left_out(name, options)
    names = options.tasks or tuple(task for task in suite.tasks if task not in without)
    from_hub = replace(options, data=None if options.data == sources.HUB else options.data)
    examples = suite.build(from_hub, names, tokenizer, positions)
    if not examples:
        raise ValueError(f"suite {name} has no cases with these options.")
    return examples


def left_out(name: str, options: Options) -> tuple[str, ...]:
    """Tasks of a suite that need a data set where neither they nor a place of data are named."""
    return SUITES[name].from_data if name in SUITES and not (options.tasks or options.data) else ()


def _limited(examples: Sequence[Any], limit: int | None) -> Sequence[Any]:
    return examples if limit is None else examples[:limit]


def _lengths(options: Options, positions: int) -> tuple[int, ...]:
    """The lengths to generate. Raises ValueError for one beyond the model, before anything is generated."""
    for length in options.lengths:
        if length > positions:
            raise ValueError(f"length = {length} tokens exceeds the model's {positions} positions.")
        if length > MOST_TOKENS:
            raise ValueError(f"length = {length} tokens is more than the {MOST_TOKENS:,} that an example may have.")
    return options.lengths


def _haystacks(options: Options, tokenizer: Any) -> list[Book]:
    def count_all(texts):
        return [len(row) for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    return [book(text, count_all) for text in sources.books(options.books).values()]


# --- generated ---


def _ruler(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    lengths = _lengths(options, positions)
    count = counter(tokenizer)
    prose = {name for name, spec in ruler.synthetic.NEEDLE_TASKS.items() if spec.haystack == "book"}
    books = _haystacks(options, tokenizer) if prose & set(tasks) else []
    numbers = range(options.limit or 100)
    return [
        case
        for length in lengths
        for task in tasks
        for case in ruler.generated(task, numbers, length, count, books, _library(task, options.data), options.seed)
    ]


@cache
def _library(task: str, data: str | None) -> documents.Library | None:
    """The documents of a question task: a file of its name in a local folder, or the hub's data set."""
    if task not in ruler.QUESTIONS:
        return None
    file = None if data is None else sources.local(data, ["*squad*.json*" if task == "qa_1" else "*hotpot*.json*"])
    if task == "qa_2":
        hub = ("hotpotqa/hotpot_qa", "distractor", "validation")
        rows = sources.rows(None if file is None else str(file), task, hub, documents.HotpotRow)
        return documents.from_hotpot(rows)
    if file is not None and sources.is_json(file):
        return documents.from_squad(sources.read_json(file, documents.SquadFile))
    hub = ("rajpurkar/squad_v2", None, "validation")
    return documents.from_squad(sources.rows(None if file is None else str(file), task, hub, documents.SquadRow))


def _niah(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    del tasks
    lengths = _lengths(options, positions)
    books = tuple(_haystacks(options, tokenizer))
    count = counter(tokenizer)
    return [
        retrieval.needle(depth, number, length, count, books, options.seed)
        for length in lengths
        for depth in retrieval.DEPTHS
        for number in range(options.limit or 5)
    ]


def _turns(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    lengths, count = _lengths(options, positions), counter(tokenizer)
    books = _haystacks(options, tokenizer)
    return [
        case
        for length in lengths
        for number in range(options.limit or 20)
        for case in turns.conversation(number, length, count, books[number % len(books)], options.seed)
        if case.task in tasks
    ]


def _state(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    del positions
    numbers, count = range(options.limit or 50), counter(tokenizer)
    return [case for task in tasks for case in state.cases(task, numbers, count, options.seed)]


def _lines(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    del tasks
    return [
        case
        for length in _lengths(options, positions)
        for number in range(options.limit or 25)
        for case in retrieval.lines(number, length, counter(tokenizer), options.seed)
    ]


# --- read from data sets ---


def _ruler_rows(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    del tokenizer, positions
    examples = []
    for length in options.lengths:
        if options.data is not None:
            file = sources.local(options.data, [f"*{length}*.jsonl", f"*{length}*.jsonl.gz"])
            named = next(
                (task for task in sorted(ruler.TASKS, key=len, reverse=True) if file.name.startswith(task)), None
            )
            published = ruler.published(sources.read_rows(file, ruler.RulerRecord), length, named)
        else:
            hub = ("simonjegou/ruler", str(length), "test")
            published = ruler.published(sources.rows(None, "ruler", hub, ruler.RulerRecord), length)
        examples += [
            case for task in tasks for case in _limited([c for c in published if c.task == task], options.limit)
        ]
    return examples


def _ruler_subset(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    del tokenizer, positions
    if len(options.lengths) != 1:
        raise ValueError(
            f"The suite ruler-papers takes one length, got {', '.join(map(str, options.lengths)) or 'none'}."
        )
    (length,) = options.lengths
    hub = ("simonjegou/ruler", str(length), "test")
    published = ruler.published(sources.rows(options.data, f"ruler_{length}", hub, ruler.RulerRecord), length)
    subset = [published[i] for i in ruler.papers_subset(len(published))]
    return [case for task in tasks for case in _limited([c for c in subset if c.task == task], options.limit)]


def _longbench(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    del tokenizer, positions
    return [
        longbench.kvpress_case(task, number, row)
        for task in _present(options, tasks)
        for number, row in enumerate(_longbench_rows(task, "Xnhyacinth/LongBench", options))
    ]


def _longbench_official(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    return [
        longbench.official_case(task, number, row, tokenizer, positions)
        for task in _present(options, tasks)
        for number, row in enumerate(_longbench_rows(task, "THUDM/LongBench", options))
    ]


def _longbench_rows(task: str, hub: str, options: Options) -> Sequence[longbench.LongBenchRecord]:
    return _limited(sources.rows(options.data, task, (hub, task, "test"), longbench.LongBenchRecord), options.limit)


def _present(options: Options, tasks: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks asked for, or all that a local folder holds."""
    if options.tasks or options.data is None or not Path(options.data).is_dir():
        return tasks
    return tuple(task for task in tasks if any(Path(options.data).glob(f"{task}.json*")))


def _gsm8k(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    del tasks, tokenizer, positions
    # A folder that is not there is named before the library that holds the examples is missed.
    questions = _limited(gsm8k.questions(options.data), options.limit)
    return gsm8k.cases(gsm8k.shots(options.data), questions)


def _pg19(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    lengths = _lengths(options, positions)
    return _read(sources.books(options.books), lengths, options, tasks, tokenizer)


def _long_answers(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    lengths, books = _lengths(options, positions), sources.books(options.books)
    return _read(books, lengths, options, tasks, tokenizer, perplexity.answers)


def _wikitext(options: Options, tasks: tuple[str, ...], tokenizer: Any, positions: int) -> list[Case]:
    lengths = _lengths(options, positions)
    if options.data is not None:
        texts = sources.books(options.data)
    else:
        hub = ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
        lines = sources.rows(None, "wikitext", hub, sources.TextRow)
        texts = {"wikitext": "".join(row["text"] for row in lines)}
    return _read(texts, lengths, options, tasks, tokenizer)


def _read(
    texts: dict[str, str],
    lengths: Sequence[int],
    options: Options,
    tasks: tuple[str, ...],
    tokenizer: Any,
    cut: Callable[..., Iterator[Case]] = perplexity.segments,
) -> list[Case]:
    """Every book, or those named as tasks, cut into cases."""
    if missing := [task for task in tasks if task not in texts]:
        raise ValueError(f"There is no book {missing[0]!r}; there are {', '.join(sorted(texts))}.")
    return [
        case
        for length in lengths
        for name, text in texts.items()
        if not tasks or name in tasks
        for case in cut(name, tuple(encode(tokenizer, text)), options.limit or 8, length, options.seed)
    ]


SUITES = {
    "ruler": Suite(
        "RULER's 13 tasks, generated at any length (100 examples each)",
        ruler.TASKS,
        _ruler,
        ruler.QUESTIONS,
        ruler.GROUPS,
    ),
    "ruler-rows": Suite(
        "RULER's published rows (simonjegou/ruler, or a local file)", ruler.TASKS, _ruler_rows, groups=ruler.GROUPS
    ),
    "ruler-papers": Suite(
        "the fifth of those rows that CentroidKV's paper evaluates", ruler.TASKS, _ruler_subset, groups=ruler.GROUPS
    ),
    "longbench": Suite("LongBench by kvpress's protocol", tuple(longbench.TASKS), _longbench),
    "longbench-official": Suite("LongBench by its authors' protocol", tuple(longbench.TASKS), _longbench_official),
    "niah": Suite("a needle at 11 depths of texts of several lengths (5 each)", ("niah",), _niah),
    "gsm8k": Suite("GSM8K with eight worked examples in the cache", ("gsm8k",), _gsm8k),
    "pg19": Suite("perplexity of books by position (8 segments each)", (), _pg19),
    "pg19-answers": Suite("perplexity of books' second halves, written under the budget", (), _long_answers),
    "wikitext": Suite("perplexity of WikiText-2 by position (8 segments)", (), _wikitext),
    "turns": Suite(
        "five questions about one context, in SCBench's two modes (20 contexts)",
        turns.TASKS,
        _turns,
        groups=turns.GROUPS,
    ),
    "state": Suite(
        "sums, variables and lists that the model writes step by step (50 of each number of steps)",
        state.TASKS,
        _state,
        groups=state.GROUPS,
    ),
    "longeval": Suite("LongEval's line retrieval (25 records, 4 questions each)", ("lines",), _lines),
}
