"""A text, or a question about it, as a user's message in the model's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from clusterkv_jax.storage.schema import shown
from clusterkv_jax.text import guard
from clusterkv_jax.text.tokenizer import encode

# Characters without a meaning; one that occurs nowhere else marks the cut.
_PRIVATE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class Chat:
    """What stands around a user's message: the system's, and arguments of the template such as `enable_thinking`."""

    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def turn(tokenizer: Any, content: str, chat: Chat = Chat()) -> str:
    """A user's message in the template, and the beginning of the answer. Raises ValueError if the template fails."""
    return _turns(tokenizer, [content], chat)[0]


def cut_turn(tokenizer: Any, text: str, question: str, chat: Chat = Chat()) -> tuple[str, str]:
    """A message of a text and a question, as what comes before the question, and the question with what follows it.

    The first part is the same for every question, so that it can be compressed before the question is known.

    Raises:
        ValueError: one sentence, if the template fails, or shows a message other than once and whole.
    """
    mark = unused_letter(tokenizer, text, question)
    asked, alone, plain = _turns(tokenizer, [text + mark + question, text + mark, text + question], chat)
    parts = asked.split(mark)
    whole = len(parts) == 2 and "".join(parts) == plain and question.strip() in parts[1]
    if not (whole and parts[0] == alone.split(mark)[0]):
        raise ValueError("The model's chat template must show a message once and whole to be cut before a question.")
    return parts[0], parts[1]


def frame(tokenizer: Any, text: str, chat: Chat = Chat()) -> tuple[str, str]:
    """A message as what the template shows up to its end, and what it puts behind that (kvpress's protocol).

    Raises ValueError if the template fails, or shows the end of the message other than once.
    """
    mark = unused_letter(tokenizer, text)
    before, *after = turn(tokenizer, text + mark, chat).split(mark)
    if len(after) != 1:
        raise ValueError("The model's chat template does not print a message once, as it is.")
    return before, after[0]


def cut_messages(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], number: int, letters: int, chat: Chat = Chat()
) -> tuple[str, str, str]:
    """Messages, without the system's, cut behind so many letters of one's content: the text before the cut, the text
    behind it, and all of it as the template writes it without a mark at the cut.

    Nothing is before the cut where the template shows that place other than once. Raises ValueError if it fails.
    """
    first = _system(chat)
    mark = unused_letter(tokenizer, *(message["content"] for message in messages))
    where = {"number": len(first) + number, "letters": letters, "mark": mark}
    before, after, plain = _asked(
        tokenizer,
        "cut",
        {"conversation": [*first, *messages], **where},
        {"add_generation_prompt": True, **chat.arguments},
    )
    _check_system(chat, before + after)
    return before, after, before + after if plain is None else plain


def cut_paragraphs(messages: Sequence[Mapping[str, Any]], number: int, letters: int) -> tuple[str, str, str]:
    """The same for a model without a template: contents a blank line apart, an answer where it was written."""
    text, place = "", 0
    for at, message in enumerate(messages):
        content = message["content"]
        text += gap(text, content) if text and message["role"] != "assistant" else ""
        place = len(text) + letters if at == number else place
        text += content
    return text[:place], text[place:], text


def gap(text: str, question: str) -> str:
    """The line breaks that are missing between a text and a question for a blank line."""
    there = len(text) - len(text.rstrip("\n")) + len(question) - len(question.lstrip("\n"))
    return "\n" * max(0, 2 - there)


def frame_ids(tokenizer: Any, chat: Chat = Chat()) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the template puts before a user's message, whatever that is, and behind it."""
    before, after = frame(tokenizer, "x", chat)
    start = before.removesuffix("x")
    # A space at its end is often a part of the message's first token.
    both = zip(*(encode(tokenizer, start + word) for word in ("a", "I")), strict=False)
    prefix = tuple(mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], both))
    return prefix, tuple(encode(tokenizer, after))


def render(tokenizer: Any, conversations: Sequence[Sequence[Mapping[str, Any]]], **variables: Any) -> list[str]:
    """Conversations as the template writes them, in a process that ends where the template does not.

    `variables` are those of transformers' `apply_chat_template`, and the template's own.

    Raises ValueError in one sentence, if the template fails.
    """
    return _asked(tokenizer, "render", {"conversations": conversations}, variables)


def _asked(tokenizer: Any, kind: str, about: Mapping[str, Any], variables: Mapping[str, Any]) -> Any:
    """What a process makes of conversations with the template. Raises ValueError in one sentence, if that fails."""
    try:
        template = tokenizer.get_chat_template()
        variables = {**tokenizer.special_tokens_map, **variables}
        return guard.ask(kind, template=template, variables=variables, **about)
    except Exception as error:
        raise ValueError(f"The model's chat template fails: {shown(error)}.") from error


def _turns(tokenizer: Any, contents: Sequence[str], chat: Chat) -> list[str]:
    return _rendered(tokenizer, [[{"role": "user", "content": content}] for content in contents], chat)


def _rendered(tokenizer: Any, conversations: Sequence[Sequence[Mapping[str, str]]], chat: Chat) -> list[str]:
    """Conversations behind the system's message, and the beginning of an answer."""
    first = _system(chat)
    conversations = [[*first, *conversation] for conversation in conversations]
    texts = render(tokenizer, conversations, **{"add_generation_prompt": True, **chat.arguments})
    _check_system(chat, *texts)
    return texts


def _system(chat: Chat) -> list[Mapping[str, str]]:
    """The system's message, if there is one."""
    return [] if chat.system is None else [{"role": "system", "content": chat.system}]


def _check_system(chat: Chat, *texts: str) -> None:
    """Raise ValueError where a text shows no system message that there is."""
    if chat.system is not None and not all(chat.system.strip() in text for text in texts):
        raise ValueError("The model's chat template does not print a system message; leave it out.")


def unused_letter(tokenizer: Any, *texts: str) -> str:
    """A character that stands neither in these texts nor in the template."""
    read = *texts, str(tokenizer.chat_template)
    return next(chr(number) for number in _PRIVATE if not any(chr(number) in text for text in read))
