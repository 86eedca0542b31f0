"""Answers in a form that the client prescribes, JSON of a schema or the call of a tool: by llguidance.

Grammars are texts in the language of Lark, with JSON schemas as `%json`.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clusterkv_jax.checkpoints import Model
from clusterkv_jax.runtime.extras import library
from clusterkv_jax.serve.errors import ApiError
from clusterkv_jax.serve.tools import CLOSE, OPEN, ToolChoice
from clusterkv_jax.storage.schema import shown

# No blanks but these: a model may go on with them for ever.
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def of_format(wanted: Mapping[str, Any] | None) -> str | None:
    """The grammar of OpenAI's or Anthropic's format of an answer; None for text. Raises ApiError for others."""
    kind = "text" if wanted is None else wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return f"start: {_json({'type': 'object'})}"
    inner = (wanted or {}).get("json_schema", wanted)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ApiError(f"A format must be text, json_object, or json_schema with a schema, got {shown(repr(wanted))}.")
    return f"start: {_json(schema)}"


def of_call(model: Model, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> str | None:
    """The grammar of a call of one of the tools that templates are told of; None where none must be called.

    Raises ApiError where there is no such tool.
    """
    if choice.kind != "required":
        return None
    functions = [tool.get("function") for tool in tools]
    named = {each["name"]: each for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)}
    names = list(named) if choice.name is None else [choice.name]
    if not names or not named.keys() >= set(names):
        wanted = "a tool" if choice.name is None else f"the tool {shown(repr(choice.name))}"
        raise ApiError(f"tool_choice wants {wanted}, which tools do not describe.", param="tool_choice")
    tagged = OPEN in str(getattr(model.tokenizer, "chat_template", None))
    before, word, after = (f"{OPEN}\n", "arguments", f"\n{CLOSE}") if tagged else ("", "parameters", "")
    lines = [f"start: {' | '.join(f'call_{number}' for number in range(len(names)))}"]
    for number, name in enumerate(names):
        begin = f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{word}": '
        parameters = named[name].get("parameters") or {"additionalProperties": False}
        if not isinstance(parameters, dict):
            raise ApiError(f"The parameters of {shown(repr(name))} must be a JSON schema.", param="tools")
        schema = {"type": "object", **parameters}
        lines.append(f"call_{number}: {json.dumps(begin)} arguments_{number} {json.dumps('}' + after)}")
        lines.append(f"arguments_{number}: {_json(schema)}")
    return "\n".join(lines)


def allowed_tokens(model: Model, grammar: str, count: int = 1) -> Callable[[Sequence[int]], np.ndarray]:
    """What `Engine.request` asks before each token: those that may follow the ones so far, as bits of 32-bit words.

    It follows `count` answers, each of whose tokens it reads once.

    Raises ValueError for a grammar that llguidance cannot follow, and a model without a token that ends texts.
    """
    if model.tokenizer is None or not model.config.eos_ids:
        raise ValueError(f"Model {model.name!r} has no token that ends a text, which an answer of a schema needs.")
    llguidance = library("llguidance", "An answer of a schema", "structured")
    tokenizer = _tokenizer(model.tokenizer, model.config.vocab_size, model.config.eos_ids)
    first = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    if first.is_error():
        (reason, *_) = first.get_error().splitlines()
        raise ValueError(f"The schema of the answer cannot be followed: {shown(reason)}.")
    matchers = [first, *(first.deep_copy() for _ in range(count - 1))]
    read: list[tuple[int, ...]] = [() for _ in matchers]

    def allowed(tokens: Sequence[int]) -> np.ndarray:
        # One of the matchers has read this answer up to its last token, or what another one has in common with it.
        said = tuple(tokens)
        number = max((i for i, had in enumerate(read) if said[: len(had)] == had), key=lambda i: len(read[i]))
        matchers[number].consume_tokens(list(said[len(read[number]) :]))
        read[number] = said
        return np.frombuffer(matchers[number].compute_bitmask(), np.int32)

    return allowed


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _BLANKS})}"


@functools.cache
def _tokenizer(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """The tokenizer as llguidance has it, made once: that takes a second."""
    hf = library("llguidance.hf", "An answer of a schema", "structured")
    return hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
