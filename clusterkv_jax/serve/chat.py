"""OpenAI's `/v1/chat/completions`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve.answers import Asked, Running, begin, collected, outputs
from clusterkv_jax.serve.errors import ApiError, as_api_error, error_body
from clusterkv_jax.serve.events import DONE, event, json_response, streamed, unless_gone
from clusterkv_jax.serve.grammar import of_call, of_format
from clusterkv_jax.serve.logprobs import ChatLogprobs, of_chat
from clusterkv_jax.serve.openai import FINISH_REASONS, Drawing, StreamOptions, Usage, how, usage_of
from clusterkv_jax.serve.prefixes import known_beginnings
from clusterkv_jax.serve.prompts import ChatPrompt, Cut, Message, continued, joined, of_conversation
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.tools import arguments_of, as_template_call, calls_in, choice_of, visible


class Part(Struct):
    """A block of a message."""

    type: str
    text: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Function(Struct):
    """A tool that was called, with its arguments as JSON in text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call of a tool."""

    id: str
    function: Function
    type: Literal["function"] = "function"


class ChatMessage(Struct, kw_only=True):
    """A message that a client sends."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(Drawing, kw_only=True):
    """What a client sends."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=bodies.MOST_MESSAGES)]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class Answer(Struct, omit_defaults=True):
    """A message of the model, or a piece of one."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] = []


class Choice(Struct):
    """A whole answer."""

    index: int
    message: Answer
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class Delta(Struct):
    """A piece of an answer."""

    index: int
    delta: Answer
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct, kw_only=True, omit_defaults=True):
    """What the server answers, whole or in chunks."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice | Delta]
    usage: Usage | None = None


async def chat_completions(server: Server, request: Request, raw: bytes) -> Response:
    """The endpoint."""
    body, ignored = await bodies.parsed(raw, ChatRequest)
    bodies.check_model(body.model, server.settings.model_name)
    choice = choice_of(body.tool_choice)
    tools = body.tools if body.tools and choice.kind != "none" else []
    variables = dict(body.chat_template_kwargs or {}) | ({"tools": tools} if tools else {})
    messages, cut = as_messages(body.messages)
    conversation = continued(ChatPrompt(messages, cut, variables), bool(body.continue_final_message))
    asked = Asked(
        partial(of_conversation, server.model, conversation, known_beginnings(server)),
        how(body) | {"logprobs": (body.top_logprobs or 0) if body.logprobs else None},
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        bool(body.stream),
        request.url.path,
        len(raw),
        ignored,
        of_call(server.model, tools, choice) or of_format(body.response_format),
    )
    running = await unless_gone(request, begin(server, asked))
    if body.stream:
        return streamed(_chunks(server, running, body.stream_options or StreamOptions(), bool(tools)), running)
    answers = await unless_gone(request, collected(server, running))
    choices = []
    for each in answers:
        text, calls = calls_in(each.text) if tools else (each.text, [])
        message = Answer("assistant", text if text or not calls else None, _tool_calls(running, each.index, calls))
        reason = "tool_calls" if calls else FINISH_REASONS[each.finish_reason]
        choices.append(Choice(each.index, message, reason, of_chat(server.model.tokenizer, each.logprobs)))
    usage = usage_of(running, sum(len(each.token_ids) for each in answers))
    return json_response(_completion(server, running, "chat.completion", choices, usage))


def as_messages(messages: Sequence[ChatMessage]) -> tuple[list[Message], Cut | None]:
    """Messages as templates take them, and the last breakpoint. Raises ApiError for a block that is no text."""
    plain, cut = [], None
    for number, message in enumerate(messages):
        parts = [Part("text", message.content or "")] if not isinstance(message.content, list) else message.content
        if wrong := [part.type for part in parts if part.type not in ("text", "input_text") or part.text is None]:
            raise ApiError(f"A block of type {wrong[0]!r} is not supported; send text.", param="messages")
        ends = [part.prompt_cache_breakpoint is not None for part in parts]
        content, letters = joined([part.text or "" for part in parts], ends)
        cut = cut if letters is None else (number, letters)
        more: dict[str, Any] = {} if message.name is None else {"name": message.name}
        if message.tool_calls:
            called = [(call.id, call.function) for call in message.tool_calls]
            more["tool_calls"] = [as_template_call(id, f.name, arguments_of(f.arguments)) for id, f in called]
        if message.tool_call_id is not None:
            more["tool_call_id"] = message.tool_call_id
        role = "system" if message.role == "developer" else message.role
        plain.append({"role": role, "content": content, **more})
    return plain, cut


async def _chunks(server: Server, running: Running, options: StreamOptions, tools: bool) -> AsyncGenerator[bytes, None]:
    """The events of a stream. With tools, text waits that may be the beginning of a call."""
    chunk = partial(_completion, server, running, "chat.completion.chunk")
    tokens, texts, said = 0, dict[int, str](), dict[int, str]()
    try:
        async with aclosing(outputs(server, running)) as pieces:
            async for output in pieces:
                tokens += len(output.token_ids)
                usage = usage_of(running, tokens) if options.continuous_usage_stats else None
                index, reason = output.index, FINISH_REASONS[output.finish_reason]
                begun = b"" if index in texts else event(chunk([Delta(index, Answer("assistant", ""))], None))
                texts[index], before = texts.get(index, "") + output.text, said.get(index, "")
                text, calls = texts[index], []
                if tools:
                    text, calls = (visible(text), []) if reason is None else calls_in(text)
                said[index] = text
                called = _tool_calls(running, index, calls)
                delta = Answer(None, text[len(before) :] or None, called)
                reason = "tool_calls" if calls else reason
                logprobs = of_chat(server.model.tokenizer, output.logprobs)
                if delta.content or called or reason or logprobs:
                    begun += event(chunk([Delta(index, delta, reason, logprobs)], usage))
                if begun:  # one write wakes the client once
                    yield begun
        if options.include_usage:
            yield event(chunk([], usage_of(running, tokens)))
    except Exception as error:
        yield event(error_body("openai", as_api_error(error)))
    yield DONE


def _tool_calls(running: Running, index: int, calls: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {
            "index": number,
            "id": f"call_{running.number}{index:x}{number:x}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]


def _completion(
    server: Server, running: Running, kind: str, choices: Sequence[Choice | Delta], usage: Usage | None
) -> ChatCompletion:
    number, model = f"chatcmpl-{running.number}", server.settings.model_name
    return ChatCompletion(id=number, object=kind, created=running.created, model=model, choices=choices, usage=usage)
