"""OpenAI's compaction: an item that names a conversation's compressed context by a digest, for no text is written.

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

from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve import prefixes
from clusterkv_jax.serve.answers import most_tokens
from clusterkv_jax.serve.body import aside
from clusterkv_jax.serve.earlier import keep
from clusterkv_jax.serve.errors import refused
from clusterkv_jax.serve.events import json_response, unless_gone
from clusterkv_jax.serve.items import CompactRequest, conversation_of
from clusterkv_jax.serve.prompts import Conversation, Message, of_conversation
from clusterkv_jax.serve.server import Server


async def compact(server: Server, request: Request, raw: bytes) -> Response:
    """The endpoint `/v1/responses/compact`."""
    body, _ = await bodies.parsed(raw, CompactRequest)
    bodies.check_model(body.model, server.settings.model_name)
    messages, conversation = conversation_of(server, body)
    return json_response(await unless_gone(request, _compacted(server, messages, conversation)))


async def _compacted(server: Server, messages: Sequence[Message], conversation: Conversation) -> dict[str, Any]:
    variables = {**conversation.variables, "add_generation_prompt": False}
    size = sum(len(str(message)) for message in messages)
    with refused():
        prompt = await aside(size, of_conversation, server.model, replace(conversation, variables=variables))
    most_tokens(server, len(prompt.tokens), None)
    text, cached = await prefixes.whole(server, prompt)
    item, count = await compaction_item(server, text, messages)
    usage: dict[str, Any] = {"input_tokens": count, "output_tokens": 0, "total_tokens": count}
    usage["input_tokens_details"] = {"cached_tokens": cached, "cache_write_tokens": count - cached}
    usage["output_tokens_details"] = {"reasoning_tokens": 0}
    number, now = f"resp_{secrets.token_hex(12)}", int(time.time())
    return {"id": number, "object": "response.compaction", "created_at": now, "output": [item], "usage": usage}


async def compaction_item(server: Server, text: str, messages: Sequence[Message]) -> tuple[dict[str, Any], int]:
    """An item that stands for these messages, whose text is in the store, and how many tokens they are."""
    context = await prefixes.compact(server, text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    keep(server, digest, messages)
    return {"type": "compaction", "id": f"cmp_{secrets.token_hex(12)}", "encrypted_content": digest}, context.length
