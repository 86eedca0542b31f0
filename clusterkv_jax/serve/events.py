"""Answers over HTTP: whole ones, streams of server-sent events, and clients that leave before the end."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from clusterkv_jax.serve.answers import Running
from clusterkv_jax.serve.errors import ApiError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
# Proxies are to pass each event on at once.
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
LEFT = 499


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event of a JSON object."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(value))


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON object, of Structs too."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), media_type="application/json")


def streamed(events: AsyncGenerator[bytes, None], running: Running) -> Response:
    """A stream of events; where the client leaves, the request is cancelled."""
    return _Stream(events, running)


class _Stream(StreamingResponse):
    def __init__(self, events: AsyncGenerator[bytes, None], running: Running) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._events, self._running = events, running

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events):
                with contextlib.suppress(ApiError):  # the client has left
                    await unless_gone(Request(scope, receive), self.stream_response(send))
        finally:  # events that nobody began to read have not done so
            self._running.stream.cancel()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` comes to; it is cancelled where the client leaves, and ApiError is raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("The client has left.", LEFT)
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
