"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from clusterkv_jax.engine import RequestOutput
from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve.answers import Asked, Running, begin, collected, outputs
from clusterkv_jax.serve.errors import as_api_error, error_body, refused
from clusterkv_jax.serve.events import event, json_response, streamed, unless_gone
from clusterkv_jax.serve.grammar import of_call, of_format
from clusterkv_jax.serve.prompts import Conversation, Cut, Message, continued, joined, of_conversation
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.tools import Call, as_template_call, calls_in, choice_of, visible
from clusterkv_jax.storage.schema import from_json
from clusterkv_jax.text.tokenizer import decode

_STOP_REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "cancelled": "end_turn"}
# Claude Code's line of accounting, which differs in each request: with it no prefix would ever be shared.
_BILLING = "x-anthropic-billing-header:"


class Block(Struct, kw_only=True):
    """A block of a message: a text, a call of a tool, its result, or a thought, which is not read again."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[Block]" = ""
    cache_control: dict[str, Any] | None = None


class AnthropicMessage(Struct):
    """A message that a client sends."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct):
    """A tool that the client runs; those of another type are the provider's."""

    name: str
    type: str | None = None
    description: str = ""
    input_schema: dict[str, Any] = {}


class OutputConfig(Struct):
    """What kind of text is wanted."""

    format: dict[str, Any] | None = None


class CountRequest(Struct, kw_only=True):
    """Messages whose tokens are counted."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=bodies.MOST_MESSAGES)]
    model: str | None = None
    system: str | list[Block] = ""
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """What a client sends."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool = False
    stop_sequences: Annotated[list[str], Meta(max_length=1024)] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: OutputConfig | None = None


class Usage(Struct):
    """Tokens of a request; those of a shared prefix are not among the input tokens."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class AnthropicAnswer(Struct, kw_only=True):
    """What the server answers."""

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    type: str = "message"
    role: str = "assistant"


async def messages(server: Server, request: Request, raw: bytes) -> Response:
    """The endpoint."""
    body, ignored = await bodies.parsed(raw, MessagesRequest)
    how = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    how["stop"] = tuple(body.stop_sequences)
    conversation = _conversation(server, body)
    prompt, tools = partial(of_conversation, server.model, conversation), "tools" in conversation.variables
    forced = of_call(server.model, conversation.variables.get("tools", ()), choice_of(body.tool_choice))
    grammar = forced or of_format(None if body.output_config is None else body.output_config.format)
    asked = Asked(prompt, how, body.max_tokens, body.stream, request.url.path, len(raw), ignored, grammar)
    running = await unless_gone(request, begin(server, asked))
    if body.stream:
        return streamed(_events(server, running, body.stop_sequences, tools), running)
    (answer,) = await unless_gone(request, collected(server, running))
    text, calls = calls_in(answer.text) if tools else (answer.text, [])
    content = [{"type": "text", "text": text}] if text or not calls else []
    content += [_tool_use(running, number, call) for number, call in enumerate(calls)]
    ends = _end(server, answer, body.stop_sequences, calls)
    return json_response(_answer(server, running, content, *ends, len(answer.token_ids)))


async def count_tokens(server: Server, _request: Request, raw: bytes) -> Response:
    """Tokens of messages in the model's chat template."""
    body, _ = await bodies.parsed(raw, CountRequest)
    with refused():
        prompt = await asyncio.to_thread(of_conversation, server.model, _conversation(server, body))
    return json_response({"input_tokens": len(prompt.tokens)})


def _conversation(server: Server, body: CountRequest) -> Conversation:
    """Messages as templates take them. Raises ApiError for another model, and a tool_choice that is none."""
    bodies.check_model(body.model, server.settings.model_name)
    kind = choice_of(body.tool_choice).kind
    blocks = [Block(type="text", text=body.system)] if isinstance(body.system, str) else body.system
    blocks = [block for block in blocks if not block.text.startswith(_BILLING)]
    system, letters = joined(*_texts(blocks))
    plain: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
    cut: Cut | None = None if letters is None or not plain else (0, letters)
    for message in body.messages:
        for turn, letters in _turns(message):
            cut = cut if letters is None else (len(plain), letters)
            plain.append(turn)
    tools = [tool for tool in body.tools or [] if tool.type in (None, "custom") and kind != "none"]
    described = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in tools
    ]
    variables = {"tools": [{"type": "function", "function": each} for each in described]} if described else {}
    return continued(Conversation(plain, cut, variables), plain[-1]["role"] == "assistant")


def _texts(blocks: Sequence[Block]) -> tuple[list[str], list[bool]]:
    """The texts of blocks, and which of them end what is shared."""
    texts = [block for block in blocks if block.type == "text"]
    return [block.text for block in texts], [block.cache_control is not None for block in texts]


def _turns(message: AnthropicMessage) -> list[tuple[Message, int | None]]:
    """A message as those of templates, where each result of a tool is its own, with the letters up to its cut."""
    if isinstance(message.content, str):
        return [({"role": message.role, "content": message.content}, None)]
    turns: list[tuple[Message, int | None]] = []
    for block in (block for block in message.content if block.type == "tool_result"):
        content, letters = (block.content, None) if isinstance(block.content, str) else joined(*_texts(block.content))
        letters = len(content) if block.cache_control is not None else letters
        turns.append(({"role": "tool", "content": content, "tool_call_id": block.tool_use_id}, letters))
    content, letters = joined(*_texts(message.content))
    calls = [as_template_call(b.id, b.name, b.input) for b in message.content if b.type == "tool_use"]
    if content or calls or not turns:
        turns.append(({"role": message.role, "content": content} | ({"tool_calls": calls} if calls else {}), letters))
    return turns


async def _events(server: Server, running: Running, stops: Sequence[str], tools: bool) -> AsyncGenerator[bytes, None]:
    """The events of a stream. With tools, text waits that may be the beginning of a call."""
    tokens, text, said, blocks = 0, "", "", 0

    def send(kind, **more):
        return event({"type": kind, **more}, kind)

    yield send("message_start", message=_answer(server, running, [], None, None, 0))
    try:
        async with aclosing(outputs(server, running)) as pieces:
            async for output in pieces:
                tokens, text = tokens + len(output.token_ids), text + output.text
                shown, calls = text, []
                if tools:
                    shown, calls = (visible(text), []) if output.finish_reason is None else calls_in(text)
                if len(shown) > len(said):
                    if not said:
                        yield send("content_block_start", index=0, content_block={"type": "text", "text": ""})
                        blocks = 1
                    delta = {"type": "text_delta", "text": shown[len(said) :]}
                    yield send("content_block_delta", index=0, delta=delta)
                    said = shown
                if output.finish_reason is None:
                    continue
                if said:
                    yield send("content_block_stop", index=0)
                for number, call in enumerate(calls):
                    use, place = _tool_use(running, number, call), blocks + number
                    yield send("content_block_start", index=place, content_block=use | {"input": {}})
                    delta = {"type": "input_json_delta", "partial_json": json.dumps(use["input"], ensure_ascii=False)}
                    yield send("content_block_delta", index=place, delta=delta)
                    yield send("content_block_stop", index=place)
                reason, sequence = _end(server, output, stops, calls)
                delta = {"stop_reason": reason, "stop_sequence": sequence}
                yield send("message_delta", delta=delta, usage=_usage(running, tokens))
        yield send("message_stop")
    except Exception as error:
        yield event(error_body("anthropic", as_api_error(error)), "error")


def _end(server: Server, output: RequestOutput, stops: Sequence[str], calls: Sequence[Call]) -> tuple[str, str | None]:
    """Why an answer ended, and the stop sequence that ended it."""
    assert output.finish_reason is not None
    if calls:
        return "tool_use", None
    if output.finish_reason != "stop" or output.result is None:
        return _STOP_REASONS[output.finish_reason], None
    written, said = decode(server.model.tokenizer, output.result.tokens[0]), output.result.texts[0]
    return "stop_sequence", next((stop for stop in stops if written.startswith(stop, len(said))), None)


def _answer(
    server: Server,
    running: Running,
    content: list[dict[str, Any]],
    reason: str | None,
    sequence: str | None,
    tokens: int,
) -> AnthropicAnswer:
    return AnthropicAnswer(
        id=f"msg_{running.number}",
        model=server.settings.model_name,
        content=content,
        stop_reason=reason,
        stop_sequence=sequence,
        usage=_usage(running, tokens),
    )


def _usage(running: Running, tokens: int) -> Usage:
    read = running.prompt_tokens - running.cached - running.written
    return Usage(read, tokens, running.written, running.cached)


def _tool_use(running: Running, number: int, call: Call) -> dict[str, Any]:
    value = from_json(call.arguments, "Arguments")
    return {"type": "tool_use", "id": f"toolu_{running.number}{number:x}", "name": call.name, "input": value}
