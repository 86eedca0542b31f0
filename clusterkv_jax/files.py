"""Files that are whole or not there: written beside their place, then renamed into it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`. What the block writes there takes the place of `path` at once when it ends.

    A block that fails leaves `path` as it was, and nothing beside it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a text file at once: a reader sees the old text or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
