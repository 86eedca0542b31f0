"""run.json: what decides a run's results, and who ran it when. It is replaced whole, never half written.

A folder takes more methods, budgets and tasks later; all else must be as it was.
"""

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterkv_jax.evaluation import records
from clusterkv_jax.evaluation.batching import Job, MethodEntry
from clusterkv_jax.evaluation.records import PACKED, RESULTS, RUN, Record
from clusterkv_jax.storage.files import write_whole


def settings(
    config: Mapping[str, Any],
    jobs: Sequence[Job],
    entries: Sequence[MethodEntry],
    described: Callable[[Any], str] = repr,
) -> Record:
    """The configuration with its methods, and for each task (and length or position) a digest of its cases.

    `described` says what answers of a method depend on.
    """
    methods = {f"{entry.name}@{entry.budget}": described(entry.method) for entry in entries}
    by_task: dict[str, list[Job]] = {}
    for job in jobs:
        by_task.setdefault(records.group(job.case.task, job.case.facts), []).append(job)
    return {**config, "methods": methods, "cases": {task: _digest(group) for task, group in by_task.items()}}


def open_run(folder: Path, config: Mapping[str, Any], about: Mapping[str, Any]) -> Record:
    """Write run.json, or add this session, its methods and its tasks to it; the configuration of the whole folder.

    Raises ValueError for a folder whose settings are others, and for one of an earlier version.
    """
    file = folder / RUN
    if not file.exists() and (found := [name for name in (RESULTS, PACKED) if (folder / name).exists()]):
        raise ValueError(f"{folder} holds {found[0]} without {RUN}; choose another folder.")
    config = json.loads(json.dumps(config))
    run = records.read_run(folder, records.Begun) if file.exists() else {"config": config, "sessions": []}
    theirs = run["config"]
    if isinstance(theirs["cases"], str):
        raise ValueError(
            f"{folder} holds a run of an earlier version, which can be joined and compared but not go on; choose "
            "another folder."
        )
    for name in {**theirs, **config}:
        if name not in ("methods", "cases"):
            _check_same(folder, name, theirs.get(name), config.get(name))
    for name, text in config["methods"].items():
        _check_same(folder, f"methods {name}", theirs["methods"].get(name, text), text)
    for task, digest in config["cases"].items():
        _check_same(folder, "cases", {task: theirs["cases"].get(task, digest)}, {task: digest})
    whole = {**config, **{name: {**theirs[name], **config[name]} for name in ("methods", "cases")}}
    _write(file, {"config": whole, "sessions": [*run["sessions"], dict(about)]})
    return whole


def close_run(folder: Path, took: Record) -> None:
    """Add to this session's entry in run.json what it took."""
    run = records.read_run(folder, records.Begun)
    _write(folder / RUN, {**run, "sessions": [*run["sessions"][:-1], {**run["sessions"][-1], **took}]})


def brief(value: Any) -> str:
    """A value in a sentence."""
    return textwrap.shorten(repr(value), 600, placeholder=" ...")


def _check_same(folder: Path, name: str, theirs: Any, ours: Any) -> None:
    if theirs != ours:
        raise ValueError(
            f"{folder} holds a run with {name} = {brief(theirs)}, not {brief(ours)}; choose another folder, or give "
            "the same options."
        )


def _write(file: Path, run: Record) -> None:
    write_whole(file, json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def _digest(jobs: Sequence[Job]) -> str:
    """Identifies cases and their tokens."""
    text = "\n".join(f"{job.case.id} {job.prompt.sha} {job.case.max_new_tokens} {job.case.answers}" for job in jobs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
