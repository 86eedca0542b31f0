"""What the commands share on a terminal: errors of one sentence, and a bar for long work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def one_sentence_errors(debug: bool) -> Iterator[None]:
    """Bad input and too little memory end the program with exit code 2 and one sentence, an interrupt with 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        Console(stderr=True).print("Interrupted.")
        raise typer.Exit(130) from error
    except (ValueError, OSError, MemoryError) as error:
        if debug:
            raise
        text = f"{error.strerror}: {error.filename}." if isinstance(error, OSError) and error.filename else str(error)
        text = text or "Out of host memory."  # Python's own MemoryError says nothing
        Console(stderr=True, soft_wrap=True).print("[bold red]Error:[/] ", end="")
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
        raise typer.Exit(2) from error


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar with an estimate on standard error; called with how many of the `total` units are done."""
    console = Console(stderr=True)
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda done: bar.update(task, completed=done)
