"""Conversations: turns about a text, whose compressed cache goes on through all of them.

    start       a text -> its compressed cache, and the programs of every turn
    ask         a question -> the conversation after its answer, and the answer
    ask_full    the last answer as the full cache would have given it
    save, load  a conversation as one file

In the cache stand the text, and behind it what the chat template writes of each turn. An answer's tokens are there when
it ends; the next turn appends what the template puts behind them. Shapes stay the same, so that no turn but the first
compiles. A method that returns to its budget while it decodes does so across turns, and never needs more slots. Others
append, and have room for `ROOM` tokens: then the conversation is read again, and what was said is compressed as a text.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clusterkv_jax import saving
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.layers import KVCache, nbytes, occupancy, take_sequences
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.decoding import (
    SEGMENT,
    DecodeState,
    append_step_jit,
    decode_loop,
    due_jit,
    next_token_jit,
    recompress_jit,
)
from clusterkv_jax.generation.batch import QUESTION_STEP, bucket, make_batch
from clusterkv_jax.generation.generate import append_questions, prefill_batch
from clusterkv_jax.generation.results import full_bytes
from clusterkv_jax.methods import Full, Method
from clusterkv_jax.presets import completed, method_for
from clusterkv_jax.runtime.checks import check_counts
from clusterkv_jax.runtime.errors import out_of_memory_explained
from clusterkv_jax.runtime.prng import seed_key, seed_keys
from clusterkv_jax.runtime.programs import Compilation, compilation, compiler
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import fetch, on_mesh
from clusterkv_jax.sampling import NOT_FINITE, Sampling, check_seed
from clusterkv_jax.storage.schema import checked
from clusterkv_jax.text.chat import Chat, has_template, next_turn
from clusterkv_jax.text.prompts import as_chat, encode_all, gap
from clusterkv_jax.text.stops import FinishReason, Stops, finish_reason, show, text_of
from clusterkv_jax.text.tokenizer import encode

# Tokens that may follow what was read, and an answer behind them, of methods whose caches grow with them.
ROOM = 1024
# Most tokens of an answer between two looks of the host: to show them, and to see whether it is to stop.
SHOWN = 8
NO_STOPS = Stops()

Message = Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Conversation:
    """Where a conversation stands. `ask` makes another one, and leaves this as it is.

    Attributes:
        model: from `load`.
        method: what is kept, with all that the model knows of it.
        chat: what the template is told; None for a model without one, whose turns stand a blank line apart.
        sampling: of answers.
        max_new_tokens: most tokens of an answer.
        seed: of the first turn; each further turn has the next.
        messages: what was said, by "role" and "content"; at first the text alone.
        tokens: in the cache, in their order.
        asked: how many of them stood before the last answer.
        pending: the last token of an answer that did not come to its end; not in the cache yet.
        left: tokens for which the cache still has room.
        cache: of one sequence.
    """

    model: Model = field(repr=False)
    method: Method
    chat: Chat | None
    sampling: Sampling
    max_new_tokens: int
    seed: int
    messages: tuple[Message, ...] = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    asked: int
    pending: tuple[int, ...]
    left: int
    cache: KVCache = field(repr=False)

    @property
    def turns(self) -> int:
        """Questions that were answered."""
        return len(self.messages) // 2


@dataclass(frozen=True)
class Answer:
    """An answer and its seconds.

    Attributes:
        text: without special tokens.
        tokens: as generated.
        finish_reason: "eos", "length", or "cancelled" where `stopped` said so.
        first_s: seconds from the question to the first token.
        seconds: to the last one.
        compile_s: seconds of them in which programs were compiled.
        read_again: whether the cache had no room for this turn.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    first_s: float
    seconds: float
    compile_s: float
    read_again: bool


@dataclass(frozen=True)
class Size:
    """What a conversation's cache holds: rows of a head, on average over all heads, of so many tokens; its bytes, and
    those of a full cache of these tokens.
    """

    rows: float
    tokens: int
    cache_bytes: int
    full_bytes: int


@dataclass(frozen=True)
class _Saved:
    """What a file has beside the cache."""

    messages: list[dict[str, str]]
    tokens: list[int]
    asked: int
    pending: list[int]
    left: int
    system: str | None
    chat_template_kwargs: dict[str, Any] | None


def start(
    model: Model,
    text: str,
    *,
    method: Method | str | None = None,
    ratio: float | None = None,
    tokens: int | None = None,
    budget: Budget | None = None,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    seed: int = 0,
    on_program: Callable[[str], None] = lambda name: None,
) -> Conversation:
    """Read a text, compress its cache, and compile what every turn runs.

    Args:
        model: from `load`, with a tokenizer.
        text: what the conversation is about; the first question stands below it, in the same message.
        method: what is kept, as in `generate`; and so are the next three.
        ratio: the share of the text's cache.
        tokens: or how many rows.
        budget: or any budget.
        system: the system's message before the text.
        chat_template_kwargs: further arguments of the template.
        max_new_tokens: most tokens of an answer.
        sampling: greedy by default.
        seed: of the first turn; each further turn has the next.
        on_program: called with the name of each program before it is compiled.

    Raises ValueError and MemoryError as `generate`.
    """
    chat = as_chat(has_template(model.tokenizer), system, chat_template_kwargs)
    method = _settled(model, method_for(model, method, budget=budget, ratio=ratio, tokens=tokens), chat)
    check_counts(1, max_new_tokens=max_new_tokens)
    check_seed(seed)
    (ids,), _ = encode_all(model, [text], None if chat is None else ["?"], chat=chat)
    said = {"role": "user", "content": text}
    how = method, chat, sampling or Sampling(), max_new_tokens, seed
    with _running(model, method):
        left, cache, _ = _read(model, method, ids, max_new_tokens, seed)
        conversation = Conversation(model, *how, (said,), tuple(ids), 0, (), left, cache)
        _compile(conversation, on_program)
    return conversation


def ask(
    conversation: Conversation,
    question: str,
    *,
    on_text: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[Conversation, Answer]:
    """The conversation after one more turn, and the answer.

    Args:
        conversation: stays as it is.
        question: the user's next message.
        on_text: called with each new piece of the answer.
        stopped: asked every few tokens; where it says True, the answer ends as it is.

    Raises:
        ValueError: for an empty question, a turn beyond the model's positions, and a template that shows an answer
            other than once and whole.
        MemoryError: as `generate`.
    """
    begin, here = time.perf_counter(), conversation
    content, new = _framed(here, question)
    needed = len(here.pending) + len(new) + here.max_new_tokens
    _check_positions(here, needed)
    with _running(here.model, here.method) as compiled:
        left, cache, ids = here.left, take_sequences(here.cache, jnp.asarray([0])), [*here.pending, *new]
        if read_again := needed > left:
            read = [*here.tokens, *here.pending]
            left, cache, _ = _read(here.model, here.method, read, needed, here.seed)
            ids = new
        left -= len(ids)
        cache, logits = append_questions(here.model, here.method, cache, [ids], QUESTION_STEP)
        cache, written, first, cut = _answered(here, here.method, cache, logits, on_text, stopped)
    answer = _answer(here.model, written, cut, (begin, first, compiled.seconds), read_again)
    tokens = (*here.tokens, *here.pending, *new)
    ended = answer.finish_reason == "eos"
    after = replace(
        here,
        messages=(*here.messages[: 2 * here.turns], content, {"role": "assistant", "content": answer.text}),
        tokens=(*tokens, *written[:-1]),
        asked=len(tokens),
        pending=() if ended else tuple(written[-1:]),
        left=left - len(written) + 1,
        cache=cache,
    )
    return after, answer


def ask_full(
    conversation: Conversation,
    *,
    on_text: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[Answer, int]:
    """The last answer as the full cache gives it, and the bytes of that cache; all that came before is read again.

    Arguments and errors are those of `ask`.
    """
    begin, here = time.perf_counter(), conversation
    if not here.turns:
        raise ValueError("Nothing was asked yet that the full cache could answer.")
    with _running(here.model, Full()) as compiled:
        _, cache, logits = _read(here.model, Full(), list(here.tokens[: here.asked]), here.max_new_tokens, here.seed)
        size = nbytes(cache)
        before = replace(here, messages=here.messages[: 2 * (here.turns - 1)])
        _, written, first, cut = _answered(before, Full(), cache, logits, on_text, stopped)
    return _answer(here.model, written, cut, (begin, first, compiled.seconds), read_again=True), size


def size(conversation: Conversation) -> Size:
    """What the conversation's cache holds."""
    cache, tokens = conversation.cache, len(conversation.tokens)
    rows = [count for layer in occupancy(cache) for count in layer[0]]
    return Size(float(np.mean(rows or [0])), tokens, nbytes(cache), full_bytes(conversation.model, tokens))


def save(path: str | os.PathLike[str], conversation: Conversation) -> None:
    """Write a conversation; the file appears only when it is whole. Raises ValueError as `save_cache`."""
    here, chat = conversation, conversation.chat or Chat()
    said = {"messages": list(map(dict, here.messages)), "tokens": list(here.tokens), "asked": here.asked}
    said |= {"pending": list(here.pending), "left": here.left, "system": chat.system}
    said |= {"chat_template_kwargs": dict(chat.arguments) or None}
    saving.save(path, here.cache, here.model.config, here.method, origin={"conversation": said})


def load(
    path: str | os.PathLike[str],
    model: Model,
    *,
    method: Method | str | None = None,
    ratio: float | None = None,
    tokens: int | None = None,
    budget: Budget | None = None,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    seed: int = 0,
    on_program: Callable[[str], None] = lambda name: None,
) -> Conversation:
    """Read a conversation that `save` wrote, for the same model and method, and compile what every turn runs.

    Arguments are those of `start`. Raises ValueError as `load_cache`, and for a cache that is no conversation's.
    """
    content = saving.origin(path).get("conversation")
    if content is None:
        raise ValueError(f"{path} holds a cache and no conversation.")
    said = checked(content, _Saved, str(path))
    chat = as_chat(has_template(model.tokenizer), said.system, said.chat_template_kwargs)
    method = _settled(model, method_for(model, method, budget=budget, ratio=ratio, tokens=tokens), chat)
    check_counts(1, max_new_tokens=max_new_tokens)
    check_seed(seed)
    cache = saving.load(path, model.config, method)
    how = method, chat, sampling or Sampling(), max_new_tokens, seed
    what = tuple(said.messages), tuple(said.tokens), said.asked, tuple(said.pending), said.left, cache
    conversation = Conversation(model, *how, *what)
    _check_said(path, conversation)
    with _running(model, method):
        _compile(conversation, on_program)
    return conversation


# --- a turn's tokens ---


def _settled(model: Model, method: Method, chat: Chat | None) -> Method:
    return completed(model, method) if chat is None else completed(model, method, chat)


def _framed(here: Conversation, question: str) -> tuple[Message, list[int]]:
    """The user's message, and the ids that it appends: what the template puts around it."""
    if not question.strip():
        raise ValueError(f"A question must have at least one word, got {question!r}.")
    if not here.turns:
        text = here.messages[0]["content"]
        below = gap(text, question) + question
        _, tails = encode_all(here.model, [text], [below], chat=here.chat)
        assert tails is not None
        return {"role": "user", "content": text + below}, tails[0]
    message = {"role": "user", "content": question}
    if here.chat is None:
        return message, encode(here.model.tokenizer, f"\n\n{question}")
    text, rewritten = next_turn(here.model.tokenizer, here.messages, question, here.chat)
    if rewritten:
        warnings.warn(
            "The chat template would write what was said anew, without an answer's thinking say; the cache keeps it as "
            "the model read and wrote it.",
            stacklevel=3,
        )
    return message, encode(here.model.tokenizer, text)


def _check_positions(here: Conversation, needed: int) -> None:
    tokens, positions = len(here.tokens), here.model.config.max_positions
    if tokens + needed > positions:
        question = needed - here.max_new_tokens
        raise ValueError(
            f"The conversation of {tokens:,} tokens, this turn of {question:,} and an answer of up to "
            f"{here.max_new_tokens:,} exceed the model's {positions:,} positions."
        )


def _check_said(path: Any, here: Conversation) -> None:
    """Raise ValueError for a saved conversation that cannot be."""
    roles = [message.get("role") for message in here.messages]
    ids, vocabulary = (*here.tokens, *here.pending), here.model.config.vocab_size
    whole = all(message.keys() == {"role", "content"} for message in here.messages)
    turns = roles == ["user"] or (len(roles) % 2 == 0 and roles == ["user", "assistant"] * (len(roles) // 2))
    if not (whole and roles and turns and len(here.pending) <= 1):
        raise ValueError(f"{path} must hold messages of user and assistant in turns.")
    if [len(here.tokens)] != np.asarray(here.cache.position).tolist() or not 0 <= here.asked <= len(here.tokens):
        raise ValueError(f"{path} must hold the tokens of its cache, got {len(here.tokens)}.")
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:
        raise ValueError(f"{path} holds token id {wrong[0]}; allowed are 0 to {vocabulary - 1}.")


# --- programs ---


@contextmanager
def _running(model: Model, method: Method) -> Iterator[Compilation]:
    """A block that runs programs of a model; it counts what compiling takes."""
    explained = out_of_memory_explained("going on with a conversation", uses_host=method.holds == "host")
    with own_settings(), compilation() as compiled, on_mesh(model.mesh, model.config.num_kv_heads), explained:
        yield compiled


def _read(model: Model, method: Method, ids: list[int], needed: int, seed: int) -> tuple[int, KVCache, jax.Array]:
    """How many tokens may follow these, their cache, and the logits after them."""
    grows = method.schedule.kind == "append" or not method.forgets
    room = bucket(ROOM + needed, 128) if grows else model.config.max_positions
    batch = replace(make_batch(model, [ids], max_new_tokens=1), reserve=room, step_tokens=QUESTION_STEP)
    return room, *prefill_batch(model, method, batch, seed_key(seed))


def _compile(here: Conversation, on_program: Callable[[str], None]) -> None:
    """Compile what `ask` runs, so that no later turn waits for it. A host store's programs compile as they run."""
    model, method = here.model, here.method
    if method.holds == "host":
        return
    compile, shapes = compiler(on_program), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    step = shapes(1, QUESTION_STEP), shapes(1)
    cache, logits = compile(append_step_jit, model.params, model.config, method, here.cache, *step)
    if compile(due_jit, method, cache) is not None:
        compile(recompress_jit, method, cache, model.config.ropes)
    keys = seed_keys([here.seed])
    token = compile(next_token_jit, logits, here.sampling, keys, 0)
    state = DecodeState(cache, token, jax.eval_shape(jnp.isnan, token))
    numbers = keys, np.asarray(1, np.int32), np.asarray(1, np.int32)
    how: Any = {"sampling": here.sampling, "eos_ids": model.config.eos_ids, "steps": SEGMENT}
    compile(decode_loop, model.params, model.config, method, state, *numbers, **how)


def _answered(
    here: Conversation,
    method: Method,
    cache: KVCache,
    logits: jax.Array,
    on_text: Callable[[str], None] | None,
    stopped: Callable[[], bool],
) -> tuple[KVCache, list[int], float, bool]:
    """The cache with an answer but for its last token, the tokens, when the first came, and whether it was cut."""
    model, sampling, most = here.model, here.sampling, here.max_new_tokens
    keys, ends = seed_keys([here.seed + here.turns]), model.config.eos_ids
    token = jax.block_until_ready(next_token_jit(logits, sampling, keys, 0))
    first, written, on_screen = time.perf_counter(), [int(fetch(token)[0])], ""
    state = DecodeState(cache, token, jnp.asarray([written[0] in ends]))
    to_screen = None if on_text is None else lambda _, text: on_text(text)
    while True:
        if NOT_FINITE in written:
            raise ValueError("The model's logits are not finite numbers; a cache of another method may have some.")
        whole = written[-1] in ends or len(written) == most
        cut = not whole and stopped()
        on_screen = show(model.tokenizer, 0, written, on_screen, NO_STOPS, whole or cut, to_screen)
        if whole or cut:
            return state.cache, written, first, cut
        numbers = keys, np.asarray(len(written), np.int32), np.asarray(min(SHOWN, most - len(written)), np.int32)
        how: Any = {"sampling": sampling, "eos_ids": ends, "steps": SEGMENT}
        state, new, count = decode_loop(model.params, model.config, method, state, *numbers, **how)
        written += [int(token) for token in fetch(new)[0][: int(count)]]


def _answer(model: Model, written: list[int], cut: bool, times: tuple[float, float, float], read_again: bool) -> Answer:
    """What is told of an answer; `times` are its beginning, its first token, and seconds of compiling."""
    begin, first, compile_s = times
    reason = "cancelled" if cut else finish_reason(model.tokenizer, written, model.config.eos_ids, NO_STOPS)
    text = text_of(model.tokenizer, written, NO_STOPS)
    return Answer(text, written, reason, first - begin, time.perf_counter() - begin, compile_s, read_again)
