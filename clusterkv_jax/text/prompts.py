"""Prompts and questions as tokens: plain, or as a user's message in the model's chat template."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from reprlib import repr as shown
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Int

from clusterkv_jax.text import tokenizer as door
from clusterkv_jax.text.chat import Chat, cut_turn, frame, gap, has_template, turn
from clusterkv_jax.text.tokenizer import Tokens

# What is read: a text, or its ids in a list or an array.
Text = str | Sequence[int] | Int[Array | np.ndarray, "_"]
# Also what a tokenizer of transformers returns for several texts: their ids, and which of them are no padding.
Texts = Sequence[Text] | Int[Array | np.ndarray, "_ _"] | Mapping[str, Any]
# Letters of a token, more than any text has on average: what is longer is refused before it is cut into tokens.
MOST_LETTERS = 256


def as_chat(chat: Any, system: Any, arguments: Any) -> Chat | None:
    """What `generate` is told of a chat; None where prompts are read as they are. Raises ValueError for wrong types."""
    if not isinstance(chat, bool):
        raise ValueError(f"chat must be True or False, got {shown(chat)}.")
    if not (system is None or (isinstance(system, str) and system.strip())):
        raise ValueError(f"system must be a text that is not empty or None, got {shown(system)}.")
    named = isinstance(arguments, Mapping) and all(isinstance(name, str) for name in arguments)
    if not (arguments is None or named):
        raise ValueError(f"chat_template_kwargs must be values by name or None, got {shown(arguments)}.")
    if taken := {"conversations", "messages", "chat_template", "template"} & set(arguments or ()):
        raise ValueError(f"chat_template_kwargs must not name {min(taken)}, which is what the template writes.")
    if not chat and (system is not None or arguments):
        raise ValueError("system and chat_template_kwargs are parts of a chat template: they need chat=True.")
    return Chat(system, dict(arguments or {})) if chat else None


def encode_all(
    model: Any, prompts: Any, questions: Any = None, *, chat: Chat | None = None, special_tokens: bool = True
) -> tuple[list[Tokens], list[Tokens] | None]:
    """Token ids of prompts, and of questions about them; ids stay as they are.

    In a chat a prompt and its question are one message, with a blank line between them, cut before the question.

    Args:
        model: what has a `tokenizer`, a `name` and a `config`.
        prompts: texts, which get the tokens that begin a text, or token ids.
        questions: one per prompt, or None.
        chat: what stands around the texts.
        special_tokens: whether names of special tokens in texts are those tokens.

    Raises ValueError, naming the text by its kind and number, for what is empty or neither.
    """
    if not isinstance(special_tokens, bool):
        raise ValueError(f"special_tokens must be True or False, got {shown(special_tokens)}.")
    texts = listed(model, prompts, "prompt")
    asked = None if questions is None else listed(model, questions, "question")
    if asked is not None and len(asked) != len(texts):
        raise ValueError(f"Questions must be one per prompt, got {len(asked)} for {len(texts)} prompts.")
    to_ids = partial(door.encode, model.tokenizer, split_special_tokens=not special_tokens)
    if chat is None:
        with_beginning = partial(to_ids, add_special_tokens=True)
        ids = [_ids(model, text, f"prompt {i}", with_beginning) for i, text in enumerate(texts)]
        if asked is None:
            return ids, None
        return ids, [_ids(model, text, f"question {i}", to_ids) for i, text in enumerate(asked)]
    if not has_template(model.tokenizer):
        raise ValueError(f"chat needs a model whose tokenizer has a chat template, and {model.name!r} has none.")
    for kind, parts in (("prompt", texts), ("question", asked or [])):
        for i, text in enumerate(parts):
            if not isinstance(text, str):
                raise ValueError(f"{kind} {i} must be a text to be part of a chat, got {shown(text)}.")
            _check_text(model, text, f"{kind} {i}")
    tokenizer = model.tokenizer
    own = None if special_tokens else frame(tokenizer, "x", chat)
    if asked is None:
        return [_chat_ids(tokenizer, turn(tokenizer, text, chat), own, "both") for text in texts], None
    pairs = zip(texts, asked, strict=True)
    cuts = [cut_turn(tokenizer, text, gap(text, question) + question, chat) for text, question in pairs]
    heads = [_chat_ids(tokenizer, head, own, "front") for head, _ in cuts]
    return heads, [_chat_ids(tokenizer, tail, own, "back") for _, tail in cuts]


def is_list(x: Any) -> bool:
    """Whether something lists things: texts, bytes and mappings do not, nor does an array of no dimension."""
    iterable = isinstance(x, Iterable) and not isinstance(x, str | bytes | bytearray | memoryview | Mapping)
    return iterable and np.ndim(x) != 0 if isinstance(x, np.ndarray | jax.Array) else iterable


def listed(model: Any, texts: Any, kind: str) -> list[Any]:
    """Texts in a list; what a tokenizer padded, without its padding. Raises ValueError for one that stands alone."""
    if isinstance(texts, Mapping) and "input_ids" in texts:
        return _unpadded(texts, kind)
    if not is_list(texts):
        raise ValueError(f"{kind}s must be a list of texts or of token ids, got {shown(texts)}; put it in a list.")
    rows = list(texts)
    pad = getattr(model.tokenizer, "pad_token_id", None)
    if pad is not None and isinstance(texts, np.ndarray | jax.Array) and texts.ndim == 2 and texts.size:
        ids = np.asarray(texts)
        ends = (ids[:, 0] == pad) | (ids[:, -1] == pad)
        if ends.any() and not ends.all():  # the longest has none
            raise ValueError(
                f"{kind} {int(ends.argmax())} begins or ends with the padding token {pad}; give lists of their own "
                "lengths, or what the tokenizer returned, with its attention_mask."
            )
    return rows


def _unpadded(encoded: Mapping[str, Any], kind: str) -> list[Any]:
    """Rows of ids without those that the mask leaves out."""
    rows = list(encoded["input_ids"])
    if "attention_mask" not in encoded:
        raise ValueError(f"{kind}s have input_ids and no attention_mask; give lists of ids, or both.")
    masks = list(encoded["attention_mask"])
    shapes = [(np.shape(row), np.shape(mask)) for row, mask in zip(rows, masks, strict=False)]
    if not rows or len(rows) != len(masks) or any(len(a) != 1 or a != b for a, b in shapes):
        raise ValueError(f"{kind}s must have input_ids and an attention_mask of the same shape, two dimensions each.")
    return [np.asarray(row)[np.asarray(mask) == 1] for row, mask in zip(rows, masks, strict=True)]


def _ids(model: Any, text: Any, name: str, to_ids: Callable[[str], Tokens]) -> Tokens:
    """A text's ids by `to_ids`, or ids as they are."""
    if isinstance(text, str):
        _check_text(model, text, name)
        return to_ids(text)
    if not is_list(text):
        raise ValueError(f"{name} must be a text or a list of whole numbers, got {shown(text)}.")
    # One transfer for an array of a device.
    ids = np.asarray(text) if isinstance(text, jax.Array) else text
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(f"{name} must be a text or a list of whole numbers, got {shown(token)} in it.")
    return [int(token) for token in ids]


def _check_text(model: Any, text: str, name: str) -> None:
    """Raise ValueError for a text that no tokens can be made of."""
    if model.tokenizer is None:
        raise ValueError(f"Model {model.name!r} has no tokenizer, so {name} must be token ids, not text.")
    if not text.strip():
        raise ValueError(f"{name} is empty; give at least one word.")
    positions = model.config.max_positions
    if len(text) > MOST_LETTERS * positions:
        raise ValueError(f"{name} has {len(text):,} letters, far more than the model's {positions:,} positions hold.")
    door.check_whole(text, name)


def _chat_ids(tokenizer: Any, text: str, own: tuple[str, str] | None, of: Literal["front", "back", "both"]) -> Tokens:
    """Ids of a part of a chat. With `own`, what the template puts around a message, other letters are letters."""
    if own is None:
        return door.encode(tokenizer, text)
    front = own[0].removesuffix("x") if of != "back" else ""
    back = own[1] if of != "front" else ""
    if not (text.startswith(front) and text.endswith(back) and len(front) + len(back) <= len(text)):
        raise ValueError("The model's chat template writes something else for each message; leave special_tokens=True.")
    inner = door.encode(tokenizer, text[len(front) : len(text) - len(back)], split_special_tokens=True)
    return door.encode(tokenizer, front) + inner + door.encode(tokenizer, back)
