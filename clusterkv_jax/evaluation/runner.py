"""Runs a suite through methods and budgets, and writes down every answer so that a kill loses nothing.

    results.jsonl   one line per example, appended and synced as answers come; a torn last line is dropped and redone
    run.json        what was run: replaced whole, never half written

The batches of a run depend on its configuration alone (see `batching`), and no text depends on what else is asked, so a
resumed run computes what an unbroken one would have. It holds every line that it finds against the case that the line
claims to answer.
"""

import hashlib
import json
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from clusterkv_jax import schema
from clusterkv_jax.evaluation import records
from clusterkv_jax.evaluation.batching import Batch, Entry, Job, Key, plan
from clusterkv_jax.evaluation.records import NLL, RESULTS, RUN, Line, Record
from clusterkv_jax.evaluation.responses import Answer, Answers
from clusterkv_jax.evaluation.scoring import CHEAP, score
from clusterkv_jax.evaluation.tasks.cases import Prompt
from clusterkv_jax.files import append_whole, write_whole
from clusterkv_jax.methods import Method

# A batch's answers, by its method, prompts, most new tokens and stop strings.
Respond = Callable[[Method, Sequence[Prompt], int, Sequence[str]], Sequence[Answer]]


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
    on_lines: Callable[[int, int], None] = lambda lines, tokens: None,
) -> list[Record]:
    """Answer what is not answered yet, one batch after the other; all lines, in the order of the batches.

    Args:
        folder: of results.jsonl and run.json; made if it is not there.
        config: what decides the results; a folder that holds another configuration is refused.
        about: command, versions, commit: added to run.json's list of sessions.
        jobs: cases with their prompts.
        entries: methods with budgets.
        respond: what answers a batch.
        batch_size: most examples answered together.
        possible: whether a budget is possible for a prompt; where it is not, the full cache answers, and the line says
            so by `compressed` false.
        on_lines: called with the number of lines there are, and of their tokens.

    Raises:
        ValueError: examples of one name, another configuration, another run on the folder, a line that is damaged or
            answers nothing that is asked, a budget possible for no prompt, or an answer without a score.
    """
    batches = plan(jobs, entries, batch_size, possible)
    return record(folder, settings(config, jobs, entries), about, batches, in_turn(respond), on_lines=on_lines)


def in_turn(respond: Respond) -> Answers:
    """One batch after the other."""

    def answers(batches: Sequence[Batch]) -> Iterator[tuple[Batch, Sequence[Answer]]]:
        for batch in batches:
            first = batch.jobs[0].case
            prompts = [job.prompt for job in batch.jobs]
            yield batch, respond(batch.method, prompts, first.max_new_tokens, first.stop)

    return answers


def settings(
    config: Mapping[str, Any],
    jobs: Sequence[Job],
    entries: Sequence[Entry],
    described: Callable[[Any], str] = repr,
) -> Record:
    """The configuration with its methods, and a digest of all cases and their tokens.

    `described` says what answers of a method depend on.
    """
    methods = {f"{entry.name}@{entry.budget}": described(entry.method) for entry in entries}
    return {**config, "methods": methods, "cases": _digest(jobs)}


def record(
    folder: Path,
    config: Mapping[str, Any],
    about: Mapping[str, Any],
    batches: Sequence[Batch],
    answers: Answers,
    *,
    writing: AbstractContextManager[Any] | None = None,
    on_lines: Callable[[int, int], None] = lambda lines, tokens: None,
) -> list[Record]:
    """`run` of batches whose answers come in any order; `writing` is held while a line is written.

    When all is answered, the lines stand in the order of the batches, and run.json says what this session took.
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
            _open_run(folder, config, about)
            answered = _answered(file, asked)
        before, tokens = len(answered), sum(line["tokens"] for line in answered.values())
        on_lines(before, tokens)
        missing = [part for batch in batches if (part := batch.without(answered)) is not None]
        for batch, found in answers(missing):
            fresh = {
                key: _line(asked[key], each) for key, each in zip(batch.keys, found, strict=True) if key not in answered
            }
            with writing:
                append_whole(file, _text(fresh.values()))
            answered |= fresh
            tokens += sum(line["tokens"] for line in fresh.values())
            on_lines(len(answered), tokens)
        ordered = {key: answered[key] for key in asked}
        with writing:
            if list(ordered) != list(answered):
                write_whole(file, _text(ordered.values()))
            if missing:
                took = {"answers": len(answered) - before, "seconds": round(time.monotonic() - begin, 1)}
                _close_run(folder, took)
    return list(ordered.values())


def _text(lines: Iterable[Record]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


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
    _write_run(file, {"config": settings, "sessions": [*run["sessions"], dict(about)]})


def _close_run(folder: Path, took: Record) -> None:
    """Add to this session's entry in run.json what it took."""
    run = records.read_run(folder, records.Begun)
    _write_run(folder / RUN, {**run, "sessions": [*run["sessions"][:-1], {**run["sessions"][-1], **took}]})


def _write_run(file: Path, run: Record) -> None:
    write_whole(file, json.dumps(run, indent=2, ensure_ascii=False) + "\n")


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
