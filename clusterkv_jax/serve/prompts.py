"""Messages as tokens, in two parts: what later requests may share, compressed, and what comes after it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clusterkv_jax.checkpoints import Model
from clusterkv_jax.text.chat import Chat, cut_messages, cut_paragraphs, gap, has_template, render
from clusterkv_jax.text.prompts import MOST_LETTERS
from clusterkv_jax.text.tokenizer import Tokens, encode

Message = Mapping[str, Any]
# The tokens that are known of a text's beginning: of how many letters, and which.
Known = Callable[[str], tuple[int, Iterable[int]]]
# The end of what is shared: the number of a message, and how many letters of its content belong to it.
Cut = tuple[int, int]


def _nothing_known(_text: str) -> tuple[int, Iterable[int]]:
    return 0, ()


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens: `shared` is compressed before `rest` is known. Only a cut that somebody set is `exact`.

    `text` is what the tokens are of, and `cut` where the rest begins in it; a prompt without one shares nothing.
    """

    shared: Tokens = field(repr=False)
    rest: Tokens = field(repr=False)
    exact: bool = False
    text: str = field(default="", repr=False)
    cut: int = 0

    @property
    def tokens(self) -> Tokens:
        """All of them."""
        return self.shared + self.rest


@dataclass(frozen=True)
class ChatPrompt:
    """Messages with contents of plain text, the cut that a client set, and what the template is told beside them."""

    messages: Sequence[Message] = field(repr=False)
    cut: Cut | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def joined(texts: Sequence[str], ends: Sequence[bool]) -> tuple[str, int | None]:
    """Blocks of a message a blank line apart, and the letters up to the last one that `ends` what is shared."""
    content, cut = "", None
    for text, end in zip(texts, ends, strict=True):
        content += gap(content, text) + text if content else text
        cut = len(content) if end else cut
    return content, cut


def of_text(model: Model, text: str) -> Prompt:
    """A plain text, of which nothing is shared. Raises ValueError for one that no tokens can be made of."""
    _check(model, text)
    return Prompt([], encode(model.tokenizer, text, add_special_tokens=True))


def of_conversation(model: Model, conversation: ChatPrompt, known: Known = _nothing_known) -> Prompt:
    """Messages in the model's chat template, and the beginning of an answer; a blank line apart without a template.

    Shared is what stands before the client's cut, or else before the last user's message. Tokens that are `known` are
    not made again, which takes longer for a long text than anything else.

    Raises ValueError in one sentence, if the template fails or knows no tools.
    """
    messages, cut = conversation.messages, conversation.cut or _before_last_user(conversation.messages)
    templated = has_template(model.tokenizer)
    if "tools" in conversation.variables and "tools" not in str(getattr(model.tokenizer, "chat_template", None)):
        raise ValueError(f"The chat template of {model.name!r} knows no tools; leave them out.")
    shared, rest = _cut(model.tokenizer, messages, cut, conversation.variables)
    _check(model, shared + rest)
    begin = [] if not shared else _encoded(model, shared, known, is_first=not templated)
    end = encode(model.tokenizer, rest) if shared else _encoded(model, rest, known, is_first=not templated)
    exact = bool(shared) and conversation.cut is not None
    return Prompt(begin, end, exact=exact, text=shared + rest, cut=len(shared))


def _encoded(model: Model, text: str, known: Known, *, is_first: bool) -> Tokens:
    """Tokens of a text from its beginning; what begins every text stands before it where it `is_first`."""
    letters, tokens = known(text)
    rest = text[letters:]
    return [*tokens, *(encode(model.tokenizer, rest, add_special_tokens=is_first and not letters) if rest else ())]


def _check(model: Model, text: str) -> None:
    if model.tokenizer is None:
        raise ValueError(f"Model {model.name!r} has no tokenizer, so the prompt must be token ids.")
    if not text.strip():
        raise ValueError("The prompt is empty; give at least one word.")
    if len(text) > MOST_LETTERS * model.config.max_positions:
        raise ValueError(
            f"The prompt has {len(text):,} letters, far more than the model's {model.config.max_positions:,} positions "
            "hold."
        )


def _before_last_user(messages: Sequence[Message]) -> Cut | None:
    """The end of the message before the last user's."""
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=0)
    return (last - 1, len(messages[last - 1]["content"])) if last else None


def _cut(tokenizer: Any, messages: Sequence[Message], cut: Cut | None, variables: Mapping[str, Any]) -> tuple[str, str]:
    """The text before and after the cut; nothing is before it where the template writes a message in another way."""
    if not has_template(tokenizer):
        before, after, _ = cut_paragraphs(messages, *cut or (0, 0))
        return before, after
    if cut is None:
        return "", render(tokenizer, [messages], **{"add_generation_prompt": True, **variables})[0]
    before, after, plain = cut_messages(tokenizer, messages, *cut, Chat(arguments=variables))
    return (before, after) if before + after == plain else ("", plain)


def continued(conversation: ChatPrompt, goes_on: bool) -> ChatPrompt:
    """The conversation whose last message, one of the assistant, is to be written on, where it `goes_on`."""
    if not goes_on:
        return conversation
    variables = {**conversation.variables, "add_generation_prompt": False, "continue_final_message": True}
    return replace(conversation, variables=variables)
