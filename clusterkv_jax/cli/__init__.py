"""The `clusterkv` command: all that typer and rich do."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from clusterkv_jax.cli.process import run

if TYPE_CHECKING:
    from clusterkv_jax.cli.commands import app

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `clusterkv` command; takes the process's arguments by default."""
    arguments = sys.argv[1:] if arguments is None else arguments

    def command() -> None:
        from clusterkv_jax.cli.commands import app

        app(arguments)

    run(command, debug="--debug" in arguments)


def __getattr__(name: str) -> Any:
    """`app` is imported when it is asked for: `main` is ready for an interrupt before typer is there."""
    if name != "app":
        raise AttributeError(f"Module {__name__!r} has no attribute {name!r}.")
    from clusterkv_jax.cli import commands

    return commands.app
