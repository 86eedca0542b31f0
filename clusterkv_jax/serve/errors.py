"""Errors as clients of each interface expect them: a status, a kind and one sentence."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from starlette.responses import Response

Form = Literal["openai", "anthropic"]

_OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """What a request is refused with: an HTTP status, one sentence, OpenAI's code, the field, when to come back."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s


def error_body(form: Form, error: ApiError) -> dict[str, Any]:
    """The JSON object of an error."""
    if form == "anthropic":
        kind = _ANTHROPIC.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
    kind = _OPENAI.get(error.status, "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(form: Form, error: ApiError, headers: Mapping[str, str]) -> Response:
    """An error as a response."""
    more = {} if error.retry_after_s is None else {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    body = msgspec.json.encode(error_body(form, error))
    return Response(body, error.status, {**headers, **more}, media_type="application/json")


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Around what is made of a request alone: a ValueError in there is the client's fault, everywhere else ours."""
    try:
        yield
    except ValueError as error:
        raise ApiError(str(error)) from error


def as_api_error(error: Exception) -> ApiError:
    """Any error of this library as one for a client; what is not the client's fault tells nothing of our inside."""
    from clusterkv_jax.engine import EngineFull

    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFull):
        return ApiError(str(error), 429, code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
    if isinstance(error, MemoryError):
        return ApiError(str(error), 503, retry_after_s=10)
    return ApiError("The server failed; its log says more.", 500)
