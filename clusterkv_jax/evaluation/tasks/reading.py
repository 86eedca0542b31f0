"""Perplexity by position: how well a text is foretold from a compressed cache of all that stands before.

A segment of a book is read up to a position and compressed there; the cross-entropy of the next tokens is the score.
They are fed one by one, so that methods which compress while decoding do so. Every position compresses afresh, hence
a budget holds at every position, for methods that compress prompts only as well.
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
    if len(tokens) < length:
        raise ValueError(f"book {book!r} has {len(tokens)} tokens, fewer than length = {length}.")
    rng = np.random.default_rng([seed, length])
    for number in range(count):
        start = int(rng.integers(len(tokens) - length + 1))
        for position in positions(length):
            at = start + position
            yield Case(
                id=f"{book}/{length}/{number}/{position}",
                task=book,
                metric="nll",
                reading=(tokens[start:at], tokens[at : at + BLOCK]),
                facts={"position": position},
            )
