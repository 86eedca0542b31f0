"""Tools: what the chat template is told of them, and calls of them in what a model writes.

Two ways of writing are read: `<tool_call>{"name": ..., "arguments": ...}</tool_call>` of Qwen, Hermes and SmolLM, and
an answer that is one JSON object with a name and parameters or arguments, as Llama's are.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from clusterkv_jax.serve.errors import ApiError
from clusterkv_jax.storage.schema import from_json, shown

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A tool by its name, and its arguments as a JSON object in text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools may or must be called; `name` is that of the only one that will do."""

    kind: Literal["auto", "none", "required"]
    name: str | None = None


def choice_of(wanted: str | dict[str, Any] | None) -> ToolChoice:
    """What `tool_choice` of OpenAI's and Anthropic's interfaces says. Raises ApiError for what it does not."""
    about = {"type": wanted or "auto"} if not isinstance(wanted, dict) else wanted
    inner = about.get("function", about)
    match about.get("type"), inner.get("name") if isinstance(inner, dict) else False:
        case ("auto" | "none" | "required") as kind, None:
            return ToolChoice(kind)
        case "any", None:
            return ToolChoice("required")
        case "function" | "tool", str(name):
            return ToolChoice("required", name)
    message = f"tool_choice must be auto, none, required or name a tool, got {shown(repr(wanted))}."
    raise ApiError(message, param="tool_choice")


def arguments_of(text: str) -> Any:
    """Arguments as templates want them: a mapping, or the text where it is none."""
    try:
        return from_json(text, "Arguments")
    except ValueError:
        return text


def as_template_call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call of an earlier turn, as templates take it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def visible(text: str) -> str:
    """What can be shown of an answer that goes on: all before a call, or before what may become one."""
    if text.lstrip().startswith("{"):
        return ""
    half = max((n for n in range(1, len(OPEN)) if text.endswith(OPEN[:n])), default=0)
    return text[: len(text) - half].partition(OPEN)[0].rstrip()


def calls_in(text: str) -> tuple[str, list[Call]]:
    """A whole answer without its calls, and these; where one cannot be read, all of it is text."""
    if text.lstrip().startswith("{"):
        call = _call(text)
        return (text, []) if call is None else ("", [call])
    before, *parts = text.split(OPEN)
    calls = [_call(part.partition(CLOSE)[0]) for part in parts]
    if not calls or None in calls:
        return text, []
    return before.rstrip(), [call for call in calls if call is not None]


def _call(text: str) -> Call | None:
    try:
        value = from_json(text.strip(), "A call")
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))
