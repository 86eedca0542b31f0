"""The Hugging Face hub: files from it and to it, and one sentence for what it refuses.

The cache, the token and HF_HUB_OFFLINE are huggingface_hub's own.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from clusterkv_jax.storage.schema import shown

CALIBRATION = "calibration.safetensors"
_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./+-]+))?")
_LOGIN = "log in with 'hf auth login', or set HF_TOKEN"


def parse(name: str, revision: str | None = None) -> tuple[str, str | None] | None:
    """Id and revision of "owner/name" or "owner/name@revision"; None for what is neither.

    Raises ValueError where a revision is named twice.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    if found[2] is not None and revision is not None:
        raise ValueError(f"One revision is needed, got {shown(repr(name))} and revision={shown(repr(revision))}.")
    return found[1], found[2] or revision


def snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """A local folder with the files of a repository that fit a pattern, at a branch, tag or commit.

    A pattern without a "/" fits in the root alone.

    Raises ValueError that ends a sentence: why the hub delivers nothing, and what helps.
    """
    from huggingface_hub import snapshot_download

    try:
        # Some repositories hold the same weights again in a folder, in their authors' own layout.
        outside = [] if any("/" in pattern for pattern in patterns) else ["*/*"]
        folder = snapshot_download(repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=outside)
    except Exception as error:  # its client for HTTP has errors of its own
        raise ValueError(f"{_reason(error, repo, revision)}.") from error
    return Path(folder)


def upload(file: Path, repo: str, *, revision: str | None = None, private: bool = False) -> str:
    """Put a file into a model's repository, which is made if need be; returns the address of the commit.

    Raises ValueError, in one sentence that says what helps.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        return str(api.upload_file(path_or_fileobj=file, path_in_repo=file.name, repo_id=repo, revision=revision))
    except Exception as error:
        reason = _reason(error, repo, revision)
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            reason = f"it takes no files from you; {_LOGIN} to a token that may write there"
        raise ValueError(f"The hub did not take {file.name} for {repo}: {reason}.") from error


def check_login(option: str) -> None:
    """Raise ValueError where nobody is logged in, before hours of work that are to be uploaded."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ValueError(f"{option} needs the hub's token: {_LOGIN}.")


def _reason(error: Exception, repo: str, revision: str | None) -> str:
    """Why the hub refuses, and what helps, as the end of a sentence."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"it is gated; accept its licence at {constants.ENDPOINT}/{repo}, then {_LOGIN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no {repo}, or it is private; if it is, {_LOGIN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no branch, tag or commit {shown(repr(revision))}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set, and not all of it is in the cache {constants.HF_HUB_CACHE}"
        if not isinstance(error.__cause__, errors.HfHubHTTPError):
            return f"no network reaches it, and not all of it is in the cache {constants.HF_HUB_CACHE}"
        error = error.__cause__
    return shown(next(iter(str(error).strip().splitlines()), type(error).__name__))
