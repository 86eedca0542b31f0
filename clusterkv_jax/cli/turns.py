"""The turns of `clusterkv chat`: what is typed, and what comes of it."""

import contextlib
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from clusterkv_jax.cli.terminal import plain_console, sentence

HELP = """/full        the last answer again, from the full cache: all before it is read anew
/stats       what the cache holds
/save FILE   write the conversation to a file
/load FILE   go on with a conversation that was saved
/help        this list
/quit        end, as Ctrl-D does; Ctrl-C ends an answer and nothing else"""

# From a file to what `opened` opens.
Saved = Callable[[Path], Callable[[], Any]]


def talk(console: Console, conversation: Any, saved: Saved) -> None:
    """Answer what is typed until it ends. What goes wrong in a turn is a sentence, and the conversation goes on."""
    while (line := _typed(console)) not in (None, "/quit"):
        if not line:
            continue
        try:
            conversation = _turn(console, conversation, saved, line)
        except (ValueError, OSError, MemoryError) as error:
            console.print(sentence(error), style="red")


def opened(doing: str, begin: Callable[[], Any]) -> Any:
    """A conversation whose programs are compiled, with a spinner that says what is being done, and a line of what it
    took.
    """
    from clusterkv_jax.runtime.programs import compilation

    console, begun = plain_console(stderr=True, highlight=False), time.perf_counter()
    with console.status(Text(f"{doing} ...")) as spinner, compilation() as compiled:
        conversation = begin()
        spinner.update(Text("Preparing the answers: the first time with a model takes longest ..."))
        conversation.compile()
    line = f"{doing} took {time.perf_counter() - begun:.1f} s, {compiled.seconds:.1f} s of it compiling."
    console.print(line, style="dim", soft_wrap=True)
    return conversation


def told(conversation: Any, about: str) -> str:
    """One line: what a conversation is about, and what its cache holds."""
    return f"{about} · {_held(conversation)}"


def _turn(console: Console, conversation: Any, saved: Saved, line: str) -> Any:
    """The conversation after a line: a question, or a command."""
    command, _, name = line.partition(" ")
    match command, name.strip():
        case ("/full", ""):
            _show_full(console, conversation)
        case ("/stats", ""):
            console.print(_stats(conversation))
        case ("/help", ""):
            console.print(HELP)
        case ("/save" | "/load", ""):
            raise ValueError(f"{command} needs a file, such as {command} talk.ckv.")
        case ("/save", file):
            conversation.save(Path(file).expanduser())
            console.print(f"{_size(Path(file).expanduser())} written to {file}.", style="dim")
        case ("/load", file):
            conversation = opened(f"Loading {file}", saved(Path(file).expanduser()))
            console.print(told(conversation, file), style="dim")
        case _ if command.startswith("/"):
            raise ValueError(f"There is no {line}; /help lists what there is.")
        case _:
            _answer(console, conversation, line)
    return conversation


def _answer(console: Console, conversation: Any, question: str) -> None:
    """Say a question; the answer is shown as it comes, and below it what it took."""
    before = conversation.tokens
    with _showing() as (on_text, stopped):
        for piece in (pieces := conversation.say(question)):
            on_text(piece)
            if stopped():
                pieces.close()
    result = conversation.result
    again = " · read again: the cache was full" if before and result.stats.cached_tokens == [0] else ""
    console.print(f"{_held(conversation)} · {_seconds(result)}{again}", style="dim")


class _Stopped(Exception):
    """Ends a call of `generate`."""


def _show_full(console: Console, conversation: Any) -> None:
    """The last answer by the full cache."""
    from clusterkv_jax.generation import generate

    if not conversation.turns:
        raise ValueError("Nothing was asked yet that the full cache could answer.")
    with _showing("Reading all of it again ...") as (on_text, stopped), contextlib.suppress(_Stopped):

        def show(_: int, text: str) -> None:
            on_text(text)
            if stopped():
                raise _Stopped

        how = {"sampling": conversation.sampling, "seed": conversation.seed + conversation.turns - 1}
        how |= {"max_new_tokens": conversation.max_new_tokens, "on_text": show}
        result = generate(conversation.model, [conversation.prompt], method="full", **how)
    if stopped():
        return
    size = f"{result.stats.cache_bytes / 1e6:,.1f} MB"
    console.print(f"full cache · {size} · {_seconds(result)}", style="dim")


@contextmanager
def _showing(waiting: str = "...") -> Iterator[tuple[Callable[[str], None], Callable[[], bool]]]:
    """How to show text as it comes, and whether Ctrl-C was pressed; pressed twice it ends the command.

    A spinner stands in the place of the first text. Warnings are lines.
    """
    pressed, spinner, first = [], plain_console(stderr=True).status(waiting), True

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    def on_text(text: str) -> None:
        nonlocal first
        spinner.stop()
        sys.stdout.write(text.lstrip() if first else text)
        sys.stdout.flush()
        first = first and not text.strip()

    before = signal.signal(signal.SIGINT, note)
    try:
        with warnings.catch_warnings(record=True) as said, spinner:
            yield on_text, lambda: bool(pressed)
        print(flush=True)
        for line in dict.fromkeys(str(warning.message) for warning in said):
            plain_console(stderr=True, highlight=False, soft_wrap=True).print(line, style="dim")
    finally:
        signal.signal(signal.SIGINT, before)


def _typed(console: Console) -> str | None:
    """A line without the blanks around it; None at the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines, and remembers them)
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        console.print("Ctrl-D or /quit ends the conversation.", style="dim")
        return ""


# --- what is told ---


def _held(conversation: Any) -> str:
    """What a cache holds, and what it takes with the room that it has, beside a full one with as much."""
    from clusterkv_jax.generation.results import full_bytes

    share = f"{conversation.rows:,.0f} of {conversation.tokens:,} rows"
    full, room = full_bytes(conversation.model, conversation.max_tokens), f"room for {conversation.max_tokens:,} tokens"
    return f"{share} · {room}: {conversation.nbytes / 1e6:,.1f} MB, a full cache {full / 1e6:,.1f}"


def _seconds(result: Any) -> str:
    """When the first token came, and how many there were; compiling apart where it took long."""
    stats, count = result.stats, len(result.tokens[0])
    seconds = stats.ttft_s + stats.tpot_s * (count - 1)
    told = f"first token after {stats.ttft_s:.2f} s, {count} tokens in {seconds:.2f} s"
    compiling = f" ({stats.compile_s:.1f} s of compiling)" if stats.compile_s > 1 else ""
    ends = {"length": " · cut by --max-new-tokens", "cancelled": " · stopped"}
    return f"{told}{compiling}{ends.get(result.finish_reasons[0], '')}"


def _stats(conversation: Any) -> str:
    """What /stats says."""
    tokens, rows = conversation.tokens, conversation.rows
    lines = [
        f"turns    {conversation.turns}",
        f"tokens   {tokens:,} of {conversation.max_tokens:,}; the last turn read {conversation.read_tokens:,}",
        f"rows     {rows:,.0f} of each head, {rows / max(tokens, 1):.1%} of the tokens",
        f"bytes    {_held(conversation).partition(' · ')[2]} MB",
        f"method   {type(conversation.method).__name__}",
    ]
    return "\n".join(lines)


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:,.1f} MB"
