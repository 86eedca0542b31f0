"""The `clusterkv` command: all that typer and rich do."""

from typing import TYPE_CHECKING, Any

from clusterkv_jax.cli.process import main

if TYPE_CHECKING:
    from clusterkv_jax.cli.commands import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """`app` is imported when it is asked for: `main` must be ready for an interrupt before typer is there."""
    if name != "app":
        raise AttributeError(f"Module {__name__!r} has no attribute {name!r}.")
    from clusterkv_jax.cli import commands

    return commands.app
