"""Prefixes by their content: what requests that begin alike need not read again.

In the store stand texts, each with the context of its tokens: beginnings of prompts, which were compressed before the
rest was known, prompts that were read whole, and conversations up to an answer. A prompt is asked through the longest
text that it begins with. That is sound for any method: what a context has compressed was all in its text, so nothing of
another request is in it. With a folder for contexts those that others may go on from are written there too; what is not
in memory is looked for among the files.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterkv_jax import saving
from clusterkv_jax.engine import Context, RequestOutput, SamplingParams
from clusterkv_jax.serve import context_files
from clusterkv_jax.serve.errors import ApiError, refused
from clusterkv_jax.serve.prompts import Known, Prompt
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.text_keys import TextKey, key_of, longest_beginning
from clusterkv_jax.text.tokenizer import encode

_log = logging.getLogger(__name__)
Tokens = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Prefix:
    """A text in the store: the tokens of its context, which may be made only now, and the last one of an answer, which
    is in no cache.
    """

    tokens: Tokens = field(repr=False)
    context: "asyncio.Future[Context]" = field(repr=False)
    last: Tokens = ()


@dataclass(frozen=True)
class Beginning:
    """How a prompt is asked: behind a context, of which `cached` tokens were there, with what is left of its tokens."""

    context: Context = field(repr=False)
    cached: int
    question: Tokens = field(repr=False)


async def beginning_of(server: Server, prompt: Prompt, max_new_tokens: int) -> Beginning | None:
    """The context that a prompt is asked through; None where all of it is read at once.

    The longest text that is there goes first, as far as there is room for what follows it beside the answer. A prompt
    whose end of what is shared was set by the client, or that has no such text, makes one: what is there is extended,
    or its beginning is read.
    """
    if server.settings.shared_contexts == 0:
        return None
    room, shared = server.limits["reserve"] - max_new_tokens, prompt.text[: prompt.cut]
    found = await _longest(server, prompt.text, len(prompt.text))
    if found is not None and found.letters == len(prompt.text):
        context = await _context(server, found, server.contexts[found])
        if not context.answered:  # its logits are there
            return Beginning(context, context.length, ())
        found = await _longest(server, prompt.text, len(prompt.text) - 1)
    rest = () if found is None else _tokens_behind(server, found, prompt.text)
    makes_own = len(prompt.shared) >= server.settings.least_shared and 0 < len(prompt.rest) <= room
    if found is not None and len(rest) <= room and not (makes_own and prompt.exact and found.letters < len(shared)):
        return await _behind(server, found, len(server.contexts[found].tokens), rest)
    if makes_own:
        cached = await _begin(server, shared, tuple(prompt.shared))
        return await _behind(server, key_of(shared), cached, tuple(prompt.rest))
    if found is not None and len(server.contexts[found].tokens) >= len(rest):
        cached, most = len(server.contexts[found].tokens), max(1, room)
        context = await extended(server, await _context(server, found, server.contexts[found]), rest[:-most])
        return Beginning(context, cached, rest[-most:])
    return None


def known_beginnings(server: Server) -> Known:
    """The tokens of texts that the store has now."""
    contexts = dict(server.contexts)  # another thread may ask, while texts come and go

    def known(text: str) -> tuple[int, Iterable[int]]:
        found = longest_beginning(text, contexts.keys(), len(text))
        return (0, ()) if found is None else (found.letters, (*contexts[found].tokens, *contexts[found].last))

    return known


def remember(
    server: Server, key: TextKey, tokens: Tokens, context: "asyncio.Future[Context]", last: Tokens = ()
) -> Prefix:
    """Put a text into the store; those that were asked longest ago leave it."""
    prefix = Prefix(tokens, context, last)
    server.contexts[key] = prefix
    server.contexts.move_to_end(key)
    while len(server.contexts) > server.settings.shared_contexts:
        server.contexts.popitem(last=False)
    return prefix


def remember_prompt(server: Server, text: str, context: Context) -> None:
    """Put a whole prompt into the store, for who asks it again, or goes on from another answer than the one it gets."""
    if context.length >= server.settings.least_shared:
        remember(server, key_of(text), context.tokens, _done(context))


def remember_answer(server: Server, text: str, output: RequestOutput) -> str | None:
    """Put a conversation up to its answer into the store, and say its text; None of one that has left no context.

    A text that a stop has cut is not what the cache has seen.
    """
    if output.context is None or output.result is None or output.finish_reason not in ("eos", "length"):
        return None
    if output.context.length < server.settings.least_shared:
        return None
    last = () if output.finish_reason == "eos" else (output.result.tokens[0][-1],)
    whole = text + output.result.texts[0]
    _remember_and_write(server, key_of(whole), output.context.tokens, _done(output.context), last)
    return whole


async def compact(server: Server, text: str) -> Context:
    """Bring the context of a text in the store to its budget, at once."""
    key = key_of(text)
    prefix = server.contexts[key]
    context = await _context(server, key, prefix)
    left = await asyncio.wrap_future(server.served.call(lambda engine: engine.compact(context)))
    _remember_and_write(server, key, prefix.tokens, _done(left), prefix.last)
    return left


async def whole(server: Server, prompt: Prompt) -> tuple[str, int]:
    """A text in the store that is all of a prompt, and how many of its tokens were there."""
    if server.settings.shared_contexts == 0:
        raise ApiError("This server shares no contexts, so it compacts none.")
    return prompt.text, await _begin(server, prompt.text, tuple(prompt.tokens))


async def extended(server: Server, context: Context, tokens: Tokens) -> Context:
    """A context with these tokens behind it, as many at a time as a slot has room for."""
    most = server.limits["reserve"] - 1
    for start in range(0, len(tokens), most):
        with refused():
            how = SamplingParams(max_tokens=1)
            request = server.engine.request(context, tokens[start : start + most], params=how, keep=True)
        async for output in server.served.submit(request):
            assert output.context is not None
            context = output.context
    return context


async def _begin(server: Server, text: str, tokens: Tokens) -> int:
    """See that a text of these tokens is in the store; how many of them were there.

    A context that has more than is new is extended, which takes longer for each token than reading does.
    """
    key, found = key_of(text), await _longest(server, text, len(text))
    if found == key:
        return len(server.contexts[key].tokens)
    if found is not None:
        prefix, tail = server.contexts[found], _tokens_behind(server, found, text)
        if len(prefix.tokens) >= len(tail):
            made = asyncio.ensure_future(_continued(server, found, prefix, tail))
            _remember_and_write(server, key, (*prefix.tokens, *tail), made)
            return len(prefix.tokens)
    reading = server.served.call(lambda engine: engine.read(list(tokens)))
    _remember_and_write(server, key, tokens, asyncio.wrap_future(reading))
    return 0


async def _continued(server: Server, key: TextKey, prefix: Prefix, tail: Tokens) -> Context:
    return await extended(server, await _context(server, key, prefix), tail)


async def _behind(server: Server, key: TextKey, cached: int, question: Tokens) -> Beginning:
    server.contexts.move_to_end(key)
    return Beginning(await _context(server, key, server.contexts[key]), cached, question)


async def _context(server: Server, key: TextKey, prefix: Prefix) -> Context:
    """The context of a text, which may have left the store meanwhile; requests for the same one wait for one reading.
    What memory has no more is in its file.
    """
    files = server.files
    try:
        context = await asyncio.shield(prefix.context)
        if files is None or server.engine.holds(context) or not context_files.path_of(files, key).exists():
            return context
        loading = asyncio.ensure_future(_read_file(server, context_files.path_of(files, key), prefix.tokens))
        prefix = remember(server, key, prefix.tokens, loading, prefix.last)
        return await asyncio.shield(loading)
    except Exception:
        if server.contexts.get(key) is prefix:
            del server.contexts[key]
        raise


async def _longest(server: Server, text: str, most: int) -> TextKey | None:
    """The longest text in the store that this one begins with, of at most so many letters."""
    files = server.files
    stored = set[TextKey]() if files is None else await asyncio.to_thread(context_files.keys, files)
    found = longest_beginning(text, server.contexts.keys() | stored, most)
    if found is None or found in server.contexts or files is None:
        return found
    path = context_files.path_of(files, found)
    try:
        about = await asyncio.to_thread(saving.origin, path)
        tokens, last = tuple(about["token_ids"]), tuple(about["last"])
    except (ValueError, KeyError, OSError):
        path.unlink(missing_ok=True)
        return await _longest(server, text, most)
    if found not in server.contexts:  # another request has not asked for it meanwhile
        remember(server, found, tokens, asyncio.ensure_future(_read_file(server, path, tokens)), last)
    return found


def _tokens_behind(server: Server, known: TextKey, text: str) -> Tokens:
    """The tokens that follow the context of a text that this one begins with."""
    return (*server.contexts[known].last, *encode(server.model.tokenizer, text[known.letters :]))


# --- files ---


async def _read_file(server: Server, path: Path, tokens: Tokens) -> Context:
    """The context in a file; one that is damaged goes, and its tokens are read again."""
    try:
        saved = await asyncio.to_thread(server.engine.load, path)
    except (ValueError, OSError):
        path.unlink(missing_ok=True)
        return await asyncio.wrap_future(server.served.call(lambda engine: engine.read(list(tokens))))
    context_files.used(path)
    return await asyncio.wrap_future(server.served.call(lambda engine: engine.read(saved)))


def _remember_and_write(
    server: Server, key: TextKey, tokens: Tokens, context: "asyncio.Future[Context]", last: Tokens = ()
) -> None:
    prefix = remember(server, key, tokens, context, last)
    if server.files is not None:
        context_files.soon(server.files, _written(server, server.files, key, prefix))


async def _written(server: Server, files: context_files.ContextFiles, key: TextKey, prefix: Prefix) -> None:
    """Write a context, if it is still in the store when its turn comes."""
    origin = {"token_ids": list(prefix.tokens), "last": list(prefix.last)}
    try:
        context = await asyncio.shield(prefix.context)
        async with files.turn:
            if server.contexts.get(key) is prefix and server.engine.holds(context):
                path = context_files.path_of(files, key)
                making = server.served.call(lambda engine: engine.saver(context, path, origin=origin))
                await asyncio.to_thread(await asyncio.wrap_future(making))
                await asyncio.to_thread(context_files.prune, files)
    except Exception as error:
        _log.warning("A context was not written: %s", error)


def _done(context: Context) -> "asyncio.Future[Any]":
    future = asyncio.get_running_loop().create_future()
    future.set_result(context)
    return future
