"""One request through the engine, whichever interface it came by: prompt in, pieces of answers out."""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clusterkv_jax.engine import Request, RequestOutput, SamplingParams
from clusterkv_jax.serve import metrics
from clusterkv_jax.serve.body import aside
from clusterkv_jax.serve.errors import ApiError, as_api_error, refused
from clusterkv_jax.serve.grammar import allowed_tokens
from clusterkv_jax.serve.prefixes import beginning_of, remember_answer, remember_prompt
from clusterkv_jax.serve.prompts import Prompt
from clusterkv_jax.serve.server import Server

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """What an interface asks of the engine.

    Attributes:
        prompt: makes the prompt; it may take long for long texts.
        how: fields of `SamplingParams`; those that are None are left to the model.
        max_tokens: most tokens of an answer; None for all that there is room for.
        stream: whether somebody waits for single tokens.
        path: of the interface, for the log.
        size: bytes that the prompt is made of.
        ignored: fields of the request that nothing is done with.
        grammar: of the answer, as `grammar` writes it; None for any text.
    """

    prompt: Callable[[], Prompt] = field(repr=False)
    how: dict[str, Any]
    max_tokens: int | None
    stream: bool
    path: str
    size: int
    ignored: Sequence[str] = ()
    grammar: str | None = None


@dataclass(frozen=True, eq=False)
class Running:
    """A request in the engine: `cached` tokens of its prompt were there, `written` ones are for the next. `text` is the
    prompt's where its answer is left for the next turn.
    """

    asked: Asked
    stream: Any = field(repr=False)
    number: str
    prompt_tokens: int
    cached: int
    written: int
    begin: float
    created: int
    text: str | None = field(default=None, repr=False)


async def begin(server: Server, asked: Asked) -> Running:
    """Put a request into the engine's queue, behind its context where it has one.

    Raises ApiError, MemoryError or `EngineFull` for what cannot be served.
    """
    begin, number = time.perf_counter(), secrets.token_hex(12)
    with refused():
        prompt = await aside(asked.size, asked.prompt)
    max_tokens = most_tokens(server, len(prompt.tokens), asked.max_tokens)
    wanted = max_tokens if asked.max_tokens is not None else min(max_tokens, server.limits["reserve"] // 2)
    start = await beginning_of(server, prompt, wanted)
    if start is not None:
        max_tokens = min(max_tokens, server.limits["reserve"] - len(start.question))
    if start is None:
        asked_for = (prompt.tokens,)
    else:
        asked_for = (start.context, start.question) if start.question else (start.context,)
    shared, cached = (0, 0) if start is None else (start.context.length, start.cached)
    with refused():
        params = SamplingParams(max_tokens=max_tokens, **_drawing(server, asked.how))
        size = asked.size if asked.grammar is None else sys.maxsize  # to compile a grammar takes long
        keep = server.settings.shared_contexts > 0 and bool(prompt.text) and params.n == 1
        request = await aside(size, _request, server, asked, asked_for, params, keep)
    stream = server.served.submit(request)
    count = request.prompt_tokens + len(request.question)
    metrics.count(server.metrics, prompt_tokens=count, prefix_cache_queries=count, prefix_cache_hits=cached)
    counts = count, cached, shared - cached
    return Running(asked, stream, number, *counts, begin, int(time.time()), prompt.text if keep else None)


def _request(server: Server, asked: Asked, asked_for: tuple[Any, ...], params: SamplingParams, keep: bool) -> Request:
    allowed = None if asked.grammar is None else allowed_tokens(server.model, asked.grammar, params.n)
    how: Any = {"params": params, "stream": asked.stream, "keep": keep, "allowed_tokens": allowed}
    return replace(server.engine.request(*asked_for, **how), keep_prompt=keep)


async def outputs(server: Server, running: Running) -> AsyncGenerator[RequestOutput, None]:
    """What the engine says of a request, piece by piece. Whoever stops to listen cancels it; a line is logged."""
    first_s, tokens, reasons, status = None, 0, [], "200"
    try:
        async for output in running.stream:
            now = time.perf_counter()
            first_s = first_s or now - running.begin
            tokens += len(output.token_ids)
            if output.prompt_context is not None and running.text is not None:
                remember_prompt(server, running.text, output.prompt_context)
            if output.finish_reason is not None:
                reasons.append(output.finish_reason)
                if running.text is not None:
                    remember_answer(server, running.text, output)
            yield output
    except (asyncio.CancelledError, GeneratorExit):
        status = "client gone"
        raise
    except Exception as error:
        known = as_api_error(error)
        if known.status == 500:
            _log.exception("%s has failed", running.number)
        status = str(known.status)
        raise known from error
    finally:
        running.stream.cancel()
        _account(server, running, first_s, tokens, reasons)
        _tell(running, status, first_s, tokens, reasons)


async def collected(server: Server, running: Running) -> list[RequestOutput]:
    """All answers of a request, each as one output."""
    answers: dict[int, RequestOutput] = {}
    async for new in outputs(server, running):
        old = answers.get(new.index)
        answers[new.index] = new if old is None else _longer(old, new)
    return [answers[index] for index in sorted(answers)]


def _longer(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    logprobs = None if old.logprobs is None or new.logprobs is None else (*old.logprobs, *new.logprobs)
    ids = (*old.token_ids, *new.token_ids)
    return replace(new, text=old.text + new.text, token_ids=ids, logprobs=logprobs)


def most_tokens(server: Server, prompt: int, wanted: int | None) -> int:
    """Tokens of an answer: as many as are wanted, or as there is room for. Raises ApiError where there is none."""
    limit, reserve = server.limits["max_tokens"], server.limits["reserve"]
    room = min(limit - prompt, reserve)
    if room < 1 or (wanted is not None and wanted > room):
        message = (
            f"A prompt of {prompt:,} tokens and {wanted or 1:,} new ones exceed what the server has room for: "
            f"{limit:,} tokens together, {reserve:,} of an answer."
        )
        raise ApiError(message, code="context_length_exceeded", param="messages")
    return room if wanted is None else wanted


def _drawing(server: Server, how: dict[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams`: the model's own way to draw where the client says nothing, by a seed of chance."""
    own = server.model.sampling
    named = {name: getattr(own, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {**named, "seed": secrets.randbits(31), **{name: value for name, value in how.items() if value is not None}}


def _account(server: Server, running: Running, first_s: float | None, tokens: int, reasons: list[str]) -> None:
    seconds = time.perf_counter() - running.begin
    metrics.count(server.metrics, generation_tokens=tokens)
    metrics.ends(iter(reasons), server.metrics)
    metrics.observe(server.metrics, e2e_request_latency_seconds=seconds)
    if first_s is not None:
        metrics.observe(server.metrics, time_to_first_token_seconds=first_s)
        if tokens > 1:
            metrics.observe(server.metrics, inter_token_latency_seconds=(seconds - first_s) / (tokens - 1))


def _tell(running: Running, status: str, first_s: float | None, tokens: int, reasons: list[str]) -> None:
    """One line of the log, without a word of the text."""
    seconds = time.perf_counter() - running.begin
    first = "" if first_s is None else f", first token after {first_s:.3f} s"
    ignored = f", ignored: {', '.join(running.asked.ignored)}" if running.asked.ignored else ""
    _log.info(
        "%s %s: %s, %d tokens of which %d cached, %d new (%s), %.3f s%s%s",
        *(running.number, running.asked.path, status, running.prompt_tokens, running.cached),
        *(tokens, ", ".join(reasons) or "no end", seconds, first, ignored),
    )
