"""The checker that executes the annotations of the library's functions in tests."""

from collections.abc import Callable
from typing import Any

import typer
from beartype import BeartypeConf, FrozenDict, beartype

# A whole number is also a number, as everywhere in Python's typing. Commands are annotated with typer.Context, as typer
# wants it, and get an object of the class that it extends.
_overrides = FrozenDict({typer.Context: typer.Context.__base__})
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=_overrides))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Functions, but no constructors: jax takes pytrees apart and fills them with specs, shapes and stacked arrays, and
    settings check themselves, in sentences that users read.
    """
    return function if function.__qualname__.endswith(".__init__") else _beartype(function)
