"""OpenAI's `/v1/responses`: items in, items out, and conversations that go on from an earlier response."""

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from clusterkv_jax.engine import RequestOutput
from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve.answers import Asked, Running, begin, collected, outputs
from clusterkv_jax.serve.errors import ApiError, as_api_error, error_body
from clusterkv_jax.serve.events import event, json_response, streamed, unless_gone
from clusterkv_jax.serve.grammar import of_call, of_format
from clusterkv_jax.serve.prompts import Conversation, Cut, Message, joined, of_conversation
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.tools import Call, arguments_of, as_template_call, calls_in, choice_of, visible
from clusterkv_jax.storage.schema import shown

# Letters of earlier responses that are kept; those that are asked last go last.
MOST_KEPT = 64 * 2**20


class Part(Struct):
    """A block of a message or of a tool's output."""

    type: str
    text: str = ""
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Item(Struct, kw_only=True):
    """What a client sends of a conversation: a message, a call of a tool, its output, or a thought (not read again)."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""


class TextConfig(Struct):
    """What kind of text is wanted."""

    format: dict[str, Any] | None = None


class ResponsesRequest(Struct, kw_only=True):
    """What a client sends."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=bodies.MOST_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] = []
    tool_choice: str | dict[str, Any] = "auto"
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
    messages, conversation = _conversation(server, body)
    forced = of_call(server.model, conversation.variables.get("tools", ()), choice_of(body.tool_choice))
    grammar = forced or of_format(None if body.text is None else body.text.format)
    how = {"temperature": body.temperature, "top_p": body.top_p}
    others = {shown(tool.get("type")) for tool in body.tools if tool.get("type") != "function"}
    ignored = [*ignored, *(f"tools of type {kind}" for kind in sorted(others))]
    prompt = partial(of_conversation, server.model, conversation)
    size = sum(len(str(message)) for message in conversation.messages)
    asked = Asked(prompt, how, body.max_output_tokens, bool(body.stream), request.url.path, size, ignored, grammar)
    running = await unless_gone(request, begin(server, asked))
    tools = "tools" in conversation.variables
    this = _Asked(server, body, messages, tools, running)
    if body.stream:
        return streamed(_events(this), running)
    (answer,) = await unless_gone(request, collected(server, running))
    text, calls = calls_in(answer.text) if tools else (answer.text, [])
    return json_response(_ended(this, answer, text, calls, len(answer.token_ids)))


def _conversation(server: Server, body: ResponsesRequest) -> tuple[list[Message], Conversation]:
    """The messages up to the answer, earlier ones first, and the conversation with what stands around them."""
    said, cut = _messages([Item(content=body.input)] if isinstance(body.input, str) else body.input)
    messages = [*_earlier(server, body.previous_response_id), *said]
    first: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    whole = [*first, *messages]
    cut = None if cut is None else (cut[0] + len(whole) - len(said), cut[1])
    functions = [tool for tool in body.tools if tool.get("type") == "function" and body.tool_choice != "none"]
    return messages, Conversation(whole, cut, {"tools": list(map(_described, functions))} if functions else {})


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as templates take it."""
    about = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": about}


def _messages(items: Sequence[Item]) -> tuple[list[Message], Cut | None]:
    """Items as messages of templates; calls that follow each other are one message."""
    plain: list[dict[str, Any]] = []
    cut: Cut | None = None
    for item in items:
        if item.type == "function_call":
            call = as_template_call(item.call_id, item.name, arguments_of(item.arguments))
            if plain and plain[-1]["role"] == "assistant":
                plain[-1]["tool_calls"] = [*plain[-1].get("tool_calls", []), call]
            else:
                plain.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.type != "reasoning":
            output = item.type == "function_call_output"
            content, letters = _content(item.output if output else item.content or "")
            cut = cut if letters is None else (len(plain), letters)
            role = "tool" if output else "system" if item.role == "developer" else item.role
            plain.append({"role": role, "content": content} | ({"tool_call_id": item.call_id} if output else {}))
    if not plain:
        raise ApiError("The input holds no message.", param="input")
    return list(plain), cut


def _content(content: str | list[Part]) -> tuple[str, int | None]:
    if isinstance(content, str):
        return content, None
    if wrong := [part.type for part in content if part.type not in ("input_text", "output_text", "text")]:
        raise ApiError(f"A block of type {wrong[0]!r} is not supported; send text.", param="input")
    return joined([part.text for part in content], [part.prompt_cache_breakpoint is not None for part in content])


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
                ended = _ended(this, output, said, calls, tokens)
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
        else:
            where = {"item_id": item["id"], "output_index": number}
            begun = item | {"arguments": "", "status": "in_progress"}
            events.append(send("response.output_item.added", output_index=number, item=begun))
            events.append(send("response.function_call_arguments.delta", **where, delta=item["arguments"]))
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(send("response.function_call_arguments.done", **where, **done))
        events.append(send("response.output_item.done", output_index=number, item=item))
    return events


def _ended(this: _Asked, answer: RequestOutput, text: str, calls: Sequence[Call], tokens: int) -> dict[str, Any]:
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
    if this.body.store is not False:
        said: Message = {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})
        _keep(this.server, this.number, [*this.messages, said])
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


# --- earlier responses ---


def _earlier(server: Server, number: str | None) -> Sequence[Message]:
    """The messages of an earlier response, its answer last; none without one. Raises ApiError for an unknown one."""
    if number is None:
        return ()
    if number not in server.responses:
        message = f"There is no response {number[:80]!r}, or it is kept no longer; send the whole conversation."
        raise ApiError(message, 404, param="previous_response_id")
    server.responses.move_to_end(number)
    return server.responses[number][0]


def _keep(server: Server, number: str, messages: Sequence[Message]) -> None:
    """Keep a response; those that were asked longest ago make room."""
    kept = server.responses
    kept[number] = tuple(messages), sum(len(str(message)) for message in messages)
    while len(kept) > 1 and sum(letters for _, letters in kept.values()) > MOST_KEPT:
        kept.popitem(last=False)
