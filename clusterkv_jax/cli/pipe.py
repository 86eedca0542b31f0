"""`clusterkv generate --prompt-file -`, gated: a pipe is read as it comes, and may never end.

Ctrl-C, or the end of the pipe, ends the text, and questions are answered from what was kept of it. What is kept goes to
a file now and then, so that a process that is killed leaves what it has saved last.
"""

import math
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from clusterkv_jax.cli.answers import MethodRun
from clusterkv_jax.cli.read import Opened, Reading, ask, encoded
from clusterkv_jax.cli.terminal import plain_console

ROOM = 512  # tokens of a question and its answer, where those that are asked need no more
PART = 2**16  # bytes that are taken from the pipe at once, at most


def comes_in_a_pipe(
    prompt_file: Sequence[str], reading: str, methods: Sequence[str], budgets: Mapping[str, Any], asks: bool
) -> bool:
    """Whether a text can be read as it comes: once, under a number of rows, and to be asked or saved."""
    fixed = len(budgets) == 1 and all(budget.ratio is None for budget in budgets.values())
    return list(prompt_file) == ["-"] and reading == "gated" and len(methods) == 1 and fixed and asks


def check_save(save: Path | None, *, comes: bool) -> None:
    """Raise ValueError for a --save that cannot be."""
    if save is not None and not comes:
        raise ValueError(
            "--save is for a text that is read as it comes: --prompt-file - --reading gated, one --method and a "
            "number of rows, --cache-tokens."
        )
    if save is not None and not save.parent.is_dir():
        raise ValueError(f"The folder {save.parent} does not exist; make it before a cache is saved there.")


def answer_pipe(
    opened: Opened,
    how: Reading,
    gate: Any,
    questions: list[str],
    options: Mapping[str, Any],
    slots: int,
    save: Path | None,
    every: float,
    *,
    quiet: bool,
) -> list[MethodRun]:
    """Read standard input to its end and answer what is asked, of the file that is left.

    Args:
        opened: the model, the method, and how texts are read.
        how: the same as files have it.
        gate: window and chunk.
        questions: none only reads.
        options: those of `Engine.add`.
        slots: most answers written together.
        save: the file that is left; None leaves none.
        every: seconds between two files.
        quiet: whether nothing is said of it.
    """
    positions, asked = opened[0].config.max_positions, encoded(opened[0], "x", questions or ["?"], opened[3])[1]
    longest, new = max(map(len, asked)), options["max_new_tokens"]
    if longest + new + gate.window > positions:
        raise ValueError(
            f"A window of {gate.window} tokens, a question of {longest} and {new} new ones exceed the model's "
            f"{positions:,} positions."
        )
    room = max(longest + new, min(ROOM, positions // 4))
    how = replace(how, tokens=positions - room, room=room)  # slots that are as large have room for any text
    with tempfile.TemporaryDirectory() as folder:
        file = save or Path(folder) / "text.ckv"
        how = _read(opened, how, gate, options["seed"], file, math.inf if save is None else every, quiet=quiet)
        return [ask(file, opened, how, questions, options, slots, quiet=quiet)] if questions else []


def _read(opened: Opened, how: Reading, gate: Any, seed: int, file: Path, every: float, *, quiet: bool) -> Reading:
    """Read standard input to its end, with a file now and then, and one of all of it; how that one was read."""
    from clusterkv_jax import saving
    from clusterkv_jax.generation.gated_stream import kept, open_stream, read_on

    network, name, method, reading = opened
    console = plain_console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    stream, begun = open_stream(network, method, gate, reserve=how.room, seed=seed), time.monotonic()
    due, saved = -math.inf if math.isfinite(every) else math.inf, 0
    waiting: list[int] = []

    def save(how: Reading) -> None:
        saving.save(file, kept(stream), network.config, method, origin=asdict(how))

    with console.status(Text(f"{name}: reading standard input ...")) as line, _standard_input() as parts:
        for tokens, end in _tokens(network, parts, reading):
            how, waiting = replace(how, end=end), waiting + tokens
            while len(waiting) >= (count := stream.wanted):
                stream, waiting = read_on(stream, waiting[:count]), waiting[count:]
                if time.monotonic() >= due:
                    save(replace(how, end=""))  # the text that was read may end anywhere
                    due, saved = time.monotonic() + every, stream.tokens
                line.update(Text(_said(name, stream.tokens, time.monotonic() - begun, saved)))
        stream = read_on(stream, waiting) if waiting else stream
        save(how)
    console.print(Text(_said(name, stream.tokens, time.monotonic() - begun, 0)), style="dim")
    return how


def _said(name: str, tokens: int, seconds: float, saved: int) -> str:
    """One line of how far the text has been read."""
    last = f", {saved:,} of them saved" if saved else ""
    return f"{name}: {tokens:,} tokens read, {tokens / max(seconds, 1e-3):,.0f} a second{last}"


def _tokens(network: Any, parts: Iterator[bytes], reading: Mapping[str, Any]) -> Iterator[tuple[list[int], str]]:
    """The tokens of a text as they come, those that stand before it first, and its last two letters so far."""
    from clusterkv_jax.text.pieces import next_tokens, text_pieces

    options, end = {"split_special_tokens": not reading["special_tokens"]}, ""
    for piece in text_pieces(parts):
        if end:
            tokens = next_tokens(network.tokenizer, piece, **options)
        else:
            tokens = encoded(network, piece, ["?"], reading)[0][0]
        end = (end + piece)[-2:]
        yield tokens, end
    if not end:
        raise ValueError("The prompt is empty; give a text of at least one token.")


@contextmanager
def _standard_input() -> Iterator[Iterator[bytes]]:
    """Its parts as they come, to its end or until Ctrl-C; pressed again, that ends the command."""
    if sys.stdin is None:
        raise ValueError("Standard input is closed; name a prompt file.")
    pressed, waits = False, False
    stream: Any = sys.stdin.buffer

    def note(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed or waits:
            pressed = True
            raise KeyboardInterrupt
        pressed = True

    def parts() -> Iterator[bytes]:
        nonlocal waits
        while not pressed:
            try:
                waits = True
                part = stream.read1(PART)
            except KeyboardInterrupt:
                return
            finally:
                waits = False
            if not part:
                return
            yield part

    before = signal.signal(signal.SIGINT, note)
    try:
        yield parts()
    finally:
        signal.signal(signal.SIGINT, before)
