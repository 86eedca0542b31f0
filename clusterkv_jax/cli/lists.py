"""`clusterkv methods` and `clusterkv models`: what there is to choose from, a line each."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from clusterkv_jax.cli.terminal import one_sentence_errors, plain_console

_Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


def list_methods(debug: _Debug = False) -> None:
    """List the methods and presets that --method takes, those of installed packages last, one line each."""
    with one_sentence_errors(debug):
        from clusterkv_jax.methods.outside import installed
        from clusterkv_jax.presets import list_presets

        own = list_presets()
        theirs = [(name, f"{point.value}, of a package") for name, point in installed().items() if name not in own]
        _print(("name", "what it does"), [*((preset.name, preset.description) for preset in own.values()), *theirs])


def list_models(debug: _Debug = False) -> None:
    """List the families of models that --model reads, by the model_type of their config.json."""
    with one_sentence_errors(debug):
        from clusterkv_jax.models.registry import FAMILIES

        _print(("model_type", "models"), [(name, family.models) for name, family in FAMILIES.items()])


def _print(header: Sequence[str], entries: Sequence[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column(header[0], min_width=max(len(name) for name, *_ in entries))
    for column in header[1:]:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for entry in entries:
        table.add_row(*entry)
    # A line each: cut at the edge of a terminal, whole in a file or a pipe.
    plain_console(width=None if Console().is_terminal else 1000).print(table)
