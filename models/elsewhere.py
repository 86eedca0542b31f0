"""Decoders that were written elsewhere (`nnx`): their methods stand in for functions of `models.decoder`."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def or_written_elsewhere(function: Function) -> Function:
    """The function of weights and a configuration, or the method of its name where the configuration has a decoder."""

    @wraps(function)
    def call(weights: Any, config: Any, *args: Any) -> Any:
        if config.decoder is None:
            return function(weights, config, *args)
        return getattr(config.decoder, function.__name__)(weights, *args)

    result: Any = call
    return result
