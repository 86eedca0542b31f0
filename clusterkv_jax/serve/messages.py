"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from clusterkv_jax.engine import RequestOutput
from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve.answers import Asked, Running, begin, collected, outputs
from clusterkv_jax.serve.compaction import compacted_behind
from clusterkv_jax.serve.earlier import earlier
from clusterkv_jax.serve.errors import ApiError, as_api_error, error_body, refused
from clusterkv_jax.serve.events import event, json_response, streamed, unless_gone
from clusterkv_jax.serve.grammar import of_call, of_format
from clusterkv_jax.serve.prefixes import known_beginnings
from clusterkv_jax.serve.prompts import ChatPrompt, Cut, Message, continued, joined, of_conversation
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.tools import Call, as_template_call, calls_in, choice_of, visible
from clusterkv_jax.storage.schema import from_json, shown
from clusterkv_jax.text.tokenizer import decode

_STOP_REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "cancelled": "end_turn"}
# Anthropic's edit that compacts, and what its block says to who cannot read it.
_COMPACT, _COMPACTED = "compact_20260112", "The server knows the conversation up to here by the digest of this block."
# Claude Code's line of accounting, which differs in each request: with it no prefix would ever be shared.
_BILLING = "x-anthropic-billing-header:"


class Block(Struct, kw_only=True):
    """A block of a message: a text, a call of a tool, its result, a thought, which is not read again, or a compaction,
    which stands for all that came before it.
    """

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "compaction"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[Block] | None" = ""
    encrypted_content: str | None = None
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


class Trigger(Struct):
    """Tokens from which on a conversation is compacted."""

    value: Annotated[int, Meta(ge=1)]
    type: Literal["input_tokens"] = "input_tokens"


class Edit(Struct):
    """What becomes of a long conversation; only that it is compacted behind an answer is done."""

    type: str
    trigger: Trigger | None = None
    pause_after_compaction: bool = False


class ContextManagement(Struct):
    """When, and how, a conversation becomes shorter."""

    edits: Annotated[list[Edit], Meta(max_length=8)] = []


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
    context_management: ContextManagement | None = None


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
    thresholds, others = _thresholds(body)
    conversation = _conversation(server, body)
    prompt = partial(of_conversation, server.model, conversation, known_beginnings(server))
    tools = "tools" in conversation.variables
    forced = of_call(server.model, conversation.variables.get("tools", ()), choice_of(body.tool_choice))
    grammar = forced or of_format(None if body.output_config is None else body.output_config.format)
    asked = Asked(prompt, how, body.max_tokens, body.stream, request.url.path, len(raw), [*ignored, *others], grammar)
    running = await unless_gone(request, begin(server, asked))
    said = conversation.messages[bool(_system(body)[0].strip()) :]
    compacted = partial(_compacted, server, running, said, thresholds)
    if body.stream:
        return streamed(_events(server, running, body.stop_sequences, tools, compacted), running)
    (answer,) = await unless_gone(request, collected(server, running))
    text, calls = calls_in(answer.text) if tools else (answer.text, [])
    content = [{"type": "text", "text": text}] if text or not calls else []
    content += [_tool_use(running, number, call) for number, call in enumerate(calls)]
    content += await compacted(answer, text, content)
    ends = _end(server, answer, body.stop_sequences, calls)
    return json_response(_answer(server, running, content, *ends, len(answer.token_ids)))


async def count_tokens(server: Server, _request: Request, raw: bytes) -> Response:
    """Tokens of messages in the model's chat template."""
    body, _ = await bodies.parsed(raw, CountRequest)
    with refused():
        how = _conversation(server, body), known_beginnings(server)
        prompt = await asyncio.to_thread(of_conversation, server.model, *how)
    return json_response({"input_tokens": len(prompt.tokens)})


def _conversation(server: Server, body: CountRequest) -> ChatPrompt:
    """Messages as templates take them. Raises ApiError for another model, and a tool_choice that is none."""
    bodies.check_model(body.model, server.settings.model_name)
    kind = choice_of(body.tool_choice).kind
    system, letters = _system(body)
    plain: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
    cut: Cut | None = None if letters is None or not plain else (0, letters)
    first = len(plain)
    for message in body.messages:
        digest, rest = _since_compaction(message)
        if digest is not None:
            plain[first:], cut = earlier(server, digest, "messages"), None
        for turn, letters in _turns(rest):
            cut = cut if letters is None else (len(plain), letters)
            plain.append(turn)
    if not plain:
        raise ApiError("The messages hold no text.", param="messages")
    tools = [tool for tool in body.tools or [] if tool.type in (None, "custom") and kind != "none"]
    described = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in tools
    ]
    variables = {"tools": [{"type": "function", "function": each} for each in described]} if described else {}
    return continued(ChatPrompt(plain, cut, variables), plain[-1]["role"] == "assistant")


def _system(body: CountRequest) -> tuple[str, int | None]:
    """The system's message, and the letters up to its last cut."""
    blocks = [Block(type="text", text=body.system)] if isinstance(body.system, str) else body.system
    return joined(*_texts([block for block in blocks if not block.text.startswith(_BILLING)]))


def _since_compaction(message: AnthropicMessage) -> tuple[str | None, AnthropicMessage]:
    """The digest of a message's last compaction, None without one, and the message behind it."""
    blocks = [] if isinstance(message.content, str) else message.content
    places = [number for number, block in enumerate(blocks) if block.type == "compaction" and block.encrypted_content]
    if not places:
        return None, message
    return blocks[places[-1]].encrypted_content, AnthropicMessage(message.role, blocks[places[-1] + 1 :])


def _texts(blocks: Sequence[Block]) -> tuple[list[str], list[bool]]:
    """The texts of blocks, and which of them end what is shared."""
    texts = [block for block in blocks if block.type == "text"]
    return [block.text for block in texts], [block.cache_control is not None for block in texts]


def _turns(message: AnthropicMessage) -> list[tuple[Message, int | None]]:
    """A message as those of templates, where each result of a tool is its own, with the letters up to its cut."""
    if isinstance(message.content, str):
        return [({"role": message.role, "content": message.content}, None)]
    turns: list[tuple[Message, int | None]] = []
    if not message.content:
        return turns
    for block in (block for block in message.content if block.type == "tool_result"):
        inner = block.content or ""
        content, letters = (inner, None) if isinstance(inner, str) else joined(*_texts(inner))
        letters = len(content) if block.cache_control is not None else letters
        turns.append(({"role": "tool", "content": content, "tool_call_id": block.tool_use_id}, letters))
    content, letters = joined(*_texts(message.content))
    calls = [as_template_call(b.id, b.name, b.input) for b in message.content if b.type == "tool_use"]
    if content or calls or not turns:
        turns.append(({"role": message.role, "content": content} | ({"tool_calls": calls} if calls else {}), letters))
    return turns


def _thresholds(body: MessagesRequest) -> tuple[list[int | None], list[str]]:
    """The tokens from which on a conversation is compacted, and edits that nothing is done with. Raises ApiError for a
    pause, since nothing is compacted before an answer.
    """
    edits = [] if body.context_management is None else body.context_management.edits
    ours = [edit for edit in edits if edit.type == _COMPACT]
    if any(edit.pause_after_compaction for edit in ours):
        raise ApiError("pause_after_compaction = True is not supported; leave it out.", param="context_management")
    others = sorted({f"edits of type {shown(edit.type)}" for edit in edits if edit.type != _COMPACT})
    return [None if edit.trigger is None else edit.trigger.value for edit in ours], others


async def _compacted(
    server: Server,
    running: Running,
    said: Sequence[Message],
    thresholds: Sequence[int | None],
    answer: RequestOutput,
    text: str,
    uses: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The block of a conversation that is compacted behind its answer, which is this text and these uses of tools."""
    *before, last = said
    begun = last["content"] if last["role"] == "assistant" else ""
    calls = [as_template_call(use["id"], use["name"], use["input"]) for use in uses if use["type"] == "tool_use"]
    turn = {"role": "assistant", "content": begun + text} | ({"tool_calls": calls} if calls else {})
    whole = [*(before if begun else said), turn]
    digest = await compacted_behind(server, running, answer, whole, thresholds)
    return [] if digest is None else [{"type": "compaction", "content": _COMPACTED, "encrypted_content": digest}]


async def _events(
    server: Server,
    running: Running,
    stops: Sequence[str],
    tools: bool,
    compacted: Callable[..., Awaitable[list[dict[str, Any]]]],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. With tools, text waits that may be the beginning of a call."""
    tokens, text, said, blocks = 0, "", "", 0

    def send(kind, **more):
        return event({"type": kind, **more}, kind)

    yield send("message_start", message=_answer(server, running, [], None, None, 0))
    try:
        async with aclosing(outputs(server, running)) as pieces:
            async for output in pieces:
                tokens, text = tokens + len(output.token_ids), text + output.text
                ready, calls = text, []
                if tools:
                    ready, calls = (visible(text), []) if output.finish_reason is None else calls_in(text)
                if len(ready) > len(said):
                    if not said:
                        yield send("content_block_start", index=0, content_block={"type": "text", "text": ""})
                        blocks = 1
                    delta = {"type": "text_delta", "text": ready[len(said) :]}
                    yield send("content_block_delta", index=0, delta=delta)
                    said = ready
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
                uses = [_tool_use(running, number, call) for number, call in enumerate(calls)]
                for block in await compacted(output, said, uses):
                    place = blocks + len(calls)
                    yield send("content_block_start", index=place, content_block={"type": "compaction"})
                    yield send("content_block_delta", index=place, delta=block | {"type": "compaction_delta"})
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
