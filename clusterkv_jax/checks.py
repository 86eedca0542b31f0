"""Errors of configuration and of requests: one sentence that names the value and what is allowed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterkv_jax.checkpoints import Model


def check_fields(config: Any, *rules: tuple[str, bool, str]) -> None:
    """Raise ValueError for the first rule (field, holds, allowed values) that does not hold."""
    for name, holds, allowed in rules:
        if not holds:
            raise ValueError(f"{type(config).__name__} {name} must be {allowed}, got {getattr(config, name)!r}.")


def is_count(value: Any, least: int = 0) -> bool:
    """True for a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """True for a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def check_request(
    model: "Model",
    texts: Sequence[Sequence[int]],
    asked: Sequence[Sequence[int]] | None,
    max_new_tokens: int,
    stop: Sequence[str],
    prefill_chunk: int | None,
    *,
    streams: bool,
) -> None:
    """Raise ValueError for what `generate` cannot do with these prompts and questions, as token ids."""
    config = model.config
    if not texts:
        raise ValueError("prompts must hold at least one prompt, got none.")
    if not is_count(max_new_tokens, 1):
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens!r}.")
    if prefill_chunk is not None and not is_count(prefill_chunk, 1):
        raise ValueError(f"prefill_chunk must be a whole number of at least 1 or None, got {prefill_chunk!r}.")
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop must be a list of texts that are not empty, got {stop!r}.")
    if (stop or streams) and model.tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer, so there is no text to stop at or to stream.")
    if asked is not None and len(asked) != len(texts):
        raise ValueError(f"questions must be one per prompt, got {len(asked)} for {len(texts)} prompts.")
    for kind, rows in (("prompt", texts), ("question", asked or [])):
        for i, row in enumerate(rows):
            if not row:
                raise ValueError(f"{kind} {i} is empty; it needs at least one token.")
            if min(row) < 0 or max(row) >= config.vocab_size:
                wrong = next(t for t in row if not 0 <= t < config.vocab_size)
                raise ValueError(f"{kind} {i} holds token id {wrong}; allowed are 0 to {config.vocab_size - 1}.")
    for i, text in enumerate(texts):
        question = len(asked[i]) if asked else 0
        if len(text) + question + max_new_tokens > config.max_positions:
            raise ValueError(
                f"prompt {i} of {len(text)} tokens, its question of {question} and {max_new_tokens} new tokens "
                f"exceed the model's {config.max_positions} positions."
            )
