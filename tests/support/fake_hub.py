"""A hub without a network: repositories are folders, and what is asked for goes into a cache like huggingface_hub's."""

import fnmatch
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
from huggingface_hub import errors

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`repos[id][revision]` is a folder; `calls` are the files that each download asked for."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.calls = cache, []
        self.repos: dict[str, dict[str, Path]] = {}

    def snapshot_download(self, repo_id: str, *, revision: Any, allow_patterns: Any, ignore_patterns: Any) -> str:
        revisions = self.repos.get(repo_id)
        if revisions is None:
            raise refusal(errors.RepositoryNotFoundError, 404)
        names = {Path(folder).name: folder for folder in revisions.values()}
        source = {**revisions, **names}.get(revision or "main")
        if source is None:
            raise refusal(errors.RevisionNotFoundError, 404)
        target = self.cache / repo_id / source.name
        target.mkdir(parents=True, exist_ok=True)
        files = [str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()]
        self.calls.append(
            sorted(
                file
                for file in files
                if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns)
                and not any(fnmatch.fnmatch(file, pattern) for pattern in ignore_patterns)
            )
        )
        for file in self.calls[-1]:
            shutil.copyfile(source / file, target / file)
        return str(target)


def refusal(kind: Any, status: int, text: str = "Client Error.\n\nNot Found for url: x") -> Exception:
    """An error as huggingface_hub raises it."""
    return kind(text, response=SimpleNamespace(status_code=status, headers={}, request=None))


def fake_hub(monkeypatch: Any, cache: Path) -> FakeHub:
    """One in the place of huggingface_hub's."""
    hub = FakeHub(cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def cached(cache: Path, repo_id: str, source: Path, revisions: tuple[str, ...] = ("main",)) -> Path:
    """A folder as huggingface_hub keeps what it has downloaded: snapshots that link to blobs, and refs to them."""
    home = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    for folder in (snapshot, home / "blobs", home / "refs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copyfile(file, home / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    for revision in revisions:
        (home / "refs" / revision).write_text(COMMIT)
    return snapshot
