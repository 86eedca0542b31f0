"""OpenAI's `/v1/responses`: items in, items out, and conversations that go on from an earlier response."""

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from clusterkv_jax.engine import RequestOutput
from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve import compaction
from clusterkv_jax.serve.answers import Asked, Running, begin, collected, outputs
from clusterkv_jax.serve.earlier import keep
from clusterkv_jax.serve.errors import ApiError, as_api_error, error_body
from clusterkv_jax.serve.events import event, json_response, streamed, unless_gone
from clusterkv_jax.serve.grammar import of_call, of_format
from clusterkv_jax.serve.items import CompactRequest, Items, conversation_of
from clusterkv_jax.serve.prefixes import known_beginnings
from clusterkv_jax.serve.prompts import Message, of_conversation
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.tools import Call, arguments_of, as_template_call, calls_in, choice_of, visible
from clusterkv_jax.storage.schema import shown


class TextConfig(Struct):
    """What kind of text is wanted."""

    format: dict[str, Any] | None = None


class ContextManagement(Struct):
    """When a conversation is compacted behind its answer: from so many tokens on, half of the most by default."""

    type: str
    compact_threshold: Annotated[int, Meta(ge=1)] | None = None


class ResponsesRequest(CompactRequest, kw_only=True):
    """What a client sends."""

    input: str | Items  # pyright: ignore[reportGeneralTypeIssues]  (here it must be there)
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    context_management: Annotated[list[ContextManagement], Meta(max_length=8)] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    text: TextConfig | None = None
    background: bool | None = None
    truncation: str | None = None


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request that runs, with what its response repeats."""

    server: Server = field(repr=False)
    body: ResponsesRequest = field(repr=False)
    messages: list[Message] = field(repr=False)
    tools: bool
    running: Running = field(repr=False)

    @property
    def number(self) -> str:
        return f"resp_{self.running.number}"


async def responses(server: Server, request: Request, raw: bytes) -> Response:
    """The endpoint."""
    body, ignored = await bodies.parsed(raw, ResponsesRequest)
    bodies.check_model(body.model, server.settings.model_name)
    bodies.refuse(body, background=False, truncation="disabled")
    if wrong := [each.type for each in body.context_management or () if each.type != "compaction"]:
        message = f"context_management of type {shown(repr(wrong[0]))} is not supported; compaction is."
        raise ApiError(message, param="context_management")
    messages, conversation = conversation_of(server, body)
    forced = of_call(server.model, conversation.variables.get("tools", ()), choice_of(body.tool_choice))
    grammar = forced or of_format(None if body.text is None else body.text.format)
    how = {"temperature": body.temperature, "top_p": body.top_p}
    others = {shown(tool.get("type")) for tool in body.tools if tool.get("type") != "function"}
    ignored = [*ignored, *(f"tools of type {kind}" for kind in sorted(others))]
    prompt = partial(of_conversation, server.model, conversation, known_beginnings(server))
    size = sum(len(str(message)) for message in conversation.messages)
    asked = Asked(prompt, how, body.max_output_tokens, bool(body.stream), request.url.path, size, ignored, grammar)
    running = await unless_gone(request, begin(server, asked))
    tools = "tools" in conversation.variables
    this = _Asked(server, body, messages, tools, running)
    if body.stream:
        return streamed(_events(this), running)
    (answer,) = await unless_gone(request, collected(server, running))
    text, calls = calls_in(answer.text) if tools else (answer.text, [])
    return json_response(await _ended(this, answer, text, calls, len(answer.token_ids)))


async def _events(this: _Asked) -> AsyncGenerator[bytes, None]:
    """The events of a stream. With tools, text waits that may be the beginning of a call."""
    counter = itertools.count()

    def send(kind: str, **more: Any) -> bytes:
        return event({"type": kind, **more, "sequence_number": next(counter)}, kind)

    yield send("response.created", response=_response(this, "in_progress", []))
    yield send("response.in_progress", response=_response(this, "in_progress", []))
    place: dict[str, Any] = {"item_id": f"msg_{this.running.number}", "output_index": 0, "content_index": 0}
    tokens, text, said = 0, "", ""
    try:
        async with aclosing(outputs(this.server, this.running)) as pieces:
            async for output in pieces:
                tokens, text = tokens + len(output.token_ids), text + output.text
                shown, calls = text, []
                if this.tools:
                    shown, calls = (visible(text), []) if output.finish_reason is None else calls_in(text)
                if len(shown) > len(said):
                    for each in _opening(this, send, place) if not said else ():
                        yield each
                    yield send("response.output_text.delta", **place, delta=shown[len(said) :], logprobs=[])
                    said = shown
                if output.finish_reason is None:
                    continue
                ended = await _ended(this, output, said, calls, tokens)
                first = [] if said or calls else _opening(this, send, place)
                for each in (*first, *_closing(send, place, ended)):
                    yield each
                yield send(f"response.{ended['status']}", response=ended)
    except Exception as error:
        about = error_body("openai", as_api_error(error))["error"]
        failed = _response(this, "failed", []) | {"error": {"code": "server_error", "message": about["message"]}}
        yield send("response.failed", response=failed)


def _opening(this: _Asked, send: Callable[..., bytes], place: dict[str, Any]) -> list[bytes]:
    """The first events of the message."""
    item = _message(this, "", "in_progress") | {"content": []}
    added = send("response.output_item.added", output_index=0, item=item)
    return [added, send("response.content_part.added", **place, part=_part(""))]


def _closing(send: Callable[..., bytes], place: dict[str, Any], ended: dict[str, Any]) -> list[bytes]:
    """The last events of each item."""
    events = []
    for number, item in enumerate(ended["output"]):
        if item["type"] == "message":
            (part,) = item["content"]
            events.append(send("response.output_text.done", **place, text=part["text"], logprobs=[]))
            events.append(send("response.content_part.done", **place, part=part))
        elif item["type"] == "compaction":
            events.append(send("response.output_item.added", output_index=number, item=item))
        else:
            where = {"item_id": item["id"], "output_index": number}
            begun = item | {"arguments": "", "status": "in_progress"}
            events.append(send("response.output_item.added", output_index=number, item=begun))
            events.append(send("response.function_call_arguments.delta", **where, delta=item["arguments"]))
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(send("response.function_call_arguments.done", **where, **done))
        events.append(send("response.output_item.done", output_index=number, item=item))
    return events


async def _ended(this: _Asked, answer: RequestOutput, text: str, calls: Sequence[Call], tokens: int) -> dict[str, Any]:
    """The response at its end, which a later request may name."""
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    output = [_message(this, text, status)] if text or not calls else []
    numbers = [f"{this.running.number}{number:x}" for number in range(len(calls))]
    output += [
        {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for number, call in zip(numbers, calls, strict=True)
    ]
    called = [
        as_template_call(f"call_{n}", c.name, arguments_of(c.arguments)) for n, c in zip(numbers, calls, strict=True)
    ]
    said: Message = {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})
    messages = [*this.messages, said]
    if this.body.store is not False:
        keep(this.server, this.number, messages)
    thresholds = [each.compact_threshold for each in this.body.context_management or ()]
    digest = await compaction.compacted_behind(this.server, this.running, answer, messages, thresholds)
    output += [] if digest is None else [compaction.item(digest)]
    return _response(this, status, output, tokens)


def _response(this: _Asked, status: str, output: list[dict[str, Any]], tokens: int | None = None) -> dict[str, Any]:
    """The object of a response."""
    body, running = this.body, this.running
    usage = None
    if tokens is not None:
        usage = {"input_tokens": running.prompt_tokens, "output_tokens": tokens}
        usage |= {"total_tokens": running.prompt_tokens + tokens, "output_tokens_details": {"reasoning_tokens": 0}}
        usage["input_tokens_details"] = {"cached_tokens": running.cached, "cache_write_tokens": running.written}
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    names = (
        "instructions",
        "previous_response_id",
        "max_output_tokens",
        "temperature",
        "top_p",
        "tools",
        "tool_choice",
    )
    repeated = {name: getattr(body, name) for name in names}
    return repeated | {
        "id": this.number,
        "object": "response",
        "created_at": running.created,
        "model": this.server.settings.model_name,
        "status": status,
        "output": output,
        "usage": usage,
        "error": None,
        "incomplete_details": incomplete,
        "metadata": body.metadata or {},
        "parallel_tool_calls": True,
        "store": body.store is not False,
    }


def _message(this: _Asked, text: str, status: str) -> dict[str, Any]:
    number = f"msg_{this.running.number}"
    return {"type": "message", "id": number, "role": "assistant", "status": status, "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
