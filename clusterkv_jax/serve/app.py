"""The application: which path answers what, who may ask, and what comes of an error."""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from clusterkv_jax.serve.body import read_body
from clusterkv_jax.serve.chat import chat_completions
from clusterkv_jax.serve.compaction import compact
from clusterkv_jax.serve.completions import completions
from clusterkv_jax.serve.context_files import all_written
from clusterkv_jax.serve.errors import ApiError, Form, as_api_error, error_response
from clusterkv_jax.serve.events import LEFT
from clusterkv_jax.serve.messages import count_tokens, messages
from clusterkv_jax.serve.responses import responses
from clusterkv_jax.serve.server import Server
from clusterkv_jax.serve.status import detokenize, health, metrics_text, models, status, tokenize, version

_log = logging.getLogger(__name__)
# An endpoint: what it answers to a request with this body.
Endpoint = Callable[[Server, Request, bytes], Awaitable[Response]]

_GET: dict[str, Endpoint] = {
    "/v1/models": models,
    "/v1/models/{name:path}": models,
    "/version": version,
    "/metrics": metrics_text,
    "/status": status,
}
_POST: dict[str, tuple[Endpoint, Form]] = {
    "/v1/completions": (completions, "openai"),
    "/v1/chat/completions": (chat_completions, "openai"),
    "/v1/messages": (messages, "anthropic"),
    "/v1/messages/count_tokens": (count_tokens, "anthropic"),
    "/v1/responses": (responses, "openai"),
    "/v1/responses/compact": (compact, "openai"),
    "/tokenize": (tokenize, "openai"),
    "/detokenize": (detokenize, "openai"),
}


def make_app(server: Server) -> Starlette:
    """The application of a server, which it closes with itself."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        # All answers have ended by now, or have had their time.
        if server.files is not None:
            await all_written(server.files, server.settings.shutdown_timeout_s)
        await asyncio.to_thread(server.served.close, drain=False)

    async def page(_request: Request) -> Response:
        text = resources.files("clusterkv_jax.serve") / "page.html"
        return HTMLResponse(text.read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {404: f"There is no {request.url.path} here.", 405: f"{request.url.path} takes no {request.method}."}
        message = known.get(error.status_code, f"{error.detail}.")
        return error_response("openai", ApiError(message, error.status_code), error.headers or {})

    routes = [Route("/", page), Route("/health", _answering(server, health, "openai", is_open=True))]
    routes += [Route(path, _answering(server, answer, "openai"), methods=["GET"]) for path, answer in _GET.items()]
    routes += [Route(path, _answering(server, *answer), methods=["POST"]) for path, answer in _POST.items()]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refused})


# The page's own script and style, and requests to where it came from: nothing else.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
}


def _answering(
    server: Server, answer: Endpoint, form: Form, *, is_open: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint of starlette: it asks for the key unless it `is_open`, reads the body and answers; errors have the
    interface's form.
    """

    async def endpoint(request: Request) -> Response:
        try:
            if not is_open:
                _check_key(server.settings.api_keys, request)
            raw = await read_body(request, server.settings.max_body_bytes) if request.method == "POST" else b""
            return await answer(server, request, raw)
        except Exception as error:
            known = as_api_error(error)
            _tell(request, known, error)
            headers = {"www-authenticate": "Bearer"} if known.status == 401 else {}
            return error_response(form, known, headers)

    return endpoint


def _tell(request: Request, known: ApiError, error: Exception) -> None:
    """One line of the log; a traceback where nobody expected the error. Sentences may quote a client's words."""
    level = logging.ERROR if known.status == 500 else logging.INFO
    trace = error if known.status == 500 and known is not error else None
    what = "client gone" if known.status == LEFT else known.status
    _log.log(level, "%s %s: %s", request.method, request.url.path, what, exc_info=trace)


def _check_key(keys: tuple[str, ...], request: Request) -> None:
    """Raise ApiError for a request without one of the keys. Every key is compared, whether one was right or not."""
    if not keys:
        return
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    given = (token.strip(" ") if kind.lower() == "bearer" else "") or request.headers.get("x-api-key", "")
    # starlette reads a header's bytes as Latin-1.
    right = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in keys]
    if not any(right):
        message = "A valid API key is needed, as 'Authorization: Bearer KEY' or x-api-key."
        raise ApiError(message, 401, code="invalid_api_key")
