"""Log probabilities of tokens in the forms of OpenAI's two interfaces."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from clusterkv_jax.generation.results import TokenLogprob


class Alternative(Struct):
    """A token in text and bytes, and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Alternative):
    """A token of an answer with the most likely ones at its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    """Those of an answer, or of a piece of it."""

    content: list[ChatLogprob]


class CompletionLogprobs(Struct):
    """The same in lists, with the letters before each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def of_chat(tokenizer: Any, logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """For a message; None where nobody asked."""
    if logprobs is None:
        return None
    content = []
    for each in logprobs:
        top = [_alternative(tokenizer, *pair) for pair in each.top]
        drawn = _alternative(tokenizer, each.token, each.logprob)
        content.append(ChatLogprob(drawn.token, drawn.logprob, drawn.bytes, top))
    return ChatLogprobs(content)


def of_completion(
    tokenizer: Any, logprobs: Sequence[TokenLogprob] | None, offset: int = 0
) -> CompletionLogprobs | None:
    """For a text of which `offset` letters were told before; None where nobody asked."""
    if logprobs is None:
        return None
    texts = [_text(tokenizer, each.token) for each in logprobs]
    top = [{_text(tokenizer, token): logprob for token, logprob in each.top} for each in logprobs]
    offsets = [offset + sum(map(len, texts[:number])) for number in range(len(texts))]
    return CompletionLogprobs(texts, [each.logprob for each in logprobs], top, offsets)


def _alternative(tokenizer: Any, token: int, logprob: float) -> Alternative:
    text = _text(tokenizer, token)
    return Alternative(text, logprob, list(text.encode()))


def _text(tokenizer: Any, token: int) -> str:
    """A token alone, by its name if it is special."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])
