"""What is asked of a model at once: prompts and questions as tokens, and the sizes of the programs that read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterkv_jax.checkpoints.loading import Model, check_model
from clusterkv_jax.runtime.checks import check_flag
from clusterkv_jax.runtime.errors import counted, is_count, is_one_of, shown
from clusterkv_jax.runtime.sharding import SEQUENCE
from clusterkv_jax.text.chat import Chat
from clusterkv_jax.text.prompts import Texts, as_chat, encode_all
from clusterkv_jax.text.stops import Stops, make_stops
from clusterkv_jax.text.tokenizer import Tokens

# Question tokens per call of `extend`.
QUESTION_STEP = 64


@dataclass(frozen=True)
class Gate:
    """How a prompt is read that is compressed meanwhile: the newest tokens that stay, tokens that are read at once, and
    whether rows get new positions where those of the model end.

    Raises ValueError for a window below the chunk.
    """

    window: int = 4096
    chunk: int = 2048
    renumber: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.chunk, 1):
            raise ValueError(f"chunk must be a whole number of at least 1, got {shown(self.chunk)}.")
        if not is_count(self.window, self.chunk):
            raise ValueError(
                f"window must be a whole number of at least the chunk, {self.chunk}, got {shown(self.window)}."
            )


def gate_of(reading: Any, window: Any, chunk: Any, prefill_chunk: int | None, *, renumber: Any = False) -> Gate | None:
    """What `generate` is told of reading; None where prompts are read whole. Raises ValueError for anything else."""
    if not is_one_of(reading, "whole", "gated"):
        raise ValueError(f"reading must be 'whole' or 'gated', got {shown(reading)}.")
    gate = Gate(window, chunk, check_flag(renumber=renumber))
    if reading == "whole" and renumber:
        raise ValueError("renumber=True is for reading='gated': a prompt that is read whole needs its positions.")
    if reading == "gated" and prefill_chunk is not None:
        raise ValueError(f"prefill_chunk={prefill_chunk} is for reading='whole'; chunk={chunk} says how gated reads.")
    return gate if reading == "gated" else None


@dataclass(frozen=True)
class Batch:
    """Prompts and questions as tokens, and what sizes their programs.

    Attributes:
        texts: prompts.
        questions: one per prompt, or None.
        unique: different prompts, each read once.
        width: tokens of a prompt with its padding.
        step_tokens: question tokens that are fed at once.
        reserve: tokens that will be appended.
        max_new_tokens: tokens to be generated.
        prefill_chunk: as in `generate`.
        stops: what ends a text besides the model's end-of-text tokens.
        whole: prompts of at most so many tokens are kept whole, whatever their budget.
        chat: what stands around prompts that are in the model's chat template.
        gate: how prompts are compressed while they are read; None reads them whole.
    """

    texts: list[Tokens]
    questions: list[Tokens] | None
    unique: list[tuple[int, ...]]
    width: int
    step_tokens: int
    reserve: int
    max_new_tokens: int
    prefill_chunk: int | None
    whole: int = 0
    stops: Stops = Stops()  # noqa: RUF009  (frozen)
    chat: Chat = Chat()  # noqa: RUF009  (frozen)
    gate: Gate | None = None


def make_batch(
    model: Model,
    prompts: Texts,
    *,
    questions: Texts | None = None,
    max_new_tokens: int = 64,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    prefill_chunk: int | None = None,
    chat: bool = False,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens: bool = True,
    reading: str = "whole",
    window: int = Gate.window,
    chunk: int = Gate.chunk,
    renumber: bool = False,
    streams: bool = False,
    endless: bool = False,
) -> Batch:
    """Prompts and questions, encoded and checked. Behind a prompt an `endless` method needs no further positions.

    Raises ValueError for what `generate` cannot do with them.
    """
    check_model(model)
    around = as_chat(chat, system, chat_template_kwargs)
    gate = gate_of(reading, window, chunk, prefill_chunk, renumber=renumber)
    texts, question_ids = encode_all(model, prompts, questions, chat=around, special_tokens=special_tokens)
    stops = make_stops(model.tokenizer, stop, stop_ids, model.config.vocab_size)
    if (stops.strings or streams) and model.tokenizer is None:
        raise ValueError(f"Model {model.name!r} has no tokenizer, so there is no text to stop at or to stream.")
    renumbers = gate is not None and gate.renumber
    _check(model, texts, question_ids, max_new_tokens, prefill_chunk, endless=endless, renumbers=renumbers)
    unique = list(dict.fromkeys(map(tuple, texts)))
    longest = max(map(len, unique))
    longest_question = max(map(len, question_ids)) if question_ids else 0
    return Batch(
        texts,
        question_ids,
        unique,
        width=max(_width(model, longest), longest),
        step_tokens=min(QUESTION_STEP, bucket(longest_question, 16)) if question_ids else 1,
        reserve=bucket(max_new_tokens + longest_question, 128),
        max_new_tokens=max_new_tokens,
        prefill_chunk=prefill_chunk,
        stops=stops,
        chat=around or Chat(),
        gate=gate,
    )


def bucket(tokens: int, least: int) -> int:
    """`tokens` rounded up to one of 4 to 8 sizes per power of two, so that few programs serve all prompts."""
    step = max(least, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def _width(model: Model, longest: int) -> int:
    """Tokens of a prompt with its padding, which devices along "sequence" can share."""
    parts = 1 if model.mesh is None else dict(model.mesh.shape).get(SEQUENCE, 1)
    unit = 1 if parts == 1 else 2 * parts
    return min(-(-bucket(longest, 64) // unit) * unit, model.config.max_positions)


def padded(texts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Texts as ids side by side, zeros behind the shorter ones, i32 [texts, width]."""
    ids = np.zeros((len(texts), width), np.int32)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = text
    return ids


def _check(
    model: Model,
    texts: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]] | None,
    max_new_tokens: int,
    prefill_chunk: int | None,
    *,
    endless: bool,
    renumbers: bool,
) -> None:
    """Raise ValueError for what `generate` cannot do with these prompts and questions, as token ids."""
    config = model.config
    if not texts:
        raise ValueError("Prompts must hold at least one prompt, got none.")
    if not is_count(max_new_tokens, 1):
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {shown(max_new_tokens)}.")
    if prefill_chunk is not None and not is_count(prefill_chunk, 1):
        raise ValueError(f"prefill_chunk must be a whole number of at least 1 or None, got {shown(prefill_chunk)}.")
    if wrong := [token for token in config.eos_ids if not 0 <= token < config.vocab_size]:
        raise ValueError(
            f"Model {model.name!r} ends a text with token id {wrong[0]}; allowed are 0 to {config.vocab_size - 1}."
        )
    for kind, rows in (("prompt", texts), ("question", questions or [])):
        for i, row in enumerate(rows):
            if not row:
                raise ValueError(f"{kind} {i} is empty; it needs at least one token.")
            if min(row) < 0 or max(row) >= config.vocab_size:
                wrong = next(t for t in row if not 0 <= t < config.vocab_size)
                raise ValueError(f"{kind} {i} holds token id {wrong}; allowed are 0 to {config.vocab_size - 1}.")
    for i, text in enumerate(texts):
        question = len(questions[i]) if questions else 0
        if not renumbers and len(text) + (0 if endless else question + max_new_tokens) > config.max_positions:
            raise ValueError(
                f"Prompt {i} of {counted(len(text), 'token')}, its question of {question} and {max_new_tokens} new "
                f"tokens exceed the model's {config.max_positions} positions."
            )
