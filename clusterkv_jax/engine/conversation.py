"""Conversations: turns about a text, whose compressed cache goes on through all of them.

In the cache stand the text, and behind it what the chat template writes of each turn. An answer leaves its cache as a
context of an engine; the next turn feeds the answer's last token and what the template puts behind it. Nothing is read
twice, unless a method that only appends has no more room: then all is read again, and what was said is compressed.
"""

import copy
import dataclasses
import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterkv_jax import saving
from clusterkv_jax.budget import Budget
from clusterkv_jax.checkpoints.loading import Model, check_model
from clusterkv_jax.engine.contexts import Context
from clusterkv_jax.engine.engine import Engine
from clusterkv_jax.engine.outputs import RequestOutput
from clusterkv_jax.engine.params import SamplingParams, params_of
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.generation.results import Result
from clusterkv_jax.methods import Method
from clusterkv_jax.presets import completed, method_for
from clusterkv_jax.runtime.checks import check_counts
from clusterkv_jax.runtime.prng import MOST_SEED
from clusterkv_jax.sampling import Sampling, check_seed
from clusterkv_jax.storage.schema import checked
from clusterkv_jax.text.chat import cut_messages, cut_paragraphs, gap, has_template
from clusterkv_jax.text.prompts import as_chat
from clusterkv_jax.text.tokenizer import Tokens, encode

# Tokens that a slot has room for beside an answer; a longer turn enters in parts.
ROOM = 256
Message = Mapping[str, str]


@dataclass(frozen=True)
class _Dialogue:
    """Where a conversation stands.

    Attributes:
        messages: of user and assistant.
        front: what was read since, the beginning of the user's next message.
        seen: the text that the model has read and written.
        last: the last token of an answer that did not come to its end; not in the cache yet.
        context: the cache; None before anything is read.
        asked: tokens before the last answer.
        read_tokens: that the last turn read.
        result: of the last answer.
    """

    messages: tuple[Message, ...] = ()
    front: str = ""
    seen: str = ""
    last: tuple[int, ...] = ()
    context: Context | None = None
    asked: int = 0
    read_tokens: int = 0
    result: Result | None = None


@dataclass(frozen=True)
class _Saved:
    """What a file has beside the cache and its tokens."""

    max_tokens: int
    seed: int
    max_new_tokens: int
    sampling: dict[str, Any]
    system: str | None
    chat_template_kwargs: dict[str, Any] | None
    messages: list[dict[str, str]]
    front: str
    seen: str
    last: list[int]
    asked: int
    read_tokens: int
    reading: str = "whole"
    window: int = Gate.window
    chunk: int = Gate.chunk


class Conversation:
    """A conversation with a model, which reads each word once.

    Args:
        model: from `load`, with a tokenizer.
        method: what is kept, as in `generate`; and so are the next three. A budget that is a ratio is one of all that
            was read and said so far.
        ratio: the share of the cache.
        tokens: or how many rows.
        budget: or any budget.
        max_tokens: most tokens of all turns; never more than the model's positions.
        seed: of the first turn; each further turn has the next.
        max_new_tokens: most tokens of an answer.
        sampling: greedy by default.
        system: the system's message.
        chat_template_kwargs: further arguments of the model's chat template.
        reading: as in `generate`, of what the conversation begins with; and so are the next two. Later texts enter in
            parts, and rows return to their budget between these.
        window: newest tokens that stay.
        chunk: tokens that are read at once.

    Attributes:
        model: as it was given.
        method: what is kept, with all that the model knows of it.
        max_tokens: as it was given, or the model's positions; and so are the next three.
        max_new_tokens: most tokens of an answer.
        seed: of the first turn.
        sampling: of answers.

    Raises ValueError as `generate` and `Engine`.
    """

    def __init__(
        self,
        model: Model,
        *,
        method: Method | str | None = None,
        ratio: float | None = None,
        tokens: int | None = None,
        budget: Budget | None = None,
        max_tokens: int = 8192,
        seed: int = 0,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reading: str = "whole",
        window: int = Gate.window,
        chunk: int = Gate.chunk,
    ) -> None:
        check_model(model)
        if model.tokenizer is None:
            raise ValueError(f"A conversation needs a model with a tokenizer, and {model.name!r} has none.")
        check_counts(1, max_new_tokens=max_new_tokens)
        check_counts(2, max_tokens=max_tokens)
        check_seed(seed)
        self._chat = as_chat(has_template(model.tokenizer), system, chat_template_kwargs)
        named = method_for(model, method, budget=budget, ratio=ratio, tokens=tokens)
        settled = completed(model, named) if self._chat is None else completed(model, named, self._chat)
        self.max_tokens, self.max_new_tokens = min(max_tokens, model.config.max_positions), max_new_tokens
        self.seed, self.sampling = int(seed), sampling or Sampling()
        sizes: Any = {"slots": 1, "max_tokens": max_tokens, "reserve": max_new_tokens + ROOM}
        self._read_so = {"reading": reading, "window": window, "chunk": chunk}
        self._engine = Engine(model, method=settled, keep_short=True, **sizes, **self._read_so)
        self.model, self.method = model, self._engine.method
        self._state = _Dialogue()

    # --- what is said ---

    def read(self, text: str) -> None:
        """Read a text, which begins the user's next message, and compress it now.

        Raises ValueError for an empty text and one beyond `max_tokens`, MemoryError if memory does not suffice.
        """
        if not text.strip():
            raise ValueError(f"A text must have at least one word, got {text!r}.")
        here, count = self._state, len(self._state.messages)
        front = here.front + gap(here.front, text) + text if here.front else text
        # What stands before any question that may follow: templates trim what stands alone.
        before, _, _ = self._cut(here.messages, front + "\n\n?", count, len(front))
        if not before or text.strip() not in before:
            raise ValueError("The model's chat template must show a text once and whole for a question to follow it.")
        if here.context is None:
            ids = self._encoded(before)
            self._check_room(ids, 1)
            context, read = self._engine.read(ids, max_new_tokens=self.max_new_tokens), len(ids)
        else:
            ids = [*here.last, *self._encoded(self._behind(before))]
            self._check_room(ids, 1)
            context, read = self._fed(here.context, ids)
        self._state = replace(here, front=front, seen=before, last=(), context=context, read_tokens=read)

    def say(self, message: str) -> Iterator[str]:
        """The answer to the user's next message, in pieces as they come; who stops listening ends it as it is.

        Raises:
            ValueError: for an empty message, a turn beyond `max_tokens`, and a template that shows an answer other than
                once and whole.
            MemoryError: if memory does not suffice.
        """
        if not message.strip():
            raise ValueError(f"A message must have at least one word, got {message!r}.")
        here = self._state
        content, text, seen = self._next(message)
        ids, context, read = [*here.last, *self._encoded(text)], here.context, 0
        self._check_room(ids, self.max_new_tokens)
        if context is not None and len(ids) > ROOM:
            context, read = self._fed(context, ids[:-ROOM])
            ids = ids[-ROOM:]
        prompt = (ids,) if context is None else (context, ids)
        request = self._engine.request(*prompt, params=self._params(), stream=True, keep=True)
        outputs: deque[RequestOutput | Exception] = deque()
        (handle,) = self._engine.submit(request, outputs.append)
        try:
            while outputs or not handle.done:
                while not outputs:
                    self._engine.step()
                if isinstance(output := outputs.popleft(), Exception):
                    raise output
                if output.text:
                    yield output.text
        finally:
            handle.cancel()
            if handle.context is not None:
                self._state = self._answered(here, content, seen, handle.result(), handle.context, read)

    def compile(self) -> None:
        """Compile what every turn runs, so that none waits for it; nothing is said."""
        context, asked = self._state.context, {"max_new_tokens": 2, "keep": True}
        prompt = ([0] * 2,) if context is None else (context, [0])
        handle = self._engine.add(*prompt, **asked)
        if context is None:
            handle.result()
            handle = self._engine.add(handle.context, [0], **asked)
        handle.result()

    # --- where it stands ---

    @property
    def turns(self) -> int:
        """Messages that were answered."""
        return len(self._state.messages) // 2

    @property
    def messages(self) -> Sequence[Message]:
        """What was said, by "role" and "content"."""
        return self._state.messages

    @property
    def tokens(self) -> int:
        """Tokens that the cache has seen: all that was read and said, but for the last token of an answer."""
        return 0 if self._state.context is None else self._state.context.length

    @property
    def read_tokens(self) -> int:
        """Tokens that the last turn read: what was new, or all of them where the cache had no more room."""
        return self._state.read_tokens

    @property
    def rows(self) -> float:
        """Rows that a head holds, on average over all heads that no window limits."""
        return 0.0 if self._state.context is None else self._engine.rows(self._state.context)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, with room for what follows."""
        return 0 if self._state.context is None else self._engine.rows(self._state.context)[1]

    @property
    def result(self) -> Result | None:
        """The last answer as `generate` returns one, with its statistics."""
        return self._state.result

    @property
    def prompt(self) -> list[int]:
        """The tokens before the last answer."""
        return [] if self._state.context is None else list(self._state.context.tokens[: self._state.asked])

    # --- copies ---

    def fork(self) -> "Conversation":
        """Another conversation that goes on from here. They share the engine, and the cache until one says more."""
        return copy.copy(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation, with its cache; the file appears only when it is whole. Raises ValueError as
        `save_cache`, and for a conversation that has not begun.
        """
        here, chat = self._state, self._chat
        if here.context is None:
            raise ValueError("There is nothing to save yet: the conversation has not begun.")
        said = {name: getattr(here, name) for name in ("front", "seen", "asked", "read_tokens")}
        said |= {"messages": list(map(dict, here.messages)), "last": list(here.last)}
        said |= self._read_so | {
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
        }
        said |= {"sampling": dataclasses.asdict(self.sampling), "system": None if chat is None else chat.system}
        said["chat_template_kwargs"] = None if chat is None else dict(chat.arguments) or None
        origin = {"conversation": said, "token_ids": list(here.context.tokens)}
        self._engine.save(here.context, path, origin=origin)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model, *, method: Method | None = None) -> "Conversation":
        """A conversation that `save` wrote, with the same model.

        Its method is the one that it was made with; one that is not of this library is to be given. Raises ValueError
        as `load_cache`, and for a cache that is no conversation's.
        """
        content = saving.origin(path).get("conversation")
        if content is None:
            raise ValueError(f"{path} holds a cache and no conversation.")
        said = checked(content, _Saved, str(path))
        how = {name: getattr(said, name) for name in ("max_tokens", "seed", "max_new_tokens", "system")}
        how |= {name: getattr(said, name) for name in ("reading", "window", "chunk")}
        how |= {"sampling": Sampling(**said.sampling), "chat_template_kwargs": said.chat_template_kwargs}
        new = cls(model, method=saving.made_by(path) if method is None else method, **how)
        context = new._engine.read(Path(path), max_new_tokens=said.max_new_tokens)
        where = said.front, said.seen, tuple(said.last), context, said.asked, said.read_tokens
        new._state = _Dialogue(tuple(said.messages), *where)
        _check_said(path, new._state, model.config.vocab_size)
        return new

    # --- a turn's tokens ---

    def _cut(self, messages: Sequence[Message], content: str, number: int, letters: int) -> tuple[str, str, str]:
        """Messages and the user's next one, cut as `cut_messages` does."""
        asked = [*messages, {"role": "user", "content": content}]
        if self._chat is None:
            return cut_paragraphs(asked, number, letters)
        return cut_messages(self.model.tokenizer, asked, number, letters, self._chat)

    def _next(self, message: str) -> tuple[str, str, str]:
        """The content of the user's next message, what of its text is new, and all of the text."""
        here = self._state
        count, front = len(here.messages), here.front
        content = front + gap(front, message) + message if front else message
        # Nothing new stands before the cut: it is behind what was read, or behind the last answer.
        at = (count, len(front)) if front else (count - 1, len(here.messages[-1]["content"])) if count else (0, 0)
        before, after, plain = self._cut(here.messages, content, *at)
        new = after if here.context is not None else plain
        whole = here.context is None or (before and _letters(before + after) == _letters(plain))
        if not whole or message.strip() not in new:
            raise ValueError(
                "The model's chat template must show an answer once and whole for a conversation to go on."
            )
        if here.context is not None and _letters(before) != _letters(here.seen):
            warnings.warn(
                "The chat template would write what was said anew, without an answer's thinking say; the cache keeps "
                "it as the model read and wrote it.",
                stacklevel=3,
            )
        return content, new, here.seen + new if here.context is not None else plain

    def _behind(self, before: str) -> str:
        """What of a text stands behind all that was read and said, as the template writes it."""
        here = self._state
        if here.front:
            known, _, _ = self._cut(here.messages, here.front + "\n\n?", len(here.messages), len(here.front))
        else:
            last = len(here.messages) - 1
            known, _, _ = self._cut(here.messages, "?", last, len(here.messages[last]["content"]))
        if not before.startswith(known):
            raise ValueError("The model's chat template writes what was said anew for each message.")
        return before[len(known) :]

    def _encoded(self, text: str) -> Tokens:
        """Token ids of text that is new; those that begin a text stand before the first."""
        first = self._state.context is None and self._chat is None
        return encode(self.model.tokenizer, text, add_special_tokens=first)

    def _check_room(self, ids: Sequence[int], answer: int) -> None:
        tokens = self.tokens
        if tokens + len(ids) + answer > self.max_tokens:
            raise ValueError(
                f"The conversation of {tokens:,} tokens, this turn of {len(ids):,} and an answer of up to {answer:,} "
                f"exceed the {self.max_tokens:,} tokens that it has room for."
            )

    def _fed(self, context: Context, ids: Sequence[int]) -> tuple[Context, int]:
        """The context with these tokens behind it, and how many were read; its own too where it had no room."""
        count, most = 0, self.max_new_tokens + ROOM - 1
        for start in range(0, len(ids), most):
            handle = self._engine.add(context, ids[start : start + most], max_new_tokens=1, keep=True)
            count += _read_of(handle.result())
            assert handle.context is not None
            context = handle.context
        return context, count

    def _params(self) -> SamplingParams:
        seed = (self.seed + self.turns) % (MOST_SEED + 1)
        return params_of(self.sampling, seed=seed, max_tokens=self.max_new_tokens)

    def _answered(
        self, here: _Dialogue, content: str, seen: str, result: Result, context: Context, count: int
    ) -> _Dialogue:
        """Where the conversation stands after an answer."""
        ((tokens,), (text,), (reason,)) = result.tokens, result.texts, result.finish_reasons
        said = ({"role": "user", "content": content}, {"role": "assistant", "content": text})
        last = () if reason == "eos" else (tokens[-1],)
        asked, count = context.length - len(tokens) + 1, count + _read_of(result)
        return _Dialogue((*here.messages, *said), "", seen + text, last, context, asked, count, result)


def _read_of(result: Result) -> int:
    """Tokens that the model read for an answer."""
    stats = result.stats
    return stats.prompt_tokens[0] + stats.question_tokens[0] - stats.cached_tokens[0]


def _letters(text: str) -> str:
    """Without blanks, which templates trim."""
    return "".join(text.split())


def _check_said(path: Any, here: _Dialogue, vocab_size: int) -> None:
    """Raise ValueError for a saved conversation that cannot be."""
    context = here.context
    assert context is not None
    roles = [message.get("role") for message in here.messages]
    whole = all(message.keys() == {"role", "content"} for message in here.messages)
    if not whole or roles != ["user", "assistant"] * (len(roles) // 2) or len(here.last) > 1:
        raise ValueError(f"{path} must hold messages of user and assistant in turns.")
    if not context.tokens or not 0 <= here.asked <= context.length:
        raise ValueError(f"{path} must hold the tokens of its cache, got {len(context.tokens)}.")
    if wrong := [token for token in (*context.tokens, *here.last) if not 0 <= token < vocab_size]:
        raise ValueError(f"{path} holds token id {wrong[0]}; allowed are 0 to {vocab_size - 1}.")
