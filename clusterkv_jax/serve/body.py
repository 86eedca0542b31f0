"""What a client sends: read within limits, and checked against a declared type."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from clusterkv_jax.serve.errors import ApiError, refused
from clusterkv_jax.storage import schema

T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)
# Seconds in which a body must be there.
BODY_S = 60
# Bytes from which on others are served while a body is worked on; a thread for less would take longer than the work.
LARGE = 2**13
# Unknown fields that a line of the log names.
MOST_IGNORED = 16
# Messages and blocks of one request.
MOST_MESSAGES = 4096


async def read_body(request: Request, most: int) -> bytes:
    """A request's body of at most so many bytes. Raises ApiError for a larger one, and for one that is too slow."""
    too_large = ApiError(f"A request has at most {schema.size(most)}.", 413)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(f"The request was not there after {BODY_S} seconds.", 408) from None
    except ClientDisconnect:
        raise ApiError("The client left before its request was there.") from None
    return b"".join(parts)


async def aside(size: int, function: Callable[..., T], *args: Any) -> T:
    """What a function makes of so many bytes: of many in a thread, while others are served."""
    return await asyncio.to_thread(function, *args) if size > LARGE else function(*args)


async def parsed(raw: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """A body as a declared type, and the names of fields that it does not have. Raises ApiError for anything else."""
    with refused():
        return await aside(len(raw), _parsed, raw, kind)


def _parsed(raw: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    value = schema.from_json(schema.as_text(raw, "The request"), "The request")
    if not isinstance(value, dict):
        raise ValueError("The request must be a JSON object.")
    unknown = sorted(set(value) - set(kind.__struct_fields__))
    return schema.checked(value, kind, "The request"), [schema.shown(name) for name in unknown[:MOST_IGNORED]]


def refuse(body: Any, **neutral: Any) -> None:
    """Raise ApiError for a field with another value than None or its neutral one: what it asks for is not done."""
    for name, allowed in neutral.items():
        value = getattr(body, name)
        if value is not None and value != allowed:
            shown = schema.shown(repr(value))
            raise ApiError(f"{name} = {shown} is not supported; leave it out.", param=name)


def check_model(name: str | None, served: str) -> None:
    """Raise ApiError for another model than the one that is served."""
    if name is not None and name != served:
        message = f"The model {schema.shown(repr(name))} is not served here; {served!r} is."
        raise ApiError(message, 404, code="model_not_found", param="model")
