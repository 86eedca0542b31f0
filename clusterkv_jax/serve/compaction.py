"""Compaction: an item, or a block, that names a conversation's compressed context by a digest; no text is written.

The context was compressed as it was read and said, so that nothing is read again. It is brought to its budget at once.
"""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from clusterkv_jax.engine import RequestOutput
from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve import prefixes
from clusterkv_jax.serve.answers import Running, most_tokens
from clusterkv_jax.serve.body import aside
from clusterkv_jax.serve.earlier import keep
from clusterkv_jax.serve.errors import refused
from clusterkv_jax.serve.events import json_response, unless_gone
from clusterkv_jax.serve.items import CompactRequest, conversation_of
from clusterkv_jax.serve.prompts import ChatPrompt, Message, of_conversation
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.text_keys import key_of


async def compact(server: Server, request: Request, raw: bytes) -> Response:
    """OpenAI's endpoint `/v1/responses/compact`."""
    body, _ = await bodies.parsed(raw, CompactRequest)
    bodies.check_model(body.model, server.settings.model_name)
    messages, conversation = conversation_of(server, body)
    return json_response(await unless_gone(request, _compacted(server, messages, conversation)))


async def _compacted(server: Server, messages: Sequence[Message], conversation: ChatPrompt) -> dict[str, Any]:
    variables = {**conversation.variables, "add_generation_prompt": False}
    size = sum(len(str(message)) for message in messages)
    with refused():
        how = replace(conversation, variables=variables), prefixes.known_beginnings(server)
        prompt = await aside(size, of_conversation, server.model, *how)
    most_tokens(server, len(prompt.tokens), None)
    text, cached = await prefixes.whole(server, prompt)
    digest, count = await _compact(server, text, messages)
    usage: dict[str, Any] = {"input_tokens": count, "output_tokens": 0, "total_tokens": count}
    usage["input_tokens_details"] = {"cached_tokens": cached, "cache_write_tokens": count - cached}
    usage["output_tokens_details"] = {"reasoning_tokens": 0}
    number, now = f"resp_{secrets.token_hex(12)}", int(time.time())
    return {"id": number, "object": "response.compaction", "created_at": now, "output": [item(digest)], "usage": usage}


def item(digest: str) -> dict[str, Any]:
    """OpenAI's item of a compacted conversation."""
    return {"type": "compaction", "id": f"cmp_{secrets.token_hex(12)}", "encrypted_content": digest}


async def compacted_behind(
    server: Server,
    running: Running,
    answer: RequestOutput,
    messages: Sequence[Message],
    thresholds: Sequence[int | None],
) -> str | None:
    """The digest of a conversation that is compacted behind its answer, once it has as many tokens as a threshold says,
    which is by default half of the most; None of a shorter one, and of one that has left no context.

    `messages` are those that the digest is to stand for, the answer with them.
    """
    if not thresholds or running.text is None or answer.result is None:
        return None
    least = min(each or server.limits["max_tokens"] // 2 for each in thresholds)
    whole = running.text + answer.result.texts[0]
    if running.prompt_tokens + len(answer.result.tokens[0]) < least or key_of(whole) not in server.contexts:
        return None
    digest, _ = await _compact(server, whole, messages)
    return digest


async def _compact(server: Server, text: str, messages: Sequence[Message]) -> tuple[str, int]:
    """A digest that stands for these messages, whose text is in the store, and how many tokens they are."""
    context = await prefixes.compact(server, text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    keep(server, digest, messages)
    return digest, context.length
