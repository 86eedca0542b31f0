"""Answers that are JSON of a schema: which tokens may follow, by llguidance."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clusterkv_jax.checkpoints import Model
from clusterkv_jax.runtime.extras import library
from clusterkv_jax.serve.errors import ApiError
from clusterkv_jax.storage.schema import shown

# Blanks only where a model may not go on with them for ever.
_SETTINGS = {"whitespace_flexible": False}


def schema_of(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema of OpenAI's or Anthropic's format of an answer; None for text. Raises ApiError for others."""
    kind = "text" if wanted is None else wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = (wanted or {}).get("json_schema", wanted)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ApiError(f"A format must be text, json_object, or json_schema with a schema, got {shown(repr(wanted))}.")
    return schema


def allowed_tokens(model: Model, schema: dict[str, Any]) -> Callable[[Sequence[int]], np.ndarray]:
    """What `Engine.request` asks before each token: those that may follow the ones so far, as bits of 32-bit words.

    Raises ValueError for a schema that llguidance cannot follow, and a model without a token that ends texts.
    """
    if model.tokenizer is None or not model.config.eos_ids:
        raise ValueError(f"Model {model.name!r} has no token that ends a text, which an answer of a schema needs.")
    llguidance = library("llguidance", "An answer of a schema", "structured")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_SETTINGS)
    tokenizer = _tokenizer(model.tokenizer, model.config.vocab_size, model.config.eos_ids)
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    if matcher.is_error():
        raise ValueError(f"The schema of the answer cannot be followed: {shown(matcher.get_error())}.")

    def allowed(tokens: Sequence[int]) -> np.ndarray:
        matcher.reset()
        matcher.consume_tokens(list(tokens))
        return np.frombuffer(matcher.compute_bitmask(), np.int32)

    return allowed


@functools.cache
def _tokenizer(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """The tokenizer as llguidance has it, made once: that takes a second."""
    hf = library("llguidance.hf", "An answer of a schema", "structured")
    return hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
