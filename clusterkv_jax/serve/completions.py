"""OpenAI's `/v1/completions`: texts or token ids as they are."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from clusterkv_jax.engine import RequestOutput
from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve.answers import Asked, Running, begin, collected, outputs
from clusterkv_jax.serve.errors import ApiError, as_api_error, error_body
from clusterkv_jax.serve.events import DONE, event, json_response, streamed, unless_gone
from clusterkv_jax.serve.logprobs import CompletionLogprobs, of_completion
from clusterkv_jax.serve.openai import FINISH_REASONS, Drawing, StreamOptions, Usage, how, usage_of
from clusterkv_jax.serve.prompts import Prompt, of_text
from clusterkv_jax.serve.server import Server


class CompletionRequest(Drawing, kw_only=True):
    """What a client sends."""

    prompt: str | list[int | str | list[int]]
    model: str | None = None
    max_tokens: int | None = 16
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class CompletionChoice(Struct):
    """One answer, or a piece of it."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class Completion(Struct, kw_only=True, omit_defaults=True):
    """What the server answers, whole or in chunks."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | None = None


async def completions(server: Server, request: Request, raw: bytes) -> Response:
    """The endpoint."""
    body, ignored = await bodies.parsed(raw, CompletionRequest)
    bodies.check_model(body.model, server.settings.model_name)
    bodies.refuse(body, echo=False, suffix="", best_of=body.n or 1)
    asked = Asked(
        partial(_prompt, server, body.prompt),
        how(body) | {"logprobs": body.logprobs},
        body.max_tokens,
        bool(body.stream),
        request.url.path,
        len(raw),
        ignored,
    )
    running = await unless_gone(request, begin(server, asked))
    if body.stream:
        return streamed(_chunks(server, running, body.stream_options or StreamOptions()), running)
    answers = await unless_gone(request, collected(server, running))
    choices = [_choice(server, each) for each in answers]
    tokens = sum(len(each.token_ids) for each in answers)
    return json_response(_completion(server, running, choices, usage=usage_of(running, tokens)))


async def _chunks(server: Server, running: Running, options: StreamOptions) -> AsyncGenerator[bytes, None]:
    tokens, letters = 0, Counter[int]()
    try:
        async with aclosing(outputs(server, running)) as pieces:
            async for output in pieces:
                tokens += len(output.token_ids)
                choice = _choice(server, output, letters[output.index])
                letters[output.index] += len(output.text)
                usage = usage_of(running, tokens) if options.continuous_usage_stats else None
                yield event(_completion(server, running, [choice], usage=usage))
        if options.include_usage:
            yield event(_completion(server, running, [], usage=usage_of(running, tokens)))
    except Exception as error:
        yield event(error_body("openai", as_api_error(error)))
    yield DONE


def _choice(server: Server, output: RequestOutput, letters: int = 0) -> CompletionChoice:
    """An answer, or what follows so many letters of it."""
    logprobs = of_completion(server.model.tokenizer, output.logprobs, letters)
    return CompletionChoice(output.index, output.text, FINISH_REASONS[output.finish_reason], logprobs)


def _completion(server: Server, running: Running, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
    created, model = running.created, server.settings.model_name
    return Completion(id=f"cmpl-{running.number}", created=created, model=model, choices=choices, usage=usage)


def _prompt(server: Server, prompt: Any) -> Prompt:
    """A prompt of this request, which may be the only one of a list. Raises ApiError for several."""
    if isinstance(prompt, str):
        return of_text(server.model, prompt)
    if prompt and all(isinstance(token, int) for token in prompt):
        return Prompt([], list(prompt))
    if len(prompt) != 1:
        raise ApiError(f"A request has one prompt, got {len(prompt)}; send one request for each.", param="prompt")
    return _prompt(server, prompt[0])
