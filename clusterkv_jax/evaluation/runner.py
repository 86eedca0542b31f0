"""Runs a suite through methods and budgets, and writes down every answer so that a kill loses nothing.

    results.jsonl   one line per example, appended and synced batch by batch; a torn last line is dropped and redone
    run.json        what was run: replaced whole, never half written

The batches of a run depend on its configuration alone, so a resumed run computes what an unbroken one would have. It
holds every line that it finds against the case that the line claims to answer.
"""

import hashlib
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from clusterkv_jax import schema
from clusterkv_jax.batch import QUESTION_STEP, bucket
from clusterkv_jax.evaluation import records
from clusterkv_jax.evaluation.records import NLL, RESULTS, RUN, Line, Record
from clusterkv_jax.evaluation.responses import Answer, Respond
from clusterkv_jax.evaluation.scoring import CHEAP, score
from clusterkv_jax.evaluation.tasks.cases import Case, Prompt
from clusterkv_jax.files import append_whole, write_whole
from clusterkv_jax.methods import Full, Method

Key = tuple[str, str, str]  # method, budget, example


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


@dataclass(frozen=True)
class _Asked:
    """A job of an entry, and whether its method answers it or, where the budget is impossible, the full cache."""

    entry: Entry
    job: Job
    compressed: bool


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
) -> list[Record]:
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
        ValueError: examples of one name, another configuration, another run on the folder, a line that is damaged or
            answers nothing that is asked, a budget possible for no prompt, or an answer without a score.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if len({job.case.id for job in jobs}) < len(jobs):
        raise ValueError("The suite names two examples alike, so their answers could not be told apart.")
    plan = [(entry, batch) for entry in entries for batch in _split(entry, jobs, batch_size, possible)]
    asked = {
        (entry.name, entry.budget, job.case.id): _Asked(entry, job, method == entry.method)
        for entry, (method, batch) in plan
        for job in batch
    }
    methods = {f"{entry.name}@{entry.budget}": repr(entry.method) for entry in entries}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RESULTS
    with _alone(folder):
        _open_run(folder, {**config, "methods": methods, "cases": _digest(jobs)}, about)
        answered = _answered(file, asked)
        on_lines(len(answered))
        for entry, (method, batch) in plan:
            keys = [(entry.name, entry.budget, job.case.id) for job in batch]
            if all(key in answered for key in keys):
                continue
            first = batch[0].case
            answers = respond(method, [job.prompt for job in batch], first.max_new_tokens, first.stop)
            fresh = {
                key: _line(asked[key], answer) for key, answer in zip(keys, answers, strict=True) if key not in answered
            }
            append_whole(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in fresh.values()))
            answered |= fresh
            on_lines(len(answered))
    return list(answered.values())


def _answered(file: Path, asked: Mapping[Key, _Asked]) -> dict[Key, Record]:
    """The lines there are, by what they answer; a torn last one is cut off the file.

    Raises ValueError that names the first line which answers nothing that is asked, or otherwise than it says.
    """
    if not file.exists():
        return {}
    records.cut_torn_line(file)
    answered: dict[Key, Record] = {}
    for where, line in records.read_answers(file):
        key = _key(line)
        if key in answered:
            raise ValueError(f"{where} answers {_named(key)} a second time; remove it and run again.")
        if key not in asked:
            raise ValueError(f"{where} answers {_named(key)}, which this run does not ask; choose another folder.")
        _check_claims(line, asked[key], where)
        answered[key] = line
    return answered


def _check_claims(line: Record, asked: _Asked, where: str) -> None:
    """Raise ValueError unless the line is of this case, and its output has its score."""
    case = asked.job.case
    truth = _claims(asked)
    if case.metric in CHEAP:
        truth["score"] = score(case.metric, line["output"], case.answers, case.classes)
    for name, value in truth.items():
        if line[name] != value:
            raise ValueError(
                f"{where} has the {name} {_brief(line[name])}, and it must be {_brief(value)}; remove it and run again."
            )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the folder: two runs that go on there would both answer what is missing."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"Another run is writing to {folder}; wait for it, or choose another folder.") from None


def join(folders: Sequence[Path]) -> tuple[Record, list[Record]]:
    """What runs of the same examples found, as one: its run.json, and its lines in the order of the folders.

    So that the methods of a long table can run on several devices, a folder each.

    Raises:
        ValueError: a folder without a run, runs of other examples, models or options, an answer that two runs hold, one
            of a method that its run does not name, or two that say different things about their example.
    """
    runs: list[Record] = []
    lines: dict[Key, Record] = {}
    said: dict[str, Record] = {}
    for folder in folders:
        if not (folder / RUN).exists() or not (folder / RESULTS).exists():
            raise ValueError(f"{folder} holds no run: {RUN} and {RESULTS} are needed.")
        runs.append(records.read_run(folder))
        for where, line in records.read_answers(folder / RESULTS):
            key = _key(line)
            if f"{key[0]}@{key[1]}" not in runs[-1]["config"]["methods"]:
                raise ValueError(f"{where} answers {_named(key)}, a method that {folder / RUN} does not name.")
            if key in lines:
                raise ValueError(f"{where} answers {_named(key)} a second time.")
            if line["metric"] == NLL and "position" not in line["facts"]:
                raise ValueError(f"{where}, field 'facts': A cross-entropy has a position ({_brief(line['facts'])}).")
            first = said.setdefault(line["id"], line)
            for name in ("prompt", "task", "metric", "tokens", "cut", "facts"):
                if line[name] != first[name]:
                    raise ValueError(
                        f"{where} has the {name} {_brief(line[name])}, and an earlier answer to {_brief(line['id'])} "
                        f"{_brief(first[name])}."
                    )
            lines[key] = line
    if not lines:
        raise ValueError(f"There are no answers in {', '.join(map(str, folders))}.")
    _check_alike(folders, [run["config"] for run in runs])
    if len({line["metric"] == NLL for line in said.values()}) > 1:
        raise ValueError("Perplexities and other scores do not make one table.")
    methods = {name: text for run in runs for name, text in run["config"]["methods"].items()}
    sessions = [session for run in runs for session in run["sessions"]]
    return {"config": {**runs[0]["config"], "methods": methods}, "sessions": sessions}, list(lines.values())


def _check_alike(folders: Sequence[Path], configs: Sequence[Record]) -> None:
    """Raise ValueError for runs that differ in more than their methods."""
    first = configs[0]
    for folder, config in zip(folders, configs, strict=True):
        for name in {**first, **config}:
            if name != "methods" and first.get(name) != config.get(name):
                raise ValueError(
                    f"{folders[0]} and {folder} differ in {name}: {_brief(first.get(name))} and "
                    f"{_brief(config.get(name))}."
                )


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


def _open_run(folder: Path, config: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write run.json, or add this session to it; another configuration is refused."""
    file = folder / RUN
    if not file.exists() and (folder / RESULTS).exists():
        raise ValueError(f"{folder} holds {RESULTS} without {RUN}; choose another folder.")
    settings = json.loads(json.dumps(config))
    run = records.read_run(folder, records.Begun) if file.exists() else {"config": settings, "sessions": []}
    ours, theirs = _flat(settings), _flat(run["config"])
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"{folder} holds a run with {name} = {_brief(theirs.get(name))}, not {_brief(ours.get(name))}; "
                "choose another folder, or give the same options."
            )
    sessions = [*run["sessions"], dict(about)]
    write_whole(file, json.dumps({"config": settings, "sessions": sessions}, indent=2, ensure_ascii=False) + "\n")


def _flat(config: Record) -> Record:
    """A configuration with its methods one by one."""
    methods = {f"methods {name}": text for name, text in config["methods"].items()}
    return {name: value for name, value in config.items() if name != "methods"} | methods


def _brief(value: Any) -> str:
    return textwrap.shorten(repr(value), 600, placeholder=" ...")


def _digest(jobs: Sequence[Job]) -> str:
    """Identifies all cases and their tokens."""
    text = "\n".join(f"{job.case.id} {job.prompt.sha} {job.case.max_new_tokens} {job.case.answers}" for job in jobs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _key(line: Record) -> Key:
    return line["method"], line["budget"], line["id"]


def _named(key: Key) -> str:
    return "{} with budget {} of example {}".format(*map(schema.shown, key))


def _claims(asked: _Asked) -> Record:
    """What a line says of the case that it answers."""
    case, prompt = asked.job.case, asked.job.prompt
    return {
        "method": asked.entry.name,
        "budget": asked.entry.budget,
        "task": case.task,
        "id": case.id,
        "prompt": prompt.sha,
        "metric": case.metric,
        "tokens": len(prompt.context),
        # LongBench's authors cut texts, before they are tokens of a prompt.
        "cut": prompt.cut + case.facts.get("cut", 0),
        "compressed": asked.compressed,
        "facts": dict(case.facts),
    }


def _line(asked: _Asked, answer: Answer) -> Record:
    case = asked.job.case
    if asked.job.prompt.continuation:
        points = -sum(answer.logprobs) / len(answer.logprobs)
    else:
        points = score(case.metric, answer.text, case.answers, case.classes)
    found = {"output": answer.text, "score": points, "rows": round(answer.rows, 2), "seconds": round(answer.seconds, 4)}
    line = _claims(asked) | found
    records.check_score(case.metric, points, f"The answer of {_named(_key(line))}")
    return {name: line[name] for name in Line.__annotations__}
