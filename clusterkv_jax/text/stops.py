"""Where an answer ends, why it ended, and what of it can be shown before that."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, Literal

import numpy as np

from clusterkv_jax.text.growing import NOTHING, GrowingText, new_text
from clusterkv_jax.text.prompts import is_list
from clusterkv_jax.text.tokenizer import Tokens, decode, without_open_end

OnText = Callable[[int, str], None]
# An end-of-text token, a stop string or id, the most tokens, or a caller who would not wait.
FinishReason = Literal["eos", "stop", "length", "cancelled"]


@dataclass(frozen=True)
class Stops:
    """What ends a text besides the model's end-of-text tokens: strings, and token ids."""

    strings: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return bool(self.strings or self.ids)


def make_stops(tokenizer: Any, stop: Any, stop_ids: Any, vocab_size: int) -> Stops:
    """Stops as `generate` takes them. A string that is a special token, which no text shows, counts as its id.

    Raises ValueError for what is no list of texts or of ids.
    """
    if not is_list(stop) or isinstance(stop, Iterator) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop must be a list of texts that are not empty, got {shown(stop)}.")
    listed = is_list(stop_ids) and not isinstance(stop_ids, Iterator)
    if not listed or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in stop_ids):
        raise ValueError(f"stop_ids must be a list of token ids, got {shown(stop_ids)}.")
    ids = {int(token) for token in stop_ids}
    if wrong := [token for token in sorted(ids) if not 0 <= token < vocab_size]:
        raise ValueError(f"stop_ids hold {wrong[0]}; allowed are 0 to {vocab_size - 1}.")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token.content: number for number, token in added.items() if token.special}
    strings = tuple(text for text in stop if text not in special)
    return Stops(strings, frozenset(ids | {special[text] for text in stop if text in special}))


def shorten(tokenizer: Any, tokens: Tokens, stops: Stops, known: GrowingText = NOTHING) -> bool:
    """Drop the tokens after the first one that stops a text; True if there is one. None of those `known` does."""
    at = next((number for number in range(known.count, len(tokens)) if tokens[number] in stops.ids), None)
    if at is not None:
        del tokens[at + 1 :]
    if not _stopped(tokenizer, tokens, stops, known):
        return at is not None
    low, high = max(1, known.count), len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _stopped(tokenizer, tokens[:middle], stops, known) else (middle + 1, high)
    del tokens[low:]
    return True


def text_of(tokenizer: Any, tokens: Sequence[int], stops: Stops) -> str:
    """The text of tokens before what stops it."""
    text = decode(tokenizer, tokens[:-1] if tokens and tokens[-1] in stops.ids else tokens)
    places = [place for place in map(text.find, stops.strings) if place >= 0]
    return text[: min(places)] if places else text


def finish_reason(tokenizer: Any, tokens: Sequence[int], eos_ids: Sequence[int], stops: Stops) -> FinishReason:
    """Why a text of these tokens has ended."""
    if _stopped(tokenizer, tokens, stops):
        return "stop"
    if tokens and tokens[-1] in eos_ids:
        return "eos"
    return "stop" if tokens and tokens[-1] in stops.ids else "length"


def show(
    tokenizer: Any,
    i: int,
    tokens: Tokens,
    before: str,
    stops: Stops,
    last: bool,
    on_text: OnText | None,
    known: GrowingText = NOTHING,
) -> str:
    """Pass on what is new of a sequence's text; what may still change (half a character, half a stop string) waits."""
    if on_text is None:
        return before
    if last:
        text = text_of(tokenizer, tokens, stops)
    else:
        text = known.text + new_text(tokenizer, without_open_end(tokenizer, tokens), known)
        text = text.rstrip("\ufffd")
        half = max((n for s in stops.strings for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        text = text[: len(text) - half]
    if len(text) > len(before):
        on_text(i, text[len(before) :])
        return text
    return before


def _stopped(tokenizer: Any, tokens: Sequence[int], stops: Stops, known: GrowingText = NOTHING) -> bool:
    """Whether a stop string stands in the text; none does in what is `known`."""
    if not stops.strings:
        return False
    longest = max(map(len, stops.strings))
    text = known.text[-longest:] + new_text(tokenizer, tokens, known)
    return any(string in text for string in stops.strings)
