"""Prefixes by their content: what was compressed before a question was known serves every request that begins so."""

import asyncio
from typing import Any

from clusterkv_jax.engine import Context
from clusterkv_jax.serve.prompts import Prompt
from clusterkv_jax.serve.server import Server


def after_shared(server: Server, prompt: Prompt, max_new_tokens: int) -> tuple[int, ...]:
    """The tokens of the context that a prompt is asked through; none where all of it is read at once.

    The longest prefix that is there and leaves room for the rest goes first, unless the client set the end. A rest that
    has no room beside its answer is read with what stands before it.
    """
    tokens, room = tuple(prompt.tokens), server.limits["reserve"] - max_new_tokens
    own = tuple(prompt.shared)
    fits = len(prompt.rest) <= room and len(own) >= server.settings.least_shared
    if server.settings.shared_contexts == 0:
        return ()
    if fits and (prompt.exact or own in server.contexts):
        return own
    lengths = range(max(1, len(tokens) - room), len(tokens))
    there = (key for key in server.contexts if len(key) in lengths and tokens[: len(key)] == key)
    return max(there, key=len, default=own if fits else ())


async def context_of(server: Server, tokens: tuple[int, ...]) -> tuple[Context, bool]:
    """The context of a prefix, and whether it was there; requests for the same one wait for one reading."""
    contexts = server.contexts
    there = tokens in contexts
    if not there:
        reading = server.served.call(lambda engine: engine.read(list(tokens)))
        contexts[tokens] = asyncio.wrap_future(reading)
    contexts.move_to_end(tokens)
    _forget(server)
    try:
        return await asyncio.shield(contexts[tokens]), there
    except Exception:
        contexts.pop(tokens, None)
        raise


def _forget(server: Server) -> None:
    """Let those go that were asked longest ago."""
    while len(server.contexts) > server.settings.shared_contexts:
        _, oldest = server.contexts.popitem(last=False)
        oldest.add_done_callback(lambda future: _drop(server, future))


def _drop(server: Server, future: Any) -> None:
    if not future.cancelled() and future.exception() is None:
        context = future.result()
        server.served.call(lambda engine: engine.drop(context))
