"""A process that ends anywhere: killed, without room for its files, or on a small disk."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from clusterkv_jax.cli.terminal import one_sentence_errors

PAGE = resource.getpagesize()


@dataclass(frozen=True)
class Stop:
    """What ends a process: seconds, the number of a call in the folder, or a byte that no file may go beyond."""

    seconds: float | None = None
    call: int | None = None
    byte: int | None = None


@dataclass(frozen=True)
class End:
    """How a process ended: its exit code (-9 if killed), what it said, and when it touched the folder."""

    code: int
    said: str
    touched: tuple[float, ...]


def run(work: Callable[[], Any], folder: Path, scratch: Path, stop: Stop | None = None) -> End:
    """`work` in a fork of this process, which has imported everything and started nothing of jax."""
    stop, begin = stop or Stop(), time.monotonic()
    process = os.fork()
    if process == 0:
        _be_the_child(work, folder, scratch, stop)
    if stop.seconds is not None:
        time.sleep(max(0.0, begin + stop.seconds - time.monotonic()))
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    touched = tuple(float(line) - begin for line in (scratch / "touched").read_text().split())
    return End(os.waitstatus_to_exitcode(status), (scratch / "said").read_text(errors="replace"), touched)


def _be_the_child(work: Callable[[], Any], folder: Path, scratch: Path, stop: Stop) -> None:
    """Ends this process, whatever `work` does."""
    code = 1
    try:
        said = os.open(scratch / "said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        touched = os.open(scratch / "touched", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(said, stream)
        count = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if not any(isinstance(x, str | os.PathLike) and str(x).startswith(str(folder)) for x in arguments):
                return
            os.write(touched, f"{time.monotonic()}\n".encode())
            count += 1
            if count == stop.call:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        if stop.byte is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (stop.byte, resource.RLIM_INFINITY))
        try:
            with one_sentence_errors(False):
                work()
            code = 0
        except typer.Exit as end:
            code = end.exit_code
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


# --- disks in memory ---


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """A disk in memory, mounted at the folder."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def resize(folder: Path, pages: int) -> None:
    """Another size for a mounted disk."""
    subprocess.run(["mount", "-o", f"remount,size={pages * PAGE}", folder], check=True)


def may_mount(folder: Path) -> bool:
    """Whether this process may mount a disk in memory."""
    try:
        with disk(folder):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
