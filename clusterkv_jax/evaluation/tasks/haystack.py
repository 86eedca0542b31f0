"""Texts of an exact number of tokens: prose in sentences, and the cutting and fitting that generated tasks share."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

TokenCounter = Callable[[str], int]


@dataclass(frozen=True)
class Book:
    """Sentences of a text in order, and how many tokens each takes after a space."""

    sentences: tuple[str, ...]
    lengths: Int[np.ndarray, " S"]


def book(text: str, count_all: Callable[[list[str]], list[int]]) -> Book:
    """Splits a plain text at sentence ends; line breaks and runs of spaces become single spaces.

    `count_all` gives the numbers of tokens of many texts at once.
    """
    flat = re.sub(r"\s+", " ", text).strip()
    sentences = tuple(re.split(r"(?<=[.!?])(?<!Mr\.)(?<!Dr\.)(?<!St\.)(?<!Mrs\.) (?=[A-Z\"'“])", flat))
    return Book(sentences, np.array(count_all([" " + sentence for sentence in sentences]), np.int32))


def passage(rng: np.random.Generator, source: Book, room: int) -> list[str]:
    """Consecutive sentences of at least `room` tokens from a random place; a book that is too short starts again."""
    ends = np.cumsum(source.lengths)
    start = int(rng.integers(max(1, np.searchsorted(ends, ends[-1] - room) + 1)))
    pieces: list[str] = []
    while room > 0:
        before = ends[start - 1] if start else 0
        stop = min(int(np.searchsorted(ends, before + room)) + 1, len(ends))
        pieces += source.sentences[start:stop]
        room -= int(ends[stop - 1] - before)
        start = 0
    return pieces


def insert(hay: list[str], needles: list[str], depths: Float[np.ndarray, " S"]) -> list[str]:
    """Needles at their depths (0..1, sorted) among the hay; which needle stands where is their order."""
    places = np.floor(depths * (len(hay) + 1)).astype(int)
    parts = list(hay)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        parts.insert(place, needle)
    return parts


def cut(hay: list[str], room: int, count: TokenCounter, between: str) -> list[str]:
    """As much hay as fits into `room` tokens; the last piece is cut anywhere, to the token."""
    pieces: list[str] = []
    for piece in hay:
        size = count(between + piece)
        if size > room:
            short = _prefix(piece, room, count, between)
            return [*pieces, short] if short else pieces
        pieces.append(piece)
        room -= size
    return pieces


def _prefix(piece: str, room: int, count: TokenCounter, between: str) -> str:
    """The longest beginning of a piece that fits into `room` tokens."""
    low, high = 0, len(piece)
    while low < high:
        middle = (low + high + 1) // 2
        fits = count(between + piece[:middle].rstrip()) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return piece[:low].rstrip()


def fit(assemble: Callable[[int], str], length: int, count: TokenCounter) -> str:
    """The text that has exactly `length` tokens, or the closest below: pieces may merge where they are joined."""
    target, best, most = length, "", -1
    for _ in range(8):
        text = assemble(target)
        size = count(text)
        if most < size <= length:
            best, most = text, size
        if size == length:
            break
        target += length - size
    if most < 0:
        raise ValueError(f"length = {length} tokens is too small for this task.")
    return best


def longest(
    assemble: Callable[[int], tuple[Sequence[Any], str]], most: int, length: int, count: TokenCounter, item: int = 8
) -> tuple[Sequence[Any], str]:
    """A size up to `most` whose text fills `length` tokens to within 1 %, or as far as whole items allow.

    `item` is about what an item takes, where the search begins.
    """
    low, high, best = 0, most, None
    size = min(most, max(1, length // item))
    while low < high:
        candidate = assemble(size)
        tokens = count(candidate[1])
        if tokens <= length:
            low, best = size, candidate
            if tokens >= 0.99 * length:
                break
        else:
            high = size - 1
        size = min(max(int(size * length / tokens), low + 1), high)
    if best is None:
        raise ValueError(f"length = {length} tokens is too small for this task.")
    return best
