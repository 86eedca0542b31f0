"""What `/v1/responses` reads: items, as messages of chat templates."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve.earlier import earlier
from clusterkv_jax.serve.errors import ApiError
from clusterkv_jax.serve.prompts import ChatPrompt, Cut, Message, joined
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.tools import arguments_of, as_template_call


class Part(Struct):
    """A block of a message or of a tool's output."""

    type: str
    text: str = ""
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Item(Struct, kw_only=True):
    """What a client sends of a conversation: a message, a call of a tool, its output, a thought (not read again), or a
    compaction, which stands for all that came before it.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "compaction"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""
    encrypted_content: str | None = None


Items = Annotated[list[Item], Meta(min_length=1, max_length=bodies.MOST_MESSAGES)]


class CompactRequest(Struct, kw_only=True):
    """A conversation that is to be compacted."""

    input: str | Items | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] = []
    tool_choice: str | dict[str, Any] = "auto"


def conversation_of(server: Server, body: CompactRequest) -> tuple[list[Message], ChatPrompt]:
    """The messages up to the answer, earlier ones first, and the conversation with what stands around them.

    Raises ApiError for items that are no text, none at all, and what is known no longer.
    """
    number = body.previous_response_id
    before = () if number is None else earlier(server, number, "previous_response_id")
    items = [Item(content=body.input)] if isinstance(body.input, str) else body.input or []
    messages, cut = _messages(server, before, items)
    first: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    cut = None if cut is None else (cut[0] + len(first), cut[1])
    functions = [tool for tool in body.tools if tool.get("type") == "function" and body.tool_choice != "none"]
    variables = {"tools": list(map(_described, functions))} if functions else {}
    return messages, ChatPrompt([*first, *messages], cut, variables)


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as templates take it."""
    about = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": about}


def _messages(server: Server, before: Sequence[Message], items: Sequence[Item]) -> tuple[list[Message], Cut | None]:
    """Items as messages of templates behind those before; calls that follow each other are one message."""
    plain = [dict(message) for message in before]
    cut: Cut | None = None
    for item in items:
        if item.type == "compaction":
            plain, cut = [dict(each) for each in earlier(server, item.encrypted_content or "", "input")], None
        elif item.type == "function_call":
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
