"""Endpoints beside those that answer: how the server does, its model, and tokens of texts."""

import asyncio
import importlib.metadata
from typing import Annotated, Any

from msgspec import Meta, Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from clusterkv_jax.serve import body as bodies
from clusterkv_jax.serve import metrics
from clusterkv_jax.serve.chat import ChatMessage, as_messages
from clusterkv_jax.serve.errors import ApiError, refused
from clusterkv_jax.serve.events import json_response
from clusterkv_jax.serve.prompts import ChatPrompt, of_conversation, of_text
from clusterkv_jax.serve.server import Server
from clusterkv_jax.text.tokenizer import decode


class TokenizeRequest(Struct):
    """A text, or messages in the model's chat template."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=bodies.MOST_MESSAGES)] | None = None
    model: str | None = None


class DetokenizeRequest(Struct):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


async def health(server: Server, _request: Request, _raw: bytes) -> Response:
    """Whether the engine works. Raises ApiError where an error of the device has ended it."""
    if not server.served.is_alive:
        raise ApiError("The engine has ended; the server's log says why.", 503)
    return json_response({"status": "ok"})


async def version(_server: Server, _request: Request, _raw: bytes) -> Response:
    """The version of this library."""
    return json_response({"version": importlib.metadata.version("clusterkv-jax")})


async def models(server: Server, request: Request, _raw: bytes) -> Response:
    """The model, in OpenAI's form with what Anthropic's has beside it."""
    name = server.settings.model_name
    about = {"id": name, "object": "model", "type": "model", "display_name": name, "created": server.started}
    about |= {"owned_by": "clusterkv", "max_model_len": server.limits["max_tokens"]}
    if "name" in request.path_params:
        bodies.check_model(request.path_params["name"], name)
        return json_response(about)
    return json_response({"object": "list", "data": [about], "has_more": False, "first_id": name, "last_id": name})


async def metrics_text(server: Server, _request: Request, _raw: bytes) -> Response:
    """Counts for Prometheus."""
    return Response(metrics.shown(server.metrics, server.served.stats()), media_type=CONTENT_TYPE_LATEST)


async def status(server: Server, _request: Request, _raw: bytes) -> Response:
    """What the page shows."""
    stats = server.served.stats()
    names = ("slots", "active", "waiting", "finished", "failed", "cancelled", "new_tokens", "tokens_per_s", "ttft_s")
    about: dict[str, Any] = {name: getattr(stats, name) for name in names}
    about |= {"model": server.settings.model_name, "method": type(server.engine.method).__name__, **server.limits}
    about |= {"contexts": stats.contexts, "context_bytes": stats.context_bytes, "busy_s": stats.busy_s}
    return json_response(about | {"shared": [len(prefix.tokens) for prefix in server.contexts.values()]})


async def tokenize(server: Server, _request: Request, raw: bytes) -> Response:
    """Token ids of a text, or of messages."""
    body, _ = await bodies.parsed(raw, TokenizeRequest)
    bodies.check_model(body.model, server.settings.model_name)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("Give prompt or messages, one of them.", param="prompt")
    with refused():
        if body.messages is None:
            prompt = await asyncio.to_thread(of_text, server.model, body.prompt or "")
        else:
            messages, cut = as_messages(body.messages)
            prompt = await asyncio.to_thread(of_conversation, server.model, ChatPrompt(messages, cut))
    about = {"count": len(prompt.tokens), "max_model_len": server.limits["max_tokens"], "tokens": prompt.tokens}
    return json_response(about)


async def detokenize(server: Server, _request: Request, raw: bytes) -> Response:
    """The text of token ids."""
    body, _ = await bodies.parsed(raw, DetokenizeRequest)
    bodies.check_model(body.model, server.settings.model_name)
    vocab = server.model.config.vocab_size
    if wrong := [token for token in body.tokens if not 0 <= token < vocab]:
        raise ApiError(f"tokens hold {wrong[0]}; allowed are 0 to {vocab - 1}.", param="tokens")
    with refused():
        text = await asyncio.to_thread(decode, server.model.tokenizer, body.tokens)
    return json_response({"prompt": text})
