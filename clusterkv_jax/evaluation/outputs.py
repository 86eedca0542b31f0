"""Where a run's files go: a folder of this machine, or one of a bucket, which gets them as they are written.

    results.jsonl            whole: what there was when a session began, and all of it when the run is complete
    results.jsonl.parts/N    lines that came since: the bytes of results.jsonl from byte N on
    run.json, table.md ...   as in a folder
    logs/process-K.log       of each process, when it ends

An object cannot grow, and a bucket refuses to have one replaced more than once a second, so new lines are objects of
their own. The bucket has all that is written; the working folder on this machine may be lost.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from clusterkv_jax.evaluation import records
from clusterkv_jax.evaluation.records import PACKED, RESULTS, RUN
from clusterkv_jax.storage.buckets import answering, copied, place, there, working_folder
from clusterkv_jax.storage.files import alone
from clusterkv_jax.storage.schema import AnyPath

# The longest that a process waits for its log to be in the bucket when it ends.
LOG_SECONDS = 2
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class Lost(OSError):
    """A bucket that has taken this session's files takes no more; a job that starts again may find it as it was."""


@dataclass
class Output:
    """A place for a run's files.

    Attributes:
        folder: of this machine, where they are written.
        address: of the bucket that gets them; None where the folder is all.
    """

    folder: Path
    address: AnyPath | None = None
    _sent: int = field(default=0, init=False)  # bytes of results.jsonl that are in the bucket
    _run: bytes = field(default=b"", init=False)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lets this process alone write here, and brings what the bucket has of earlier sessions.

        Raises ValueError where another process of this machine writes here, and OSError where no bucket answers.
        """
        if self.address is None:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone(self.folder.parent, self.address):
            for left in self.folder.iterdir():
                if left.is_file():
                    left.unlink()
            self._fetch(self.address)
            try:
                yield
            except ValueError as error:
                if str(self.folder) not in str(error):
                    raise
                raise ValueError(str(error).replace(str(self.folder), str(self.address))) from error

    def sending(self, lock: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """Holds the lock while a block writes, and until the bucket has what it wrote."""
        return lock if self.address is None else _Sending(self, lock)

    def complete(self) -> None:
        """All files are written: the bucket gets each of them as one object."""
        if self.address is None:
            return
        for file in sorted(self.folder.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                copied(file, self.address / file.name)
        self._remove_parts(self.address)

    def log(self, process: int) -> logging.Handler:
        """A handler for logs/process-K.log."""
        name = f"process-{process}.log"
        file = self.folder / "logs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.address is None:
            handler = logging.FileHandler(file, encoding="utf-8")
        else:
            _copied_if_there(self.address / "logs" / name, file)
            handler = _SentLog(file, self.address / "logs" / name)
        handler.setFormatter(logging.Formatter(_FORMAT))
        return handler

    # --- results.jsonl and its parts ---

    def _fetch(self, address: AnyPath) -> None:
        file = self.folder / RESULTS
        for name in (RESULTS, RUN):
            _copied_if_there(address / name, self.folder / name)
        if there(address / PACKED):
            raise ValueError(f"{address} holds {PACKED}, to which nothing can be added; unpack it.")
        parts = _parts(address)
        size = file.stat().st_size if file.exists() else 0
        for part in parts:
            begin = int(part.name)
            if begin > size:
                raise ValueError(f"{part} begins behind the {size} bytes of {RESULTS} there are; a part is missing.")
            if begin == size:  # a smaller one is in the whole already, of a session that ended before it was removed
                with answering(part), file.open("ab") as stream:
                    stream.write(part.read_bytes())
                size = file.stat().st_size
        if file.exists():
            records.cut_torn_line(file)
            if parts or file.stat().st_size < size:
                copied(file, address / RESULTS)
            self._sent = file.stat().st_size
        self._remove_parts(address)

    def send(self) -> None:
        """The bucket gets the lines that are new, as a part of their own, and run.json where it has changed.

        Raises ValueError where it has lines of another run, and OSError where it cannot be reached: `Lost` if it could.
        """
        if self.address is None:
            return
        try:
            self._send(self.address)
        except OSError as error:
            if self._run:
                raise Lost(str(error)) from error
            raise

    def _send(self, address: AnyPath) -> None:
        file, run = self.folder / RESULTS, self.folder / RUN
        if file.exists() and file.stat().st_size > self._sent:
            with file.open("rb") as stream:
                stream.seek(self._sent)
                lines = stream.read()
            part = _part(address, self._sent)
            if there(part):
                raise ValueError(f"Another run is writing to {address}; let one of them end, or choose another.")
            with answering(part):
                part.write_bytes(lines)
            self._sent += len(lines)
        if run.exists() and (now := run.read_bytes()) != self._run:
            copied(run, address / RUN)
            self._run = now

    def _remove_parts(self, address: AnyPath) -> None:
        for part in _parts(address):
            with answering(part):
                part.unlink()


class _Sending(AbstractContextManager[None]):
    def __init__(self, output: Output, lock: AbstractContextManager[Any]) -> None:
        self._output, self._lock = output, lock

    @override
    def __enter__(self) -> None:
        self._lock.__enter__()

    @override
    def __exit__(self, kind: Any, *error: Any) -> None:
        try:
            if kind is None:
                self._output.send()
        finally:
            self._lock.__exit__(kind, *error)


class _SentLog(logging.FileHandler):
    """A log that is copied when logging ends; a bucket that does not answer is not waited for."""

    def __init__(self, file: Path, address: AnyPath) -> None:
        super().__init__(file, encoding="utf-8")
        self._address = address

    @override
    def close(self) -> None:
        super().close()
        copy = threading.Thread(target=_tried, args=(Path(self.baseFilename), self._address), daemon=True)
        copy.start()
        copy.join(LOG_SECONDS)


def at(name: str | os.PathLike[str]) -> Output:
    """The place of a folder or a gs:// address. Raises ValueError for another kind of address."""
    found = place(name)
    return Output(found) if isinstance(found, Path) else Output(working_folder(found) / "files", found)


def _tried(file: Path, address: AnyPath) -> None:
    try:
        copied(file, address)
    except OSError as error:
        logging.getLogger(__name__).debug("%s", error)


def _copied_if_there(address: AnyPath, file: Path) -> None:
    if there(address):
        copied(address, file)


def _part(address: AnyPath, begin: int) -> AnyPath:
    """By the number of its first byte, so that parts stand in order in a listing."""
    return address / f"{RESULTS}.parts" / f"{begin:012d}"


def _parts(address: AnyPath) -> list[AnyPath]:
    with answering(address):
        try:
            return sorted((address / f"{RESULTS}.parts").iterdir(), key=lambda part: part.name)
        except FileNotFoundError:
            return []
