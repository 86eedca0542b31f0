"""Examples to train on, from files: contexts, what is asked about them, and the answers that are learned."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Struct

from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.generation.batch import bucket, padded
from clusterkv_jax.storage.schema import MIB, as_text, checked, from_json, read_lines, read_text, shown
from clusterkv_jax.text.tokenizer import Tokens, encode
from clusterkv_jax.training.objective import TrainingBatch

# The most that is read of a line, and of a text.
MOST_LINE, MOST_TEXT = 64 * MIB, 1024 * MIB
_JSON_LINES = (".jsonl", ".jsonl.gz")


class _Line(Struct, forbid_unknown_fields=True):
    context: str | list[int]
    answer: str | list[int]
    question: str | list[int] = ""


@dataclass(frozen=True)
class TrainingExample:
    """Token ids: a context that is compressed, what follows it, and how many of the last tokens are learned."""

    context: tuple[int, ...]
    follow: tuple[int, ...]
    learned: int


def read_examples(file: Path, model: Model, *, context_tokens: int, answer_tokens: int) -> list[TrainingExample]:
    """The examples of a file.

    A `.jsonl` file has one on each line, with the keys context, answer, and question where something is asked; texts or
    token ids. The model's end of text is learned behind an answer. Any other file is plain text, cut into contexts of
    `context_tokens` and the `answer_tokens` behind each.

    Raises:
        ValueError: one sentence that names the file and the line, and what is allowed there.
        OSError: as `open` does.
    """
    if file.name.endswith(_JSON_LINES):
        examples = list(_of_lines(file, model))
    else:
        text = read_text(file, most=MOST_TEXT)
        examples = list(_pieces(_ids(model, text, str(file), special=False), model, context_tokens, answer_tokens))
    if not examples:
        each = "" if file.name.endswith(_JSON_LINES) else f" of {context_tokens} + {answer_tokens} tokens"
        raise ValueError(f"{file} holds no example{each}.")
    return examples


def _of_lines(file: Path, model: Model) -> Iterator[TrainingExample]:
    ends = model.config.eos_ids[:1]
    for where, raw in read_lines(file, most=MOST_LINE):
        if not raw.strip():
            continue
        line = checked(from_json(as_text(raw, where), where), _Line, where)
        context = _ids(model, line.context, f"{where}, field 'context'", special=True)
        answer = _ids(model, line.answer, f"{where}, field 'answer'", special=False)
        asked = _ids(model, line.question, f"{where}, field 'question'", special=False) if line.question else []
        learned = [*answer, *ends]
        total, most = len(context) + len(asked) + len(learned), model.config.max_positions
        if total > most:
            raise ValueError(f"{where} has {total:,} tokens, more than the model's {most:,} positions.")
        yield TrainingExample(tuple(context), (*asked, *learned), len(learned))


def _ids(model: Model, text: str | list[int], where: str, *, special: bool) -> Tokens:
    if isinstance(text, str) and model.tokenizer is None:
        raise ValueError(f"{where} is text, and model {model.name!r} has no tokenizer: give token ids.")
    if not text or (isinstance(text, str) and not text.strip()):
        raise ValueError(f"{where} is empty; give at least one word.")
    ids = encode(model.tokenizer, text, add_special_tokens=special) if isinstance(text, str) else text
    most = model.config.vocab_size
    if (wrong := next((i for i in ids if not 0 <= i < most), None)) is not None:
        raise ValueError(f"{where} holds token id {shown(wrong)}; allowed are 0 to {most - 1}.")
    return ids


def _pieces(ids: Tokens, model: Model, context: int, answer: int) -> Iterator[TrainingExample]:
    total, most = context + answer, model.config.max_positions
    if total > most:
        raise ValueError(
            f"--context-tokens {context} and --answer-tokens {answer} exceed the model's {most} positions."
        )
    first = encode(model.tokenizer, "a", add_special_tokens=True)
    begin = first[: len(first) - len(encode(model.tokenizer, "a"))]  # what begins a text
    body = context - len(begin)
    for start in range(0, len(ids) - body - answer + 1, body + answer):
        piece = ids[start : start + body + answer]
        yield TrainingExample((*begin, *piece[:body]), tuple(piece[body:]), answer)


# --- batches ---


@dataclass(frozen=True)
class Sizes:
    """Tokens of contexts and of what follows, with padding: the same for all batches, so that one program serves them.

    Examples that are not trained on, such as those of an evaluation, may be given too.
    """

    width: int
    room: int


def sizes_of(examples: Sequence[TrainingExample], model: Model) -> Sizes:
    """Sizes that hold all of these."""
    width = bucket(max(len(example.context) for example in examples), 16)
    room = bucket(max(len(example.follow) for example in examples), 8)
    return Sizes(min(width, model.config.max_positions), room)


def batch_of(examples: Sequence[TrainingExample], sizes: Sizes) -> TrainingBatch:
    """Examples side by side."""
    counts = np.asarray([len(example.follow) for example in examples], np.int32)
    first = counts - np.asarray([example.learned for example in examples])
    place = np.arange(sizes.room)
    return TrainingBatch(
        padded([example.context for example in examples], sizes.width),
        np.asarray([len(example.context) for example in examples], np.int32),
        padded([example.follow for example in examples], sizes.room),
        counts,
        (place >= first[:, None]) & (place < counts[:, None]),
    )


def batches(
    examples: Sequence[TrainingExample], sizes: Sizes, rows: int, seed: int, start: int
) -> Iterator[TrainingBatch]:
    """Batches of steps start, start + 1, ...; each epoch has its own order, which the seed and its number determine."""
    number, epoch, order = start * rows, -1, np.empty(0, np.int64)
    while True:
        mine = []
        for _ in range(rows):
            if number // len(examples) != epoch:
                epoch = number // len(examples)
                order = np.random.default_rng([seed, epoch]).permutation(len(examples))
            mine.append(examples[int(order[number % len(examples)])])
            number += 1
        yield batch_of(mine, sizes)
