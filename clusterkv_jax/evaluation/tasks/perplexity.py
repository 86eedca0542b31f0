"""Perplexity of books: how well a text is foretold from a compressed cache of all that stands before.

A segment of a book is read up to a position and compressed there; the cross-entropy of the next tokens is the score.
They are fed one by one, so that methods which compress while decoding do so. Every position compresses afresh, hence
a budget holds at every position, for methods that compress prompts only as well. Long answers are the other half: a
segment is read up to its middle, and all the rest is fed as if the model wrote it, under the budget of the first half.
"""

from collections.abc import Iterator

import numpy as np

from clusterkv_jax.evaluation.tasks.cases import Case, Tokens

BLOCK = 256


def positions(length: int) -> list[int]:
    """Where the text is compressed: after every eighth of the length, and where one last block remains."""
    return sorted({*(length * i // 8 for i in range(1, 8)), length - BLOCK})


def segments(book: str, tokens: Tokens, count: int, length: int, seed: int) -> Iterator[Case]:
    """`count` segments of `length` tokens at random places of a book, a case for each position.

    Raises ValueError for a book shorter than a segment, or a length below 8 blocks.
    """
    if length < 8 * BLOCK:
        raise ValueError(f"length = {length} tokens is too small to read by position; at least {8 * BLOCK} are needed.")
    for number, start in enumerate(_starts(book, tokens, count, length, seed)):
        for position in positions(length):
            yield _case(book, tokens, (start, start + position, start + position + BLOCK), f"{length}/{number}")


def answers(book: str, tokens: Tokens, count: int, length: int, seed: int) -> Iterator[Case]:
    """`count` segments of `length` tokens at random places of a book, whose second half is the answer to the first.

    Raises ValueError for a book shorter than a segment, or a length below 2.
    """
    if length < 2:
        raise ValueError(f"length = {length} tokens is too small for a text and an answer; at least 2 are needed.")
    for number, start in enumerate(_starts(book, tokens, count, length, seed)):
        yield _case(book, tokens, (start, start + length // 2, start + length), f"{length}/{number}")


def _starts(book: str, tokens: Tokens, count: int, length: int, seed: int) -> Iterator[int]:
    if len(tokens) < length:
        raise ValueError(f"book {book!r} has {len(tokens)} tokens, fewer than length = {length}.")
    rng = np.random.default_rng([seed, length])
    for _ in range(count):
        yield int(rng.integers(len(tokens) - length + 1))


def _case(book: str, tokens: Tokens, edges: tuple[int, int, int], segment: str) -> Case:
    """The tokens between the first two edges are read, and those between the last two follow."""
    start, middle, end = edges
    return Case(
        id=f"{book}/{segment}/{middle - start}",
        task=book,
        metric="nll",
        reading=(tokens[start:middle], tokens[middle:end]),
        facts={"position": middle - start},
    )
