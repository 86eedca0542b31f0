"""What OpenAI's interfaces share: fields that say how to draw, usage, reasons for an end."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from clusterkv_jax.serve.answers import Running
from clusterkv_jax.serve.errors import ApiError
from clusterkv_jax.storage.schema import shown

# Most answers, stop strings and tokens with a bias of one request: more are an accident or an attack.
Few, Many = Meta(ge=1, le=128), Meta(max_length=1024)
# The engine's reasons by OpenAI's names.
FINISH_REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


class StreamOptions(Struct):
    """What else a stream says."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Drawing(Struct, kw_only=True):
    """Fields that say how tokens are drawn and where an answer ends; those of vLLM beyond OpenAI's too."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: Annotated[int, Few] | None = None
    stop: str | Annotated[list[str], Many] | None = None
    stop_token_ids: Annotated[list[int], Many] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Many] | None = None


class PromptDetails(Struct):
    """Tokens of a prompt that were there, and those that are now, for the next request."""

    cached_tokens: int
    cache_write_tokens: int


class Usage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of(running: Running, tokens: int) -> Usage:
    """The usage of a request after so many new tokens."""
    details = PromptDetails(running.cached, running.written)
    return Usage(running.prompt_tokens, tokens, running.prompt_tokens + tokens, details)


def how(body: Drawing) -> dict[str, Any]:
    """The fields of `SamplingParams`. Raises ApiError for a bias of what is no token id."""
    given = {name: getattr(body, name) for name in Drawing.__struct_fields__}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    for name in ("stop", "stop_token_ids"):
        given[name] = None if given[name] is None else tuple(given[name])
    if body.logit_bias is not None:
        if wrong := [token for token in body.logit_bias if not (token.isascii() and token.isdigit())]:
            raise ApiError(f"logit_bias must name token ids, got {shown(repr(wrong[0]))}.", param="logit_bias")
        given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
    return given
