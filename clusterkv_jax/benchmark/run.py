"""A benchmark from its question to its timings: which sides run together, what they are asked, what is written down."""

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterkv_jax.benchmark import records, runners
from clusterkv_jax.benchmark.grid import OURS, Cell, GridRequest, cells, turns
from clusterkv_jax.benchmark.records import Timing
from clusterkv_jax.benchmark.runners import Runner
from clusterkv_jax.benchmark.summary import SummaryRow, bandwidth, rows

Turn = tuple[Cell, int]
Running = Callable[[str, GridRequest], AbstractContextManager[Runner]]


@dataclass(frozen=True)
class Results:
    """What came of a benchmark: rows, what they were measured on, and sentences about what is missing."""

    rows: list[SummaryRow]
    about: dict[str, Any]
    notes: list[str]


@dataclass(frozen=True)
class Step:
    """A timing that was made: its number of how many, what it is, and the seconds that are left at this pace."""

    number: int
    total: int
    cell: Cell
    repeat: int
    line: Timing
    left_s: float


def run(
    asked: GridRequest, folder: Path | None, on_step: Callable[[Step], None], running: Running = runners.running
) -> Results:
    """Time what the folder has no timing of yet.

    On a CPU all sides take turns. An accelerator's memory is for one side after the other.

    Raises ValueError if the folder holds another benchmark, or if this library cannot run what is asked.
    """
    sessions, lines = records.begin(folder, asked), records.read(folder)
    notes = {peer: note for peer in asked.peers if (note := runners.missing(peer))}
    notes |= {
        peer: f"{peer} has nothing to do: no budget was asked for." for peer in asked.peers if not cells(asked, [peer])
    }
    peers = [peer for peer in asked.peers if peer not in notes]
    order = turns(cells(asked, [OURS, *peers]), asked.repeats, _done(lines, asked.repeats))
    if order:
        pace = _pace(len(order), on_step)
        with ExitStack() as stack:
            crew = {OURS: stack.enter_context(running(OURS, asked))}
            session = _session(crew[OURS].hello)
            _check_same(sessions, session, folder)
            if session["platform"] == "cpu":
                crew |= {peer: stack.enter_context(running(peer, asked)) for peer in peers}
            sessions = [*sessions, session]
            _introduce(crew, session, notes)
            records.write_run(folder, asked, sessions)
            _ask(crew, order, folder, lines, pace)
        for peer in [peer for peer in peers if peer not in crew and any(cell.side == peer for cell, _ in order)]:
            with running(peer, asked) as side:
                _introduce({peer: side}, session, notes)
                records.write_run(folder, asked, sessions)
                _ask({peer: side}, order, folder, lines, pace)
    every = [cell for group in cells(asked, [OURS, *asked.peers]) for cell in group]
    about = {"model": asked.model, "bandwidth": bandwidth(lines), "sessions": sessions, **_device(sessions)}
    return Results(rows(every, lines), about, list(notes.values()))


def _done(lines: Sequence[Timing], repeats: int) -> set[Turn]:
    """What needs no timing any more; a cell that failed would fail again."""
    done = {(records.cell_of(line), line.get("repeat", 0)) for line in lines}
    failed = [records.cell_of(line) for line in lines if "failed" in line]
    return done | {(cell, number) for cell in failed for number in range(repeats + 1)}


def _ask(
    crew: Mapping[str, Runner],
    order: Sequence[Turn],
    folder: Path | None,
    lines: list[Timing],
    pace: Callable[[Cell, int, Timing], None],
) -> None:
    """Take these sides' turns; a side that cannot run or has ended takes none, a cell that failed no more."""
    known = {(records.cell_of(line), line.get("repeat", 0)) for line in lines}
    out = {name for name, side in crew.items() if "failed" in side.hello}
    failed: set[Cell] = set()
    for cell, repeat in order:
        if cell.side not in crew or cell.side in out or cell in failed:
            continue
        answer = crew[cell.side].measure(cell, repeat)
        if answer.pop("ended", False):
            out.add(cell.side)
        line = Timing(cell=asdict(cell), repeat=repeat, **answer)
        if "failed" in line:
            failed.add(cell)
        if "failed" in line or (cell, repeat) not in known:
            lines.append(line)
            records.add(folder, line)
        pace(cell, repeat, line)


def _pace(total: int, on_step: Callable[[Step], None]) -> Callable[[Cell, int, Timing], None]:
    """Counts timings, and says what is left."""
    begin, count = time.monotonic(), 0

    def step(cell: Cell, repeat: int, line: Timing) -> None:
        nonlocal count
        count += 1
        left = (time.monotonic() - begin) / count * (total - count)
        on_step(Step(count, total, cell, repeat, line, left))

    return step


def _session(hello: Mapping[str, Any]) -> dict[str, Any]:
    """Who runs it, when, on what. Raises ValueError where this library cannot."""
    if "failed" in hello:
        raise ValueError(hello["failed"])
    command = shlex.join(["clusterkv", *sys.argv[1:]])
    return {"command": command, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **hello}


def _check_same(sessions: Sequence[Mapping[str, Any]], session: Mapping[str, Any], folder: Path | None) -> None:
    for before in sessions[:1]:
        if before["device"] != session["device"]:
            raise ValueError(
                f"--output {folder} holds timings of {before['device']}, this is {session['device']}; choose another "
                "folder."
            )


def _introduce(crew: Mapping[str, Runner], session: dict[str, Any], notes: dict[str, str]) -> None:
    """Add to the session what sides run with, and to the notes why a peer cannot."""
    for name, side in crew.items():
        session["versions"] |= side.hello.get("versions", {})
        if "failed" in side.hello:
            notes[name] = f"{name} is left out: {side.hello['failed']}"


def _device(sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The device and the versions of all sessions, the last ones of each package."""
    versions = {name: text for session in sessions for name, text in session["versions"].items()}
    return {"device": sessions[-1]["device"] if sessions else "unknown", "versions": versions}
