"""The tables of pretrained models by a plan: a `clusterkv evaluate` for each study, model, length, method and budget.

    python scripts/studies/pretrained.py run --processes 6 --limit-s 540
    python scripts/studies/pretrained.py tables --keep docs/results/pretrained

`run` goes on where it stopped, as often as it is called. The full cache is asked first; the folders of all methods
begin with its answers. `tables` joins what is complete.
"""

import gzip
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from clusterkv_jax.storage import schema

PLAN = Path(__file__).with_suffix(".yaml")
MOST_KEPT = 3 * schema.MIB
CLUSTERKV = (sys.executable, "-m", "clusterkv_jax")


@dataclass(frozen=True)
class Study:
    """A suite with its options; methods and budgets are the plan's where it names none."""

    suite: str
    tasks: str = ""
    lengths: list[int] = field(default_factory=lambda: [0])
    limit: int | None = None
    methods: list[str] = field(default_factory=list)
    budgets: str = ""
    options: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Models by name, with what follows `--model`; studies by name; and what they have in common."""

    models: dict[str, str]
    studies: dict[str, Study]
    methods: list[str]
    budgets: str


@dataclass(frozen=True)
class Piece:
    """A method's answers with a budget, or the full cache's, in a folder; `table` is that of all."""

    table: str
    method: str
    command: tuple[str, ...]
    budget: str = ""

    def folder(self, output: Path) -> Path:
        """Of its answers."""
        return output / self.table / "-".join([Path(self.method.replace(":", "-")).name, *self.budget.split()])

    def done(self, output: Path) -> bool:
        """Whether all is answered."""
        return (self.folder(output) / "complete").exists()


def read(file: Path) -> Plan:
    """The plan of a YAML file. Raises ValueError that names a field."""
    return schema.checked(schema.from_yaml(schema.read_text(file, most=schema.MOST_YAML), str(file)), Plan, str(file))


def pieces(plan: Plan) -> Iterator[Piece]:
    """All of a plan, the full cache first in every table."""
    for name, study in plan.studies.items():
        for model, place in plan.models.items():
            for length in study.lengths:
                table = f"{name}/{model}" + (f"/{length}" if length else "")
                asked = ["evaluate", "--suite", study.suite, "--model", *shlex.split(place), *study.options]
                asked += ["--tasks", study.tasks] if study.tasks else []
                asked += ["--lengths", str(length)] if length else []
                asked += ["--limit", str(study.limit)] if study.limit else []
                yield Piece(table, "full", tuple(asked))
                budgets = (study.budgets or plan.budgets).split(",")
                for method, budget in itertools.product(study.methods or plan.methods, budgets):
                    yield Piece(table, method, (*asked, "--methods", method, "--budgets", budget), budget)


def start(piece: Piece, output: Path, processes: int) -> subprocess.Popen[bytes]:
    """A process that answers a piece, on its part of the accelerator's memory; it writes to a log beside its folder."""
    folder = piece.folder(output)
    if not folder.exists() and piece.method != "full":
        copy = folder.with_name(f"{folder.name}.copy")
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
        for name in ("results.jsonl", "run.json"):
            shutil.copy(folder.with_name("full") / name, copy / name)
        copy.rename(folder)
    folder.mkdir(parents=True, exist_ok=True)
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / processes:.2f}"}
    command = [*CLUSTERKV, *piece.command, "--output", str(folder)]
    with folder.with_name(f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=share | os.environ)


def chosen(plan: Path, only: Sequence[str]) -> list[Piece]:
    """The pieces of the tables whose names begin as one of these says, or all."""
    listed = [piece for piece in pieces(read(plan)) if not only or piece.table.startswith(tuple(only))]
    if not listed:
        raise typer.BadParameter(f"No table of {plan} begins with {' or '.join(only)}.")
    return listed


Plans = Annotated[Path, typer.Option(help="What to run.")]
Only = Annotated[list[str], typer.Option(help="Tables whose names begin so; again for several. All by default.")]
Output = Annotated[Path, typer.Option(help="Folder of all answers.")]


def run(
    plan: Plans = PLAN,
    only: Only = [],  # noqa: B006
    output: Output = Path("results/pretrained"),
    processes: Annotated[int, typer.Option(help="Processes at once.", min=1)] = 1,
    limit_s: Annotated[float, typer.Option(help="Seconds until all processes stop; the next call goes on.")] = 3e7,
) -> None:
    """Answer what is missing; exit code 1 where a process fails, 3 where there is more to do."""
    listed, end = chosen(plan, only), time.monotonic() + limit_s
    todo = [piece for piece in listed if not piece.done(output)]
    live: dict[Piece, subprocess.Popen[bytes]] = {}
    failed: set[str] = set()
    while (todo or live) and time.monotonic() < end:
        for piece in [piece for piece, process in live.items() if process.poll() is not None]:
            if live.pop(piece).returncode:
                failed.add(piece.table)
                print(f"{piece.folder(output)} fails; see its .log")
            else:
                (piece.folder(output) / "complete").touch()
                done = sum(each.done(output) for each in listed)
                print(f"{done} of {len(listed)}: {piece.table} {piece.method} {piece.budget}")
        todo = [piece for piece in todo if piece.table not in failed]
        full = {piece.table for piece in listed if piece.method == "full" and piece.done(output)}
        ready = [piece for piece in todo if piece.method == "full" or piece.table in full]
        for piece in ready[: processes - len(live)]:
            live[piece] = start(piece, output, processes)
            todo.remove(piece)
        time.sleep(0.2)
    for process in live.values():
        process.terminate()
    for process in live.values():
        process.wait()
    raise typer.Exit(1 if failed else 3 if todo or live else 0)


def tables(
    keep: Annotated[Path, typer.Option(help="Folder of the tables and of packed answers.")],
    plan: Plans = PLAN,
    only: Only = [],  # noqa: B006
    output: Output = Path("results/pretrained"),
) -> None:
    """Join the complete pieces of each table, pack the answers, and write all tables to tables.md."""
    by_table: dict[str, list[Path]] = {}
    for piece in chosen(plan, only):
        if piece.done(output):
            by_table.setdefault(piece.table, []).append(piece.folder(output))
    texts = []
    for table, folders in by_table.items():
        place = keep / table
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([*CLUSTERKV, "join", *map(str, folders), "--output", str(place)], check=True)
        (place / "report.html").unlink()
        answers = place / "results.jsonl"
        # All answers to a question stand together, so that they pack into a third.
        lines = sorted(answers.read_bytes().splitlines(keepends=True), key=_question)
        (place / "results.jsonl.gz").write_bytes(gzip.compress(b"".join(lines), 9, mtime=0))
        answers.unlink()
        texts.append(f"## {table.replace('/', ', ')}\n\n{(place / 'table.md').read_text(encoding='utf-8')}")
    (keep / "tables.md").write_text("\n".join(texts), encoding="utf-8")
    size = sum(file.stat().st_size for file in keep.rglob("*.gz"))
    print(f"{len(texts)} tables, {size / 1e6:.2f} MB of answers in {keep}")
    if size > MOST_KEPT:
        raise typer.Exit(1)


def _question(line: bytes) -> tuple[str, str]:
    answer = json.loads(line)
    return answer["task"], answer["id"]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    app.command()(tables)
    app()
