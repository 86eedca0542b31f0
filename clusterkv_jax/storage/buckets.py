"""Places that are folders of this machine or `gs://` addresses of a bucket, which etils reads and writes.

An object of a bucket is whole or not there, as `files` makes a file. It cannot grow, and a bucket has no locks: what
takes either happens in a working folder on this machine, and is copied.
"""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import platformdirs

from clusterkv_jax.runtime.extras import library
from clusterkv_jax.storage.schema import MIB, AnyPath, shown

SCHEME = "gs://"
# The longest that a bucket may take to say something at all; its client would try for a minute.
PATIENCE_S = 20


def place(name: str | os.PathLike[str]) -> AnyPath:
    """A path of this machine, or one of a bucket, which has pathlib's methods.

    Raises ValueError for an address of another kind, one that names no bucket, and where etils is missing; OSError for
    a bucket that says nothing.
    """
    text = os.fspath(name)
    if not text.startswith(SCHEME):
        if "://" in text:
            raise ValueError(f"A folder or a gs:// address is needed, got {shown(text)}.")
        return Path(text).expanduser()
    bucket = text.removeprefix(SCHEME).strip("/").split("/")[0]
    if not bucket:
        raise ValueError(f"A bucket and a folder follow gs://, got {shown(text)}.")
    found = library("etils.epath", text, "pods").Path(text)
    _wait_for(type(found)(SCHEME + bucket))
    return found


@cache
def _wait_for(bucket: AnyPath) -> None:
    """Raises OSError where a bucket says nothing, be it an error, in time; once for each."""
    for name in ("gcsfs", "google.auth"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say is in the errors they raise
    asking = threading.Thread(target=_ask, args=(bucket,), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    if asking.is_alive():
        raise OSError(f"{bucket} does not answer within {PATIENCE_S} s; check its name and the network.")


def _ask(bucket: AnyPath) -> None:
    with suppress(Exception):  # an answer, too; whoever reads says what is wrong
        bucket.exists()


def working_folder(address: AnyPath) -> Path:
    """Where this machine prepares what goes to an address: a folder of the user's cache."""
    digest = hashlib.sha256(str(address).rstrip("/").encode()).hexdigest()[:16]
    return platformdirs.user_cache_path("clusterkv_jax", appauthor=False) / "buckets" / f"{address.name}-{digest}"


def there(path: AnyPath) -> bool:
    """Whether a file or folder is there. Raises OSError where the bucket cannot be reached."""
    with answering(path):
        return path.exists()


def copied(source: AnyPath, target: AnyPath) -> None:
    """Copy a file to or from a bucket. Raises OSError, in one sentence that names the address."""
    address = source if isinstance(target, Path) else target
    with answering(address), source.open("rb") as stream, target.open("wb") as other:
        shutil.copyfileobj(stream, other, MIB)


@contextmanager
def answering(address: AnyPath) -> Iterator[None]:
    """What a bucket's client says in the block, as one sentence that names the address, in an OSError."""
    try:
        yield
    except Exception as error:  # each client has errors of its own
        raise OSError(f"{address} cannot be reached: {shown(str(error) or type(error).__name__)}.") from error
