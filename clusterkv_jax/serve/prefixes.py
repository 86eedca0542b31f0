"""Prefixes by their content: what requests that begin alike need not read again.

In the store stand texts, each with the context of its tokens: beginnings of prompts, which were compressed before the
rest was known, and whole conversations up to an answer. A prompt is asked through the longest text that it begins with.
That is sound for any method: what a context has compressed was all in its text, so nothing of another request is in it.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from clusterkv_jax.engine import Context, RequestOutput, SamplingParams
from clusterkv_jax.serve.errors import ApiError, refused
from clusterkv_jax.serve.prompts import Prompt
from clusterkv_jax.serve.server import Server
from clusterkv_jax.text.tokenizer import encode

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
    room, own = server.limits["reserve"] - max_new_tokens, prompt.text[: prompt.cut]
    found = _longest(server, prompt.text)
    rest = () if found is None else _tokens_behind(server, found, prompt.text)
    makes_own = len(prompt.shared) >= server.settings.least_shared and len(prompt.rest) <= room
    if found is not None and len(rest) <= room and not (makes_own and prompt.exact and len(found) < len(own)):
        return await _behind(server, found, len(server.contexts[found].tokens), rest)
    if makes_own:
        return await _behind(server, own, _begin(server, own, tuple(prompt.shared)), tuple(prompt.rest))
    if found is not None and len(server.contexts[found].tokens) >= len(rest):
        prefix, most = server.contexts[found], max(1, room)
        context = await extended(server, await asyncio.shield(prefix.context), rest[:-most])
        return Beginning(context, len(prefix.tokens), rest[-most:])
    return None


def remember(server: Server, text: str, tokens: Tokens, context: "asyncio.Future[Context]", last: Tokens = ()) -> None:
    """Put a text into the store; those that were asked longest ago leave it."""
    server.contexts[text] = Prefix(tokens, context, last)
    server.contexts.move_to_end(text)
    while len(server.contexts) > server.settings.shared_contexts:
        server.contexts.popitem(last=False)


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
    remember(server, whole, output.context.tokens, _done(output.context), last)
    return whole


async def compact(server: Server, text: str) -> Context:
    """Bring the context of a text in the store to its budget, at once."""
    prefix = server.contexts[text]
    context = await asyncio.shield(prefix.context)
    left = await asyncio.wrap_future(server.served.call(lambda engine: engine.compact(context)))
    remember(server, text, prefix.tokens, _done(left), prefix.last)
    return left


async def whole(server: Server, prompt: Prompt) -> tuple[str, int]:
    """A text in the store that is all of a prompt, and how many of its tokens were there."""
    if server.settings.shared_contexts == 0:
        raise ApiError("This server shares no contexts, so it compacts none.")
    cached = _begin(server, prompt.text, tuple(prompt.tokens))
    await _context(server, prompt.text)
    return prompt.text, cached


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


def _begin(server: Server, text: str, tokens: Tokens) -> int:
    """See that a text of these tokens is in the store; how many of them were there.

    A context that has more than is new is extended, which takes longer for each token than reading does.
    """
    if text in server.contexts:
        return len(server.contexts[text].tokens)
    start, tail = _longest(server, text), ()
    if start is not None:
        prefix, tail = server.contexts[start], _tokens_behind(server, start, text)
        if len(prefix.tokens) >= len(tail):
            made = asyncio.ensure_future(_continued(server, prefix, tail))
            remember(server, text, (*prefix.tokens, *tail), made)
            return len(prefix.tokens)
    reading = server.served.call(lambda engine: engine.read(list(tokens)))
    remember(server, text, tokens, asyncio.wrap_future(reading))
    return 0


async def _continued(server: Server, prefix: Prefix, tail: Tokens) -> Context:
    return await extended(server, await asyncio.shield(prefix.context), tail)


async def _behind(server: Server, text: str, cached: int, question: Tokens) -> Beginning:
    server.contexts.move_to_end(text)
    return Beginning(await _context(server, text), cached, question)


async def _context(server: Server, text: str) -> Context:
    """The context of a text; requests for the same one wait for one reading."""
    prefix = server.contexts[text]
    try:
        return await asyncio.shield(prefix.context)
    except Exception:
        if server.contexts.get(text) is prefix:
            del server.contexts[text]
        raise


def _longest(server: Server, text: str) -> str | None:
    """The longest text in the store that this one begins with, and goes on from."""
    there = (known for known in server.contexts if len(known) < len(text) and text.startswith(known))
    return max(there, key=len, default=None)


def _tokens_behind(server: Server, known: str, text: str) -> Tokens:
    """The tokens that follow the context of a text that this one begins with."""
    return (*server.contexts[known].last, *encode(server.model.tokenizer, text[len(known) :]))


def _done(context: Context) -> "asyncio.Future[Any]":
    future = asyncio.get_running_loop().create_future()
    future.set_result(context)
    return future
