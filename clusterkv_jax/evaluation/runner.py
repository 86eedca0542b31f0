"""Runs a suite through methods and budgets, and writes down every answer so that a kill loses nothing.

    results.jsonl   one line per example, appended and synced as answers come; a torn last line is dropped and redone
    run.json        what was run: replaced whole, never half written (see `settings`)

A folder takes more methods, budgets and tasks of the same run later: what it holds already is not asked again, and what
is not asked this time stays.

The batches of a run depend on its configuration alone (see `batching`), and no text depends on what else is asked, so a
resumed run computes what an unbroken one would have. It holds every line that it finds against the case that the line
claims to answer.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from clusterkv_jax.evaluation import records
from clusterkv_jax.evaluation.batching import AnswerKey, EvaluationBatch, Job, MethodEntry
from clusterkv_jax.evaluation.records import NLL, RESULTS, RUN, Record, ResultLine
from clusterkv_jax.evaluation.responses import Answers, Response
from clusterkv_jax.evaluation.scoring import CHEAP, score
from clusterkv_jax.evaluation.settings import brief, close_run, open_run
from clusterkv_jax.evaluation.tasks.cases import Case
from clusterkv_jax.storage import schema
from clusterkv_jax.storage.files import append_whole, write_whole


@dataclass(frozen=True)
class _Asked:
    """A job of an entry, and whether its method answers it or, where the budget is impossible, the full cache."""

    entry: MethodEntry
    job: Job
    compressed: bool


def record(
    folder: Path,
    config: Mapping[str, Any],
    about: Mapping[str, Any],
    batches: Sequence[EvaluationBatch],
    answers: Answers,
    *,
    writing: AbstractContextManager[Any] | None = None,
    on_lines: Callable[[int, int], None] = lambda lines, tokens: None,
) -> list[Record]:
    """Have what is not answered yet answered, in any order; all lines, those of earlier runs of the folder too.

    When all is answered, the lines stand in the order of run.json's methods, those of a method in that of its batches,
    and run.json says what this session took.

    Args:
        folder: of results.jsonl and run.json; made if it is not there.
        config: what decides the results, of `settings`; a folder that holds another one is refused, but for methods and
            tasks that it has not.
        about: command, versions, commit: added to run.json's list of sessions.
        batches: what is asked, of `plan`.
        answers: what answers those that are missing.
        writing: held while a line is written.
        on_lines: called with the number of lines there are, and of their tokens.

    Raises:
        ValueError: another configuration, another run on the folder, a line that is damaged or answers nothing that is
            asked, or an answer without a score.
    """
    writing = nullcontext() if writing is None else writing
    asked = {
        key: _Asked(batch.entry, job, batch.compressed)
        for batch in batches
        for key, job in zip(batch.keys, batch.jobs, strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    file, begin = folder / RESULTS, time.monotonic()
    with _alone(folder):
        with writing:
            whole = open_run(folder, config, about)
            records.unpack(folder)
            lines = _found(file, asked, config, whole)
        answered = [line for key, line in lines.items() if key in asked]
        count, tokens = len(answered), sum(line["tokens"] for line in answered)
        on_lines(count, tokens)
        missing = [part for batch in batches if (part := batch.without(lines)) is not None]
        for batch, found in answers(missing):
            fresh = {
                key: _line(asked[key], each) for key, each in zip(batch.keys, found, strict=True) if key not in lines
            }
            with writing:
                append_whole(file, _text(fresh.values()))
            lines |= fresh
            count, tokens = count + len(fresh), tokens + sum(line["tokens"] for line in fresh.values())
            on_lines(count, tokens)
        place = {name: number for number, name in enumerate(whole["methods"])}
        beside = [key for key in lines if key not in asked]
        ordered = {key: lines[key] for key in sorted([*beside, *asked], key=lambda key: place[_row(key)])}
        with writing:
            if list(ordered) != list(lines):
                write_whole(file, _text(ordered.values()))
            took = {"answers": count - len(answered), "seconds": round(time.monotonic() - begin, 1)}
            close_run(folder, took)
    return list(ordered.values())


def _text(lines: Iterable[Record]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _found(
    file: Path, asked: Mapping[AnswerKey, _Asked], config: Mapping[str, Any], whole: Record
) -> dict[AnswerKey, Record]:
    """The lines there are, by what they answer, of earlier runs of the folder too; a torn last one is cut off the file.

    Raises ValueError that names the first line which answers nothing that was ever asked, or otherwise than it says.
    """
    if not file.exists():
        return {}
    records.cut_torn_line(file)
    jobs = {each.job.case.id: each.job for each in asked.values()}
    lines: dict[AnswerKey, Record] = {}
    for where, line in records.read_answers(file):
        key = _key(line)
        if key in lines:
            raise ValueError(f"{where} answers {_named(key)} a second time; remove it and run again.")
        if key in asked:
            _check_claims(line, _claims(asked[key]), where)
            _check_score(line, asked[key].job.case, where)
        elif not _of_another_run(line, config, whole, jobs):
            raise ValueError(f"{where} answers {_named(key)}, which this run does not ask; choose another folder.")
        elif line["id"] in jobs:
            _check_claims(line, _of_case(jobs[line["id"]]), where)
        lines[key] = line
    return lines


def _of_another_run(line: Record, config: Mapping[str, Any], whole: Record, jobs: Mapping[str, Job]) -> bool:
    """Whether an earlier run of the folder asked this: its methods or its tasks are not all asked now."""
    group = records.group(line["task"], line["facts"])
    known = _row(_key(line)) in whole["methods"] and group in whole["cases"]
    return known and (line["id"] in jobs or group not in config["cases"])


def _check_score(line: Record, case: Case, where: str) -> None:
    """Raise ValueError unless the line's output has its score, where that is quickly computed."""
    if case.metric in CHEAP:
        points = score(case.metric, line["output"], case.answers, case.classes)
        _check_claims(line, {"score": points}, where)


def _check_claims(line: Record, truth: Record, where: str) -> None:
    """Raise ValueError where the line says something else than the truth; lines of earlier versions say less."""
    for name, value in truth.items():
        if line.get(name, value) != value:
            raise ValueError(
                f"{where} has the {name} {brief(line[name])}, and it must be {brief(value)}; remove it and run again."
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
    lines: dict[AnswerKey, Record] = {}
    said: dict[str, Record] = {}
    for folder in folders:
        if not (folder / RUN).exists():
            raise ValueError(f"{folder} holds no run: {RUN} and {RESULTS} are needed.")
        runs.append(records.read_run(folder))
        for where, line in records.read_answers(records.results_file(folder)):
            key = _key(line)
            if f"{key[0]}@{key[1]}" not in runs[-1]["config"]["methods"]:
                raise ValueError(f"{where} answers {_named(key)}, a method that {folder / RUN} does not name.")
            if key in lines and (key[0] != "full" or folder in folders[: len(runs) - 1]):
                raise ValueError(f"{where} answers {_named(key)} a second time.")
            if line["metric"] == NLL and "position" not in line["facts"]:
                raise ValueError(f"{where}, field 'facts': A cross-entropy has a position ({brief(line['facts'])}).")
            first = said.setdefault(line["id"], line)
            for name in ("prompt", "task", "metric", "question", "expected", "tokens", "cut", "facts"):
                if line.get(name) != first.get(name):
                    raise ValueError(
                        f"{where} has the {name} {brief(line.get(name))}, and an earlier answer to "
                        f"{brief(line['id'])} {brief(first.get(name))}."
                    )
            lines.setdefault(key, line)  # every run asks the full cache; the first answer counts
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
                    f"{folders[0]} and {folder} differ in {name}: {brief(first.get(name))} and "
                    f"{brief(config.get(name))}."
                )


def _key(line: Record) -> AnswerKey:
    return line["method"], line["budget"], line["id"]


def _named(key: AnswerKey) -> str:
    return "{} with budget {} of example {}".format(*map(schema.shown, key))


def _row(key: AnswerKey) -> str:
    return f"{key[0]}@{key[1]}"


def _of_case(job: Job) -> Record:
    """What a line says of its example, whichever method answers."""
    case, prompt = job.case, job.prompt
    return {
        "task": case.task,
        "id": case.id,
        "prompt": prompt.sha,
        "question": case.question,
        "expected": list(case.answers),
        "metric": case.metric,
        "tokens": len(prompt.context),
        # LongBench's authors cut texts, before they are tokens of a prompt.
        "cut": prompt.cut + case.facts.get("cut", 0),
        "facts": dict(case.facts),
    }


def _claims(asked: _Asked) -> Record:
    """What a line says of what it answers."""
    entry = asked.entry
    return {"method": entry.name, "budget": entry.budget, "compressed": asked.compressed, **_of_case(asked.job)}


def _line(asked: _Asked, answer: Response) -> Record:
    case = asked.job.case
    if asked.job.prompt.continuation:
        points = -sum(answer.logprobs) / len(answer.logprobs)
    else:
        points = score(case.metric, answer.text, case.answers, case.classes)
    took = {"rows": round(answer.rows, 2), "cache_bytes": answer.cache_bytes, "seconds": round(answer.seconds, 4)}
    line = _claims(asked) | {"output": answer.text, "score": points} | took
    records.check_score(case.metric, points, f"The answer of {_named(_key(line))}")
    return {name: line[name] for name in ResultLine.__annotations__}
