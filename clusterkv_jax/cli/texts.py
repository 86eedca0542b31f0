"""What the command reads, and how it is told to read it: plain, or in the model's chat template."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

# More than a million tokens of any text: what is larger is refused before anything is loaded.
MOST_PROMPT = 64 * 2**20

_chat = partial(typer.Option, rich_help_panel="Chat template")
_special = partial(typer.Option, rich_help_panel="Special tokens")
Raw = Annotated[bool, _chat("--raw", help="Read the text as it is, also where the model has a chat template.")]
# What asked for the template before it was the default.
InChat = Annotated[bool, _chat("--chat", hidden=True)]
System = Annotated[str | None, _chat(help="The system's message of the chat, before the text.")]
TemplateArguments = Annotated[
    str | None, _chat("--chat-template-kwargs", help="More for the template, in JSON: '{\"enable_thinking\": false}'.")
]
SpecialTokens = Annotated[
    bool, _special(help="Whether names of special tokens in texts, such as <|im_end|>, are those tokens.")
]


def read_text(prompt_file: str) -> str:
    """The prompt: a UTF-8 file, or standard input for '-'; a byte order mark is no part of it."""
    if prompt_file == "-" and sys.stdin is None:
        raise ValueError("Standard input is closed; name a prompt file.")
    if prompt_file == "-":
        raw = sys.stdin.buffer.read(MOST_PROMPT + 1)
    else:
        with Path(prompt_file).open("rb") as file:
            raw = file.read(MOST_PROMPT + 1)
    if len(raw) > MOST_PROMPT:
        raise ValueError(f"Prompt file {prompt_file} is larger than {MOST_PROMPT // 2**20} MiB, the most that is read.")
    if raw.startswith(b"%PDF-"):
        raise ValueError(
            f"{prompt_file} is a PDF; make a text of it first, as 'pdftotext {prompt_file} text.txt' does."
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Prompt file {prompt_file} is not UTF-8: byte {error.start} is {raw[error.start]:#04x}."
        ) from error


def how_to_read(
    tokenizer: Any, raw: bool, chat: bool, system: str | None, arguments: str | None, special_tokens: bool
) -> dict[str, Any]:
    """What `generate` is told of texts: the chat template where the model has one, unless they are `raw`."""
    from clusterkv_jax.storage.schema import from_json
    from clusterkv_jax.text.chat import has_template

    if raw and (chat or system is not None or arguments is not None):
        raise ValueError("--raw reads a text without the chat template, of which --system and the like are parts.")
    templated = not raw and has_template(tokenizer)
    for option, given in {"--chat": chat, "--system": system, "--chat-template-kwargs": arguments}.items():
        if given not in (False, None) and not templated:
            raise ValueError(f"{option} needs a model whose tokenizer has a chat template, and this one has none.")
    more = None if arguments is None else from_json(arguments, "--chat-template-kwargs")
    return {"chat": templated, "system": system, "chat_template_kwargs": more, "special_tokens": special_tokens}


def asked(texts: Sequence[str], questions: Sequence[str], chat: bool) -> tuple[list[str], list[str] | None]:
    """One prompt per text and question, and the questions as fed, below a blank line; a chat makes that itself."""
    from clusterkv_jax.text.prompts import gap

    if not all(text.strip() for text in texts):
        raise ValueError("The prompt is empty; give a text of at least one token.")
    if not questions:
        return list(texts), None
    pairs = [(text, question) for text in texts for question in questions]
    # An empty question stays one, and is refused as such.
    below = [question if chat else gap(text, question) + question for text, question in pairs]
    return [text for text, _ in pairs], below
