"""Runs a suite through methods and budgets, and writes down every answer so that a kill loses nothing.

    results.jsonl   one line per example, appended and synced batch by batch; a torn last line is dropped and redone
    run.json        what was run: replaced whole, never half written

The batches of a run depend on its configuration alone, so a resumed run computes what an unbroken one would have.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from clusterkv_jax.batch import QUESTION_STEP, bucket
from clusterkv_jax.evaluation.responses import Answer, Respond
from clusterkv_jax.evaluation.scoring import score
from clusterkv_jax.evaluation.tasks.cases import Case, Prompt
from clusterkv_jax.files import append_whole, write_whole
from clusterkv_jax.methods import Full, Method

RESULTS, RUN = "results.jsonl", "run.json"
Line = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A row of the table: a method by its preset's name, its budget as given (a share or a number of rows)."""

    name: str
    budget: str
    method: Method


@dataclass(frozen=True)
class Job:
    """A case, the tokens it became, and its number in the suite."""

    number: int
    case: Case
    prompt: Prompt


def run(
    folder: Path,
    config: Mapping[str, Any],
    about: Mapping[str, Any],
    jobs: Sequence[Job],
    entries: Sequence[Entry],
    respond: Respond,
    *,
    batch_size: int = 16,
    possible: Callable[[Method, Prompt, int], bool] = lambda method, prompt, new: True,
    on_lines: Callable[[int], None] = lambda done: None,
) -> list[Line]:
    """Answer what is not answered yet; all lines, in the order of the file.

    Args:
        folder: of results.jsonl and run.json; made if it is not there.
        config: what decides the results; a folder that holds another configuration is refused.
        about: command, versions, commit: added to run.json's list of sessions.
        jobs: cases with their prompts.
        entries: methods with budgets.
        respond: what answers a batch (`engine.responder`).
        batch_size: most examples answered together.
        possible: whether a budget is possible for a prompt; where it is not, the full cache answers, and the line says
            so by `compressed` false.
        on_lines: called with the number of lines there are.

    Raises:
        ValueError: examples of one name, another configuration, another run on the folder, a damaged file, or a budget
            possible for no prompt.
    """
    if len({job.case.id for job in jobs}) < len(jobs):
        raise ValueError("The suite names two examples alike, so their answers could not be told apart.")
    plan = [(entry, batch) for entry in entries for batch in _split(entry, jobs, batch_size, possible)]
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        _open_run(folder, {**config, "cases": _digest(jobs)}, about)
        lines = read_lines(folder / RESULTS)
        finished = {_key(line) for line in lines}
        if len(finished) != len(lines):
            raise ValueError(f"{folder / RESULTS} holds an example twice; remove the file and run again.")
        on_lines(len(lines))
        for entry, (method, batch) in plan:
            missing = {job.number for job in batch if (entry.name, entry.budget, job.case.id) not in finished}
            if not missing:
                continue
            first = batch[0].case
            answers = respond(method, [job.prompt for job in batch], first.max_new_tokens, first.stop)
            fresh = [
                _line(entry, job, answer, method == entry.method)
                for job, answer in zip(batch, answers, strict=True)
                if job.number in missing
            ]
            append_whole(folder / RESULTS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in fresh))
            lines += fresh
            on_lines(len(lines))
    return lines


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the folder: two runs that go on there would both answer what is missing."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"Another run is writing to {folder}; wait for it, or choose another folder.") from None


def join(folders: Sequence[Path]) -> tuple[dict[str, Any], list[Line]]:
    """What runs of the same examples found, as one: its run.json, and its lines in the order of the folders.

    So that the methods of a long table can run on several devices, a folder each.

    Raises:
        ValueError: a folder without a run, runs of other examples, models or options, or an answer that two runs hold.
    """
    runs, lines = [], []
    for folder in folders:
        if not (folder / RUN).exists() or not (folder / RESULTS).exists():
            raise ValueError(f"{folder} holds no run: {RUN} and {RESULTS} are needed.")
        runs.append(json.loads((folder / RUN).read_text(encoding="utf-8")))
        lines += read_lines(folder / RESULTS)
    first = runs[0]["config"]
    for folder, run in zip(folders, runs, strict=True):
        for key in ({**first, **run["config"]}).keys() - {"methods"}:
            if first.get(key) != run["config"].get(key):
                raise ValueError(
                    f"{folders[0]} and {folder} differ in {key}: {first.get(key)!r} and {run['config'].get(key)!r}."
                )
    earlier: set[tuple[str, str, str]] = set()
    for line in lines:
        if _key(line) in earlier:
            raise ValueError("Two runs hold {} with budget {} of example {}.".format(*_key(line)))
        earlier.add(_key(line))
    methods = {name: text for run in runs for name, text in run["config"]["methods"].items()}
    sessions = [session for run in runs for session in run["sessions"]]
    return {"config": {**first, "methods": methods}, "sessions": sessions}, lines


# --- batches ---


def batches(jobs: Sequence[Job], size: int) -> Iterator[list[Job]]:
    """Jobs that share programs and contexts, `size` at a time: of equal buckets, new tokens and stops."""

    def kind(job: Job):
        prompt, case = job.prompt, job.case
        return (
            bool(prompt.continuation),
            case.max_new_tokens,
            case.stop,
            bucket(len(prompt.context), 64),
            bucket(len(prompt.question), QUESTION_STEP) if prompt.question else 0,
            bucket(len(prompt.continuation), 16) if prompt.continuation else 0,
        )

    first: dict[tuple[int, ...], int] = {}
    for job in jobs:
        first.setdefault(job.prompt.context, job.number)
    ordered = sorted(jobs, key=lambda job: (kind(job), first[job.prompt.context], job.number))
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or end - start == size or kind(ordered[end]) != kind(ordered[start]):
            yield ordered[start:end]
            start = end


def _split(
    entry: Entry, jobs: Sequence[Job], size: int, possible: Callable[[Method, Prompt, int], bool]
) -> Iterator[tuple[Method, list[Job]]]:
    """The entry's batches, those that its budget is impossible for with the full cache."""
    fits = [possible(entry.method, job.prompt, job.case.max_new_tokens) for job in jobs]
    if not any(fits):
        lengths = [len(job.prompt.context) for job in jobs]
        raise ValueError(
            f"{entry.name} with budget {entry.budget} is impossible for every prompt; they have {min(lengths)} to "
            f"{max(lengths)} tokens."
        )
    for method, is_method in ((entry.method, True), (Full(), False)):
        for batch in batches([job for job, fit in zip(jobs, fits, strict=True) if fit is is_method], size):
            yield method, batch


# --- files ---


def read_lines(file: Path) -> list[Line]:
    """The lines of a results file; a torn last one is cut off the file."""
    if not file.exists():
        return []
    raw = file.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        with file.open("rb+") as opened:
            opened.truncate(whole)
    return parse_lines(raw, file)


def parse_lines(raw: bytes, file: Path) -> list[Line]:
    """The whole lines of a file's bytes; a torn last one is left out."""
    lines = []
    for number, text in enumerate(raw[: raw.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1], 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"Line {number} of {file} is damaged ({error}); remove it and run again.") from error
    return lines


def _open_run(folder: Path, config: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write run.json, or add this session to it; another configuration is refused."""
    file = folder / RUN
    settings = json.loads(json.dumps(config))
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"config": settings, "sessions": []}
    if not file.exists() and (folder / RESULTS).exists():
        raise ValueError(f"{folder} holds {RESULTS} without {RUN}; choose another folder.")
    for key in {**record["config"], **settings}:
        if record["config"].get(key) != settings.get(key):
            raise ValueError(
                f"{folder} holds a run with {key} = {record['config'].get(key)!r}, not {settings.get(key)!r}; "
                "choose another folder, or give the same options."
            )
    sessions = [*record["sessions"], dict(about)]
    write_whole(file, json.dumps({"config": settings, "sessions": sessions}, indent=2, ensure_ascii=False) + "\n")


def _digest(jobs: Sequence[Job]) -> str:
    """Identifies all cases and their tokens."""
    text = "\n".join(f"{job.case.id} {job.prompt.sha} {job.case.max_new_tokens} {job.case.answers}" for job in jobs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _key(line: Line) -> tuple[str, str, str]:
    return line["method"], line["budget"], line["id"]


def _line(entry: Entry, job: Job, answer: Answer, compressed: bool) -> Line:
    case = job.case
    if job.prompt.continuation:
        points = -sum(answer.logprobs) / len(answer.logprobs)
    else:
        points = score(case.metric, answer.text, case.answers, case.classes)
    return {
        "method": entry.name,
        "budget": entry.budget,
        "task": case.task,
        "id": case.id,
        "prompt": job.prompt.sha,
        "output": answer.text,
        "metric": case.metric,
        "score": points,
        "rows": round(answer.rows, 2),
        "tokens": len(job.prompt.context),
        # LongBench's authors cut texts, before they are tokens of a prompt.
        "cut": job.prompt.cut + case.facts.get("cut", 0),
        "compressed": compressed,
        "seconds": round(answer.seconds, 4),
        "facts": dict(case.facts),
    }
