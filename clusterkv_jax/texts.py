"""Between texts and tokens: prompts in, and pieces of an answer out as they become certain."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from reprlib import repr as shown
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from clusterkv_jax import schema
from clusterkv_jax.checkpoints import Model

Tokens = list[int]
# What is read: a text, or its ids in a list or an array.
Text = str | Sequence[int] | Int[Array | np.ndarray, "_"]
Texts = Sequence[Text] | Int[Array | np.ndarray, "_ _"]
OnText = Callable[[int, str], None]


def encode(model: Model, texts: Texts, kind: str, special: bool) -> list[Tokens]:
    """Token ids of texts, with the special tokens that begin one if asked; ids stay as they are.

    Raises ValueError, naming the text by its kind and number, for what is empty or neither.
    """
    encoded = []
    for i, text in enumerate(listed(texts, kind)):
        if isinstance(text, str):
            if model.tokenizer is None:
                raise ValueError(f"Model {model.name!r} has no tokenizer, so {kind} {i} must be token ids, not text.")
            if not text.strip():
                raise ValueError(f"{kind} {i} is empty; give at least one word.")
            with _naming(model):
                text = model.tokenizer.encode(text, add_special_tokens=special)
        if not is_list(text):
            raise ValueError(f"{kind} {i} must be a text or a list of whole numbers, got {shown(text)}.")
        # One transfer for an array of a device.
        ids = np.asarray(text) if isinstance(text, jax.Array) else text
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise ValueError(f"{kind} {i} must be a text or a list of whole numbers, got {shown(token)} in it.")
        encoded.append([int(token) for token in ids])
    return encoded


def listed(texts: Any, kind: str) -> list[Any]:
    """Texts in a list. Raises ValueError for one that stands alone."""
    if not is_list(texts):
        raise ValueError(f"{kind}s must be a list of texts or of token ids, got {shown(texts)}; put it in a list.")
    return list(texts)


def is_list(x: Any) -> bool:
    """Whether something lists things: texts, bytes and mappings do not, nor does an array of no dimension."""
    iterable = isinstance(x, Iterable) and not isinstance(x, str | bytes | bytearray | memoryview | Mapping)
    return iterable and np.ndim(x) != 0 if isinstance(x, np.ndarray | jax.Array) else iterable


def decode(model: Model, tokens: Tokens) -> str:
    """The text of tokens without special ones; of a model without tokenizer there is none."""
    if model.tokenizer is None:
        return ""
    with _naming(model):
        return model.tokenizer.decode(tokens, skip_special_tokens=True)


@contextmanager
def _naming(model: Model) -> Iterator[None]:
    """What a tokenizer's files make it raise, which may be anything, as a ValueError."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"The tokenizer of {model.name!r} fails: {schema.shown(error)}.") from error


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    places = [place for place in (text.find(s) for s in stop) if place >= 0]
    return text[: min(places)] if places else text


def shorten_at_stop(model: Model, tokens: Tokens, stop: Sequence[str]) -> bool:
    """Drop the tokens after the one that completes a stop string; True if there is one."""
    text = decode(model, tokens) if stop else ""
    if cut(text, stop) == text:
        return False
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        text = decode(model, tokens[:middle])
        low, high = (low, middle) if cut(text, stop) != text else (middle + 1, high)
    del tokens[low:]
    return True


def show(
    model: Model, i: int, tokens: Tokens, before: str, stop: Sequence[str], last: bool, on_text: OnText | None
) -> str:
    """Pass on what is new of a sequence's text; what may still change (half a character, half a stop string) waits."""
    if on_text is None:
        return before
    text = cut(decode(model, tokens), stop)
    if not last:
        text = text.rstrip("\ufffd")
        half = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        text = text[: len(text) - half]
    if len(text) > len(before):
        on_text(i, text[len(before) :])
        return text
    return before
