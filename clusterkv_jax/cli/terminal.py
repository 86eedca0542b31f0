"""What the commands share on a terminal: errors of one sentence, bars for long work, and what compiling takes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from clusterkv_jax.cli.process import ERROR, INTERRUPTED

# Between two lines of progress that are not written over each other.
PACE_SECONDS = 30


def plain_console(**options: Any) -> Console:
    """A console that prints names and paths as they are: brackets in them are no markup."""
    return Console(markup=False, **options)


@contextmanager
def one_sentence_errors(debug: bool) -> Iterator[None]:
    """Every error ends the program with exit code 2 and one sentence, an interrupt with 130; with `debug` an error is
    Python's, traceback and all. A closed pipe is left to `main`.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        plain_console(stderr=True).print("Interrupted.")
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug and isinstance(error, EOFError):
            raise RuntimeError(str(error)) from error  # typer takes the end of a file for that of its own input
        if debug:
            raise
        Console(stderr=True, soft_wrap=True).print("[bold red]Error:[/] ", end="")
        plain_console(stderr=True, soft_wrap=True).print(sentence(error), highlight=False)
        raise typer.Exit(ERROR) from error


def sentence(error: Exception) -> str:
    """What went wrong, on one line."""
    match error:
        case OSError(filename=str(file), strerror=str(reason)):
            return f"{reason}: {file}."
        case OSError(strerror=str(reason)):
            return f"{reason}."
        case MemoryError():
            return str(error) or "Out of host memory."  # Python's own says nothing
        case ValueError() | OSError():
            return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}, which nothing foresaw: {text.rstrip('.')}. Add --debug to see where."


def can_draw(what: str) -> bool:
    """Whether matplotlib is there; where it is missing, a line says that the picture is left out."""
    from clusterkv_jax.runtime.extras import library

    try:
        library("matplotlib", f"Drawing {what}", "plots")
    except ValueError as error:
        plain_console(stderr=True, soft_wrap=True).print(f"No picture is drawn. {error}", style="dim", highlight=False)
        return False
    return True


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[float], None]]:
    """A bar with an estimate on standard error; called with how many of the `total` units are done, parts of one too.

    Where no terminal is, a line is printed every half minute instead.
    """
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, total, unit)
        return
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(console: Console, total: int, unit: str) -> Callable[[float], None]:
    """Prints how many are done and what is left, now and then."""
    begin, first, show_line = 0.0, 0.0, _seldom(console)

    def show(done: float) -> None:
        nonlocal begin, first
        if not begin:
            begin, first = time.monotonic(), done  # an earlier run may have done some
        elif done > first:
            left = (total - done) * (time.monotonic() - begin) / (done - first)
            show_line(f"{int(done):,} of {total:,} {unit} · {left:,.0f} s left", done == total)

    return show


def _seldom(console: Console) -> Callable[[str, bool], None]:
    """Prints a line unless one was printed less than `PACE_SECONDS` ago; the last one always."""
    printed = float("-inf")

    def show(line: str, last: bool) -> None:
        nonlocal printed
        if last or time.monotonic() - printed > PACE_SECONDS:
            console.print(line, highlight=False, soft_wrap=True)
            printed = time.monotonic()

    return show


@contextmanager
def pace(total: int, chips: int, serving: Mapping[int, Any]) -> Iterator[Callable[[int, int], None]]:
    """A line with the examples and tokens that pass in a second, what is left, and how the engines do that are
    `serving` (`EngineStats` by replica); called with both numbers so far.

    On a terminal it is one line that changes. Elsewhere a new one is printed every half minute, and at the end.
    """
    from clusterkv_jax.engine.metrics import stats_line

    console, begin, first = plain_console(stderr=True), 0.0, (0, 0)
    show_line = _seldom(console)

    def text(lines: int, tokens: int) -> str:
        seconds = max(time.monotonic() - begin, 1e-3)
        each, per_chip = (lines - first[0]) / seconds, (tokens - first[1]) / seconds / chips
        left = f"{(total - lines) / each:,.0f} s left" if each else "no estimate yet"
        engines = f" · {stats_line(list(serving.values()))}" if serving else ""
        return f"{lines:,} of {total:,} examples · {each:.3g}/s · {per_chip:,.0f} tokens/s/chip · {left}{engines}"

    def show(lines: int, tokens: int) -> None:
        nonlocal begin, first
        if not begin:
            begin, first = time.monotonic(), (lines, tokens)
        if status is not None:
            status.update(text(lines, tokens))
        elif lines > first[0]:
            show_line(text(lines, tokens), lines == total)

    status = console.status("") if console.is_terminal else None
    with nullcontext() if status is None else status:
        yield show


def use_compilation_cache(on: bool, folder: str | None = None) -> None:
    """Keep compiled programs in a folder or bucket, the user's folder by default, or nowhere."""
    import jax

    from clusterkv_jax.storage.compilation_cache import keep_programs

    if on:
        keep_programs(folder)
    else:
        jax.config.update("jax_enable_compilation_cache", False)


@contextmanager
def compiling(name: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner while programs are compiled, then one line that says what that took; called with each one's name."""
    from clusterkv_jax.runtime.programs import compilation

    console = plain_console(stderr=True, quiet=quiet, highlight=False)
    with console.status(Text(f"Compiling {name} ...")) as spinner, compilation() as total:
        yield lambda program: spinner.update(Text(f"Compiling {name}: {program} ..."))
    by_origin = {"compiled": total.programs - total.cached, "found in the cache": total.cached}
    counts = " and ".join(f"{count} programs {how}" for how, count in by_origin.items() if count)
    if counts:
        console.print(f"{name}: {counts} in {total.seconds:.1f} s", style="dim")
