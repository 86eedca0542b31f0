"""What holds for every input: a result, or one sentence, in bounded time and memory."""

import contextlib
import faulthandler
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax.text.chat import cut_turn
from clusterkv_jax.text.tokenizer import decode, encode

# A value that is wrong may be long; what is said of it is not.
LONGEST = 2000
SECONDS, BYTES = 10, 2**30
STATUS = Path("/proc/self/status")


class TooLong(BaseException):
    """Not an Exception, so that nothing on the way takes it for bad input."""


def one_sentence(
    call: Callable[[], Any],
    *,
    allowed: tuple[type[Exception], ...] = (ValueError,),
    says: Sequence[str] = (),
    seconds: float = SECONDS,
) -> tuple[Any, str | None]:
    """The result of `call()` and None, or None and the sentence with which it refuses.

    AssertionError if it ends with an error that is not allowed, says no sentence, leaves out one of `says`, or takes
    more than `seconds` or a gigabyte.
    """
    try:
        with bounded(seconds):
            return call(), None
    except allowed as error:
        text = str(error)
        check_sentence(text, says)
        return None, text
    except TooLong:
        raise AssertionError(f"still running after {seconds} s") from None
    except MemoryError as error:
        raise AssertionError("took more than a gigabyte") from error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead of a sentence: {error}") from error


def check_sentence(text: str, says: Sequence[str] = ()) -> None:
    """One line that begins as a sentence or with a name, ends with a full stop, and holds each of `says`."""
    assert text == text.strip(), f"no sentence: {text[:LONGEST]!r}"
    assert text.endswith("."), f"no sentence: {text[:LONGEST]!r}"
    assert "\n" not in text, f"several lines: {text[:LONGEST]!r}"
    assert len(text) <= LONGEST, f"{len(text)} letters: {text[:200]!r} ..."
    for part in says:
        assert part in text, f"{part!r} is not in {text!r}"


def read(place: Any) -> Any:
    """What a command does with a model before it computes anything."""
    model = ckv.load(place)
    if model.tokenizer is not None:
        tokens = encode(model.tokenizer, "a text", add_special_tokens=True)
        assert isinstance(decode(model.tokenizer, tokens), str)
        if getattr(model.tokenizer, "chat_template", None):
            cut_turn(model.tokenizer, "A text.", "Who?")
    return model


def command(arguments: Sequence[Any], *, says: Sequence[str] = (), seconds: float = SECONDS) -> str:
    """What the `clusterkv` command refuses with exit code 2, which is one sentence; "" where it does its work.

    Called in this process, with --debug: what is no ValueError and no OSError would be hidden without it.
    """
    from clusterkv_jax.cli import app

    def call() -> Any:
        result = CliRunner().invoke(app, [*map(str, arguments), "--debug"])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    result, said = one_sentence(call, allowed=(ValueError, OSError), says=says, seconds=seconds)
    assert said is not None or result.exit_code in (0, 2), (result.exit_code, result.output)
    return said or (result.stderr if result.exit_code else "")


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """TooLong after `seconds`, and MemoryError for a gigabyte more than there was; a loop in C ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(10 * seconds, exit=True)
    try:
        with _a_gigabyte():
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _a_gigabyte() -> Iterator[None]:
    """Linux counts what a process may write to; elsewhere memory is not bounded."""
    if not STATUS.exists():
        yield
        return
    import resource

    used = next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmData"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = 1024 * used + BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
