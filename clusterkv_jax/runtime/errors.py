"""Errors in one sentence: settings that cannot be, and out of memory."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsInt

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(bytes|B|[KMGT]i?B?)\b")
# Letters of a value in a sentence.
_SHOWN = 200
# Memory inside a chip. A kernel that exceeds it is too large at any batch size or prompt length.
_ON_CHIP = re.compile(r"vmem|smem|shared memory", re.IGNORECASE)


def check_fields(config: Any, *rules: tuple[str, bool, str]) -> None:
    """Raise ValueError for the first rule (field, holds, allowed values) that does not hold."""
    for name, holds, allowed in rules:
        if not holds:
            raise ValueError(f"{type(config).__name__} {name} must be {allowed}, got {shown(getattr(config, name))}.")


def shown(value: Any) -> str:
    """A value as Python writes it, in one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def counted(number: SupportsInt, what: str) -> str:
    """A number of things: "1 token", "2 tokens"."""
    return f"{int(number)} {what}{'' if int(number) == 1 else 's'}"


def is_one_of(value: Any, *allowed: str | None) -> bool:
    """True for one of these texts; arrays and the like are none."""
    return (value is None or isinstance(value, str)) and value in allowed


def is_count(value: Any, least: int = 0) -> bool:
    """True for a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """True for a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


@contextmanager
def out_of_memory_explained(doing: str, *, uses_host: bool) -> Iterator[None]:
    """Raise MemoryError in place of XLA's error, whether it comes from the device or from the host's memory.

    Args:
        doing: what is being made, with its numbers; follows "while".
        uses_host: whether rows go to a host store.
    """
    try:
        yield
    except RuntimeError as error:  # jax's own is one in every version
        text = str(error)
        if not text.startswith("RESOURCE_EXHAUSTED") or _ON_CHIP.search(text):
            raise
        raise MemoryError(_sentence(text, doing, uses_host)) from error


def _sentence(text: str, doing: str, uses_host: bool) -> str:
    size = _SIZE.search(text)
    request = f" ({_gib(*size.groups()):.3g} GiB were asked for)" if size else ""
    where, change = "device", ["a smaller budget", "a smaller prefill_chunk"]
    if not uses_host:
        change.append('ClusterKV with store="host"')
    elif re.search(r"\bhost\b", text, re.IGNORECASE):
        limit = "on a GPU a larger XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (64 by default)"
        where, change = "host", ['store="device"', limit]
    *some, last = ["a smaller batch", "a shorter prompt", *change]
    return f"Out of {where} memory while {doing}{request}; take {', '.join(some)} or {last}."


def _gib(number: str, unit: str) -> float:
    return float(number) * 1024.0 ** ("KMGT".find(unit[0]) + 1) / 2**30
