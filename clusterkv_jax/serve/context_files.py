"""Contexts in a folder, which outlive their server: another one finds them by their content, now or after a restart.

A file's name is the key of its text, so that names alone say which of them a prompt begins with. It appears when it is
whole, and has the time of its last use; what is too old or too much goes. Beside the caches lie the messages of earlier
responses and of compacted conversations, by the names that clients have for them.
"""

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from clusterkv_jax.runtime.errors import shown
from clusterkv_jax.serve.text_keys import TextKey
from clusterkv_jax.storage.files import remove_left, write_whole

_CACHE = ".safetensors"
# What clients name: a response or a compacted conversation.
_NUMBER = re.compile(r"(resp_)?[0-9a-f]{1,64}")


@dataclass(frozen=True, eq=False)
class ContextFiles:
    """The files of servers of one model, method and room.

    Attributes:
        folder: where they lie.
        most_bytes: of all of them.
        most_age_s: seconds after its last use in which a file stays.
        turn: held by who writes a cache, one after the other.
        writes: what is being written, or waits for it.
    """

    folder: Path
    most_bytes: int
    most_age_s: float
    turn: asyncio.Lock = field(repr=False, default_factory=asyncio.Lock)
    writes: set[asyncio.Task[None]] = field(repr=False, default_factory=set)


def open_files(parent: Path, made_for: str, most_bytes: int, most_age_s: float) -> ContextFiles:
    """The files in a folder for servers that this text tells from others. What killed ones have left half goes.

    Raises ValueError for a folder that does not exist.
    """
    if not parent.is_dir():
        raise ValueError(f"context_folder must be a folder that exists, got {shown(parent)}.")
    folder = parent / hashlib.sha256(made_for.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, exist_ok=True)
    remove_left(folder, ".*.part")
    files = ContextFiles(folder, most_bytes, most_age_s)
    prune(files)
    return files


def keys(files: ContextFiles) -> set[TextKey]:
    """Of all texts that have a file."""
    found = set[TextKey]()
    for entry in os.scandir(files.folder):
        letters, _, digest = entry.name.removesuffix(_CACHE).partition("-")
        if entry.name.endswith(_CACHE) and letters.isdecimal():
            found.add(TextKey(int(letters), digest))
    return found


def path_of(files: ContextFiles, key: TextKey) -> Path:
    """The file of a text."""
    return files.folder / f"{key.letters}-{key.digest}{_CACHE}"


def used(path: Path) -> None:
    """A file is used now."""
    with suppress(OSError):
        os.utime(path)


def prune(files: ContextFiles) -> None:
    """Remove files that nobody has used for long, and of the others those used longest ago, until there is room."""
    found = []
    for entry in os.scandir(files.folder):
        with suppress(FileNotFoundError):  # other servers remove files too
            if entry.is_file():
                found.append((entry.stat().st_mtime, entry.stat().st_size, Path(entry.path)))
    room, oldest = files.most_bytes, time.time() - files.most_age_s
    for when, size, path in sorted(found, reverse=True):
        room -= size
        if room < 0 or when < oldest:
            path.unlink(missing_ok=True)


def soon(files: ContextFiles, work: Coroutine[Any, Any, None]) -> None:
    """Do what writes, while others are served."""
    task = asyncio.get_running_loop().create_task(work)
    files.writes.add(task)
    task.add_done_callback(files.writes.discard)


async def all_written(files: ContextFiles, timeout_s: float) -> None:
    """Wait for what is being written, at most so many seconds."""
    if files.writes:
        await asyncio.wait(files.writes, timeout=timeout_s)


def write_messages(files: ContextFiles, number: str, messages: Sequence[Any]) -> None:
    """Write the messages of a response or a compacted conversation. Raises OSError where the disk is full."""
    write_whole(files.folder / f"{number}.json", msgspec.json.encode(messages).decode())


def read_messages(files: ContextFiles, number: str) -> list[Any] | None:
    """Messages that were written; None of what has no file."""
    path = files.folder / f"{number}.json"
    if not _NUMBER.fullmatch(number) or not path.is_file():
        return None
    used(path)
    return json.loads(path.read_text(encoding="utf-8"))
