"""What every suite is made of: cases, and how a case becomes the tokens that a model reads."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from clusterkv_jax.sampling import Sampling
from clusterkv_jax.text.chat import cut_messages, frame, has_template, turn
from clusterkv_jax.text.tokenizer import encode

Tokens = tuple[int, ...]
# Characters of a text whose count of tokens is kept: sentences and lines, not contexts.
_SHORT = 1024


@dataclass(frozen=True)
class Case:
    """One example of a suite.

    The context is read and compressed; question and answer prefix are fed afterwards, at their true positions. A case
    whose question and prefix are empty is compressed whole. `earlier` are turns, a question and its answer each, that
    follow the context before the question. Instead of texts a case may hold `reading`, the tokens of a context and of
    its true continuation; its score is the cross-entropy of the continuation (metric "nll").
    """

    id: str
    task: str
    context: str = ""
    question: str = ""
    answer_prefix: str = ""
    answers: tuple[str, ...] = ()
    metric: str = "string_match_all"
    max_new_tokens: int = 64
    classes: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    chat: bool = True
    truncate: bool = False
    reading: tuple[Tokens, Tokens] | None = None
    earlier: tuple[tuple[str, str], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EncodedPrompt:
    """The tokens of a case: what is compressed, what is fed afterwards, what is scored; `cut` counts those left out."""

    context: Tokens
    question: Tokens = ()
    continuation: Tokens = ()
    cut: int = 0

    @property
    def sha(self) -> str:
        """Identifies the tokens and where they are divided."""
        text = "|".join(",".join(map(str, part)) for part in (self.context, self.question, self.continuation))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def query_aware(case: Case) -> Case:
    """The same case with its first question inside the context, so that a method may look at it."""
    if case.earlier:
        (question, answer), *rest = case.earlier
        return replace(case, context=case.context + question, earlier=(("", answer), *rest))
    return replace(case, context=case.context + case.question, question="")


def counter(tokenizer: Any) -> Callable[[str], int]:
    """A function that counts the tokens of a text, without special ones."""

    def count(text: str) -> int:
        return len(encode(tokenizer, text))

    # Cases of long contexts are put together from the same sentences again and again.
    of_short = lru_cache(maxsize=2**16)(count)
    return lambda text: of_short(text) if len(text) < _SHORT else count(text)


def build_prompt(case: Case, tokenizer: Any, limit: int) -> EncodedPrompt:
    """The tokens of a case, inside the chat template where the tokenizer has one and the case wants it.

    The template goes around the context, and what it puts behind that stands between question and
    answer prefix (kvpress's protocol). Without a template the parts follow each other as they are, after the
    tokenizer's special tokens.

    Args:
        case: what to ask.
        tokenizer: of Hugging Face's interface.
        limit: the model's positions. A context that leaves no room for question and answer within them loses tokens
            in its middle if the case allows `truncate`, and is an error otherwise.

    Raises:
        ValueError: naming the case and the numbers, if it does not fit.
    """
    if case.reading is not None:
        prompt = EncodedPrompt(case.reading[0], (), case.reading[1])
    else:
        whole = not (case.question or case.answer_prefix)
        before, after, special = _wrap(case, tokenizer, whole)
        rest = after + case.answer_prefix
        context = encode(tokenizer, before, add_special_tokens=special)
        prompt = EncodedPrompt(tuple(context), tuple(encode(tokenizer, rest)))
    new = len(prompt.continuation) or case.max_new_tokens
    room = limit - len(prompt.question) - new
    if len(prompt.context) <= room:
        return prompt
    if not case.truncate or room < 2:
        raise ValueError(
            f"case {case.id} has {len(prompt.context)} tokens of context, {len(prompt.question)} of question and "
            f"{new} new tokens, which exceed the model's {limit} positions."
        )
    return replace(prompt, context=middle_cut(prompt.context, room), cut=len(prompt.context) - room // 2 * 2)


def middle_cut(tokens: Tokens, room: int) -> Tokens:
    """The first and the last `room // 2` tokens."""
    return tokens[: room // 2] + tokens[len(tokens) - room // 2 :]


def _wrap(case: Case, tokenizer: Any, whole: bool) -> tuple[str, str, bool]:
    """The context and what follows it up to the answer, in the template, and whether special tokens are still to be
    added.
    """
    if not case.chat or not has_template(tokenizer):
        turns = "".join(f"{question}{answer}\n" for question, answer in case.earlier)
        return case.context, turns + case.question, True
    try:
        if whole:
            return turn(tokenizer, case.context), "", False
        if case.earlier:
            return *_cut_turns(tokenizer, case), False
        before, after = frame(tokenizer, case.context)
        return before, case.question + after, False
    except ValueError as error:
        raise ValueError(f"Case {case.id}: {error}") from error


def _cut_turns(tokenizer: Any, case: Case) -> tuple[str, str]:
    """The context, and the turns that follow it."""
    said = [*(text for pair in case.earlier for text in pair), case.question]
    contents = [case.context + said[0], *said[1:]]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    before, after, _ = cut_messages(tokenizer, messages, 0, len(case.context))
    if not before or not all(text.strip() in after for text in said):
        raise ValueError("The model's chat template does not print every turn of a conversation whole.")
    return before, after
