"""The text of a sequence that grows: what is new is decoded behind a few tokens, and nothing twice."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterkv_jax.text.tokenizer import decode, without_open_end


@dataclass(frozen=True)
class GrowingText:
    """What is known of a sequence's text.

    Attributes:
        text: of the first `count` tokens, which no later one changes.
        count: of these tokens.
        context: from which of them on later tokens are decoded, since they stand behind other text.
    """

    text: str = field(default="", repr=False)
    count: int = 0
    context: int = 0


NOTHING = GrowingText()


def new_text(tokenizer: Any, tokens: Sequence[int], known: GrowingText) -> str:
    """The text behind what is known of these tokens."""
    if len(tokens) <= known.count:
        return ""
    before = decode(tokenizer, tokens[known.context : known.count])
    return decode(tokenizer, tokens[known.context :])[len(before) :]


def grown(tokenizer: Any, tokens: Sequence[int], known: GrowingText) -> GrowingText:
    """What is known after more tokens: as before while the text ends within a character or a run of bytes."""
    whole = without_open_end(tokenizer, tokens)
    text = new_text(tokenizer, whole, known)
    if len(whole) <= known.count or text.endswith("\ufffd"):
        return known
    return GrowingText(known.text + text, len(whole), known.count)
