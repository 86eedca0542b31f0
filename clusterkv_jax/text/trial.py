"""What a tokenizer from outside is tried with before it is used. Runs in a process that may be lost."""

import json
import math
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

# How many times longer a text may become before it is cut into tokens; SentencePiece's sign for a space takes three.
MOST_GROWTH = 64
# Letters of a run, and different ones that are tried: those of patterns, which backtrack where they nearly match.
RUN, MOST_LETTERS = 2048, 48
SAMPLE = "A text of 12 words, isn't it?\n\n  Здравствуй, 世界! 👋🏽 naïve ﷺ\t\r\n<s></s>[INST]<|im_end|>"


def try_out(file: str) -> None:
    """Raise ValueError if texts grow beyond bounds; what else is wrong shows itself here, or where it is used.

    transformers is not asked: it takes seconds to import, and its rules are either those of the file or its own.
    """
    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_padding()  # as transformers calls it
    tokenizer.no_truncation()
    parts = list(_parts(tokenizer))
    if (growth := math.prod(_growth(part) for _, part in parts)) > MOST_GROWTH:
        raise ValueError(f"Its rules make texts up to {growth:.3g} times longer, and {MOST_GROWTH} are allowed.")
    patterns = "".join(text for kind, part in parts if kind != "decoder" for text in _strings(part))
    letters = "".join(dict.fromkeys(f"a 1'\n.{patterns}"))[:MOST_LETTERS]
    for text in (SAMPLE, *(letter * RUN for letter in letters), letters * 32, patterns[:256] * 8):
        try:
            tokenizer.decode(tokenizer.encode(text).ids[:RUN])
        except (TimeoutError, MemoryError):
            raise
        except BaseException:  # a text may be refused, even by a panic: that is said where a text is really read
            continue


def _parts(tokenizer: Tokenizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rules of a tokenizer, one by one, each with its kind."""
    for kind in ("normalizer", "pre_tokenizer", "decoder"):
        rule = getattr(tokenizer, kind)
        if rule is not None:
            yield from ((kind, part) for part in _flat(json.loads(rule.__getstate__())))


def _flat(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = [part for name in ("normalizers", "pretokenizers", "decoders") for part in rule.get(name) or ()]
    if not inner:
        yield rule
    for part in inner:
        yield from _flat(part)


def _growth(rule: dict[str, Any]) -> float:
    """How many times longer a replacement makes a text at most."""
    if rule.get("type") != "Replace":
        return 1
    content, pattern = len(rule["content"].encode()), rule["pattern"].get("String")
    # A regular expression may match between any two letters.
    return content + 1 if not pattern else max(1, content / len(pattern.encode()))


def _strings(rule: dict[str, Any]) -> Iterator[str]:
    pattern = rule.get("pattern")
    yield from (str(text) for text in (pattern.values() if isinstance(pattern, dict) else ()))
