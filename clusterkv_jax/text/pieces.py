"""The tokens of a text that comes bit by bit: it is cut where a word begins, and each piece is encoded alone.

Between a letter and a word after a space, tokenizers cut too, so tokens are those of the whole text. A text that has no
such place for long is cut at other blanks, or anywhere, where tokens may be others.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Any

from clusterkv_jax.text.tokenizer import Tokens, encode

# Letters that wait for a place where tokens do not depend on the cut.
MOST_WAITING = 4096
_WORD = re.compile(r"(?<=\w) (?=[^\W\d_])")
_BLANK = re.compile(r"(?<=\S)(?=\s)")


def text_pieces(parts: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 in parts of any size as pieces of text that tokens do not go beyond; a byte order mark is no part of it.

    Raises ValueError for anything else.
    """
    decoder, rest = codecs.getincrementaldecoder("utf-8-sig")(), ""
    try:
        for part in parts:
            rest += decoder.decode(part)
            if place := _place(rest):
                yield rest[:place]
                rest = rest[place:]
        rest += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        wrong = f"{error.object[error.start]:#04x}"
        raise ValueError(f"The text that comes is not UTF-8: it holds the byte {wrong} where none can be.") from error
    if rest:
        yield rest


def next_tokens(tokenizer: Any, piece: str, **options: Any) -> Tokens:
    """Ids of a piece that stands behind other text; `options` as in `encode`.

    Some tokenizers put a space before whatever they encode: a letter stands before the piece, and is taken away.
    """
    letter, both = (encode(tokenizer, text, **options) for text in ("a", f"a{piece}"))
    return both[len(letter) :] if both[: len(letter)] == letter else encode(tokenizer, piece, **options)


def _place(text: str) -> int:
    """Where to cut, 0 for nowhere yet."""
    for pattern, waiting in ((_WORD, 0), (_BLANK, MOST_WAITING)):
        places = [match.start() for match in pattern.finditer(text)]
        if places and len(text) > waiting:
            return places[-1]
    return len(text) if len(text) > MOST_WAITING else 0
