"""Texts by their content: a digest stands for each, and the longest beginning of a text is found among many at once."""

import hashlib
from collections.abc import Collection
from typing import NamedTuple


class TextKey(NamedTuple):
    """A text's letters and the digest of them."""

    letters: int
    digest: str


def key_of(text: str) -> TextKey:
    """The key of a text."""
    return TextKey(len(text), hashlib.sha256(_raw(text)).hexdigest())


def longest_beginning(text: str, keys: Collection[TextKey], most: int) -> TextKey | None:
    """Which of the keys is that of the longest beginning of a text, of at most so many letters."""
    found, read, digest = None, 0, hashlib.sha256()
    for letters in sorted({key.letters for key in keys if key.letters <= most}):
        digest.update(_raw(text[read:letters]))
        read = letters
        key = TextKey(letters, digest.hexdigest())
        found = key if key in keys else found
    return found


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
