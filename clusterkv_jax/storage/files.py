"""Files and folders that are whole or not there, whenever a process is killed and wherever the disk is full.

What is written lies in a folder of its own beside its place, `.NAME.part`, and is moved from there when it is whole. A
killed process leaves that folder; the next one that writes the same file removes it. A lock in it keeps others away.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath

from filelock import FileLock, Timeout

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path: the file or folder that the block makes there takes the place of `path` when the block ends.

    A block that fails leaves `path` as it was, and nothing beside it. A folder takes a free place only.

    Raises:
        ValueError: if another process is writing to `path`.
        OSError: one sentence that names `path`, if the system refuses to write it.
    """
    folder = path.with_name(f".{path.name}.part")
    with naming(path):
        folder.mkdir(exist_ok=True)
        with alone(folder, path):
            temporary = folder / "new"
            try:
                _clear(folder)
                yield temporary
                if temporary.is_file():
                    with temporary.open("rb") as stream:
                        os.fsync(stream.fileno())
                temporary.replace(path)
            finally:
                # The lock goes with its folder, while it is held: whoever waits for it finds that it is gone.
                shutil.rmtree(folder, ignore_errors=True)


def own_folder(parent: Path, prefix: str) -> tuple[Path, FileLock]:
    """A new folder that is this process's alone while it holds the lock; what the dead left under the prefix goes."""
    remove_left(parent, f"{prefix}*")
    new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    lock = FileLock(new / "lock")
    lock.acquire()
    # Under this name others see it, and that it is locked.
    return new.rename(new.with_name(new.name[1:])), lock


def remove_left(parent: Path, pattern: str) -> None:
    """Remove folders that dead processes have left: those that nobody holds the lock of."""
    for left in parent.glob(pattern):
        with suppress(Timeout, OSError), FileLock(left / "lock", timeout=0):
            shutil.rmtree(left, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a text file at once: a reader sees the old text or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_whole(path: Path, text: str) -> None:
    """Append to a text file and wait until the disk has it. Where that fails, the file is as it was."""
    with naming(path):
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as stream:
                stream.write(text.encode("utf-8"))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            os.truncate(path, size)
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What the system says against writing to `path` in the block, as one sentence that names it, in an OSError."""
    try:
        yield
    except Exception as error:
        number = _number(error)
        if number is None:
            raise
        reason = "the disk is full" if number in _FULL else os.strerror(number)
        sentence = OSError(f"{path} could not be written: {reason}.")
        sentence.errno = number
        raise sentence from error


def _number(error: Exception) -> int | None:
    """The system's number of an error; libraries in Rust and tensorstore give it at the end of their texts."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)|os_error_code='(\d+)'", str(error))
    return None if found is None else int(found[1] or found[2])


@contextmanager
def alone(folder: Path, path: PurePath) -> Iterator[None]:
    """Holds the lock of a folder in which `path` is made. Raises ValueError where another process holds it."""
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"Another process is writing {path}; wait for it, or choose another name.") from None


def _clear(folder: Path) -> None:
    """Remove what a killed process left beside its lock."""
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != "lock":
            left.unlink()
