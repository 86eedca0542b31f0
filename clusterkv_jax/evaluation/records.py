"""What a run leaves: results.jsonl, a line per answer, and run.json; read by their declared types.

Numbers that a table or a picture cannot hold are refused here, so that those need no checks of their own.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from clusterkv_jax.evaluation.scoring import METRICS
from clusterkv_jax.storage import schema
from clusterkv_jax.storage.files import replacing

RESULTS, RUN = "results.jsonl", "run.json"
PACKED = f"{RESULTS}.gz"
# A session takes a kilobyte of run.json, a long answer a few of results.jsonl.
MOST_RUN, MOST_LINE = 16 * schema.MIB, schema.MIB
# The metric of perplexities is a mean cross-entropy in nats; the exponential of more than this no number holds.
NLL, MOST_NLL = "nll", 300.0
# A share of the cache, or a number of rows; not 0.
BUDGET = r"^(?=.*[1-9])([0-9]{1,10}|[0-9]?\.[0-9]{1,20})\Z"

Count = Annotated[int, Meta(ge=0, le=2**53)]
# As JSON, with the fields of `ResultLine` or `Run` and those that are not declared.
Record = dict[str, Any]


class Facts(TypedDict, total=False):
    """What tables and pictures ask about a case; suites add more."""

    length: Count
    position: Count
    depth: Annotated[float, Meta(ge=0, le=1)]


class ResultLine(TypedDict):
    """What was asked, what came out, and what it cost; what need not be there, earlier versions did not write."""

    method: str
    budget: Annotated[str, Meta(pattern=BUDGET)]
    task: str
    id: str
    prompt: str
    question: NotRequired[str]
    expected: NotRequired[list[str]]
    output: str
    metric: str
    score: float
    rows: Annotated[float, Meta(ge=0)]
    cache_bytes: NotRequired[Count]
    tokens: Count
    cut: Count
    compressed: bool
    seconds: float
    facts: Facts


class RunInputs(TypedDict):
    """What was asked of which methods: a run that goes on needs no more.

    `methods` by name and budget, `cases` by task; earlier versions had one digest of all cases.
    """

    methods: dict[str, str]
    cases: dict[str, str] | str


class Config(RunInputs):
    """What decides a run's results, as far as tables name it."""

    suite: str
    model: str


class Begun(TypedDict):
    """A run that may go on, and who ran it when."""

    config: RunInputs
    sessions: list[dict[str, Any]]


class Run(TypedDict):
    """A run of a suite, and who ran it when."""

    config: Config
    sessions: list[dict[str, Any]]


def group(task: str, facts: Mapping[str, Any]) -> str:
    """A task with its length or position, where it has one: what the cases of a folder are held against."""
    place = facts.get("position", facts.get("length"))
    return task if place is None else f"{task}@{place}"


def results_file(folder: Path) -> Path:
    """The results of a folder, packed or not. Raises ValueError for none, and for both."""
    found = [file for file in (folder / RESULTS, folder / PACKED) if file.exists()]
    if len(found) != 1:
        raise ValueError(f"{folder} must hold either {RESULTS} or {PACKED}.")
    return found[0]


def unpack(folder: Path) -> None:
    """Put results.jsonl in the place of results.jsonl.gz, where a folder has that: no line can be added to it."""
    packed = folder / PACKED
    if packed.exists() and results_file(folder) == packed:
        with replacing(folder / RESULTS) as whole, whole.open("wb") as stream:
            stream.writelines(line for _, line in schema.read_lines(packed, most=MOST_LINE))
        packed.unlink()


def read_answers(file: Path) -> Iterator[tuple[str, Record]]:
    """The answers of a results file (.gz too), each after its place; a torn last line is left out.

    Raises ValueError that names the first line which is no answer.
    """
    for where, raw in schema.read_lines(file, most=MOST_LINE):
        if raw.endswith(b"\n"):
            line = schema.from_json(schema.as_text(raw, where), where)
            check_line(line, where)
            yield where, line


def check_line(line: Any, where: str) -> None:
    """Raise ValueError unless this is a line of results."""
    schema.check_keys(line, ResultLine.__annotations__, where)
    schema.checked(line, ResultLine, where)
    check_score(line["metric"], line["score"], where)


def check_score(metric: str, points: float, where: str) -> None:
    """Raise ValueError for an unknown metric, and for a number that is none of its scores."""
    if metric != NLL and metric not in METRICS:
        raise ValueError(
            f"{where}, field 'metric': {schema.shown(repr(metric))} is unknown; allowed: {', '.join((NLL, *METRICS))}."
        )
    most = MOST_NLL if metric == NLL else 1
    if not 0 <= points <= most:
        raise ValueError(f"{where}, field 'score': A score by {metric} is between 0 and {most:g}, got {points}.")


def cut_torn_line(file: Path) -> None:
    """Shorten a results file to its whole lines: a kill may leave half of one behind them."""
    schema.check_file(file)
    with file.open("rb+") as stream:
        end = stream.seek(0, os.SEEK_END)
        start = stream.seek(max(0, end - MOST_LINE))
        whole = stream.read().rfind(b"\n") + 1
        # A line that is longer than allowed is an error when it is read, and stays.
        if whole or not start:
            stream.truncate(start + whole)


def read_run(folder: Path, kind: Any = Run) -> Record:
    """The run.json of a folder. Raises ValueError that names the file and the field."""
    file = folder / RUN
    run = schema.from_json(schema.read_text(file, most=MOST_RUN), str(file))
    schema.checked(run, kind, str(file))
    return run
