"""The `clusterkv` command: all that typer and rich do."""

from clusterkv_jax.cli.app import app, main

__all__ = ["app", "main"]
