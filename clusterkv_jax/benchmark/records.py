"""A folder of results: run.json says what was asked and who ran it, results.jsonl has a line for each timing.

A line is appended when its timing is there, so that a run that was killed goes on behind its last line.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from clusterkv_jax.benchmark.grid import Cell, GridRequest
from clusterkv_jax.storage import schema
from clusterkv_jax.storage.files import append_whole, write_whole

RESULTS, RUN = "results.jsonl", "run.json"
MOST_RUN, MOST_LINE = schema.MIB, 2**16

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]


class Timing(TypedDict, total=False):
    """A timing, or why there is none. Bytes are those of one device, as are the floor's.

    `repeat` 0 is the call that compiles; it alone has `compile_s`, bytes and `clustering_s`, seconds of clustering per
    step. `read_bytes` are weights and cache, which a step reads; `earlier_peak_bytes` the device's peak before the
    call. `bandwidth` is bytes a second, read beside this timing.

    Requests in an engine have more: tokens a second, as a share of those of full batches, the share of slots in use,
    programs compiled meanwhile, and how many times faster questions to one context are than reading it for each.
    """

    cell: dict[str, Any]
    repeat: Annotated[int, Meta(ge=0, le=10**6)]
    failed: str
    ttft_s: Seconds
    tpot_s: Seconds
    compile_s: Seconds
    cache_bytes: Bytes
    full_cache_bytes: Bytes
    read_bytes: Bytes
    peak_bytes: Bytes | None
    earlier_peak_bytes: Bytes | None
    clustering_s: Seconds | None
    bandwidth: Annotated[float, Meta(ge=0, le=1e15)]
    served_tokens_per_s: Annotated[float, Meta(ge=0, le=1e12)]
    of_ideal: Annotated[float, Meta(ge=0, le=100)]
    occupancy: Annotated[float, Meta(ge=0, le=1)]
    programs: Annotated[int, Meta(ge=0, le=10**6)]
    question_gain: Annotated[float, Meta(ge=0, le=10**6)]


def read(folder: Path | None) -> list[Timing]:
    """The timings of a folder; a torn last line is left out. Raises ValueError that names a line that is none."""
    if folder is None or not (folder / RESULTS).exists():
        return []
    lines = []
    for where, raw in schema.read_lines(folder / RESULTS, most=MOST_LINE):
        if raw.endswith(b"\n"):
            line = schema.from_json(schema.as_text(raw, where), where)
            schema.check_keys(line, Timing.__annotations__, where)
            schema.checked(line, Timing, where)
            cell_of(line, where)
            lines.append(line)
    return lines


def cell_of(line: Mapping[str, Any], where: str = "A result") -> Cell:
    """The cell of a line. Raises ValueError if it names none."""
    return schema.checked(line.get("cell"), Cell, where)


def add(folder: Path | None, line: Timing) -> None:
    """Append a timing."""
    if folder is not None:
        _mend(folder / RESULTS)
        append_whole(folder / RESULTS, json.dumps(line) + "\n")


def _mend(file: Path) -> None:
    """Cut off a last line that a killed process left without its end."""
    if file.exists() and (whole := file.read_bytes()) and not whole.endswith(b"\n"):
        write_whole(file, whole[: whole.rfind(b"\n") + 1].decode("utf-8"))


def begin(folder: Path | None, asked: GridRequest) -> list[dict[str, Any]]:
    """The sessions that a folder has; it is made where there is none.

    Raises ValueError if the folder holds results of another question.
    """
    if folder is None or not folder.exists():
        return []
    if not (folder / RUN).exists():
        if any(folder.iterdir()):
            raise ValueError(f"--output {folder} is not empty and holds no benchmark; choose another folder.")
        return []
    content = schema.from_json(schema.read_text(folder / RUN, most=MOST_RUN), str(folder / RUN))
    schema.check_keys(content, ("asked", "sessions"), str(folder / RUN))
    before = schema.checked(content["asked"], GridRequest, str(folder / RUN))
    for name, value in asdict(asked).items():
        if (other := getattr(before, name)) != value:
            raise ValueError(
                f"--output {folder} holds a benchmark with {name.replace('_', ' ')} {_plain(other)}, this one asks for "
                f"{_plain(value)}; choose another folder."
            )
    return content["sessions"]


def _plain(value: Any) -> str:
    """A setting in a sentence."""
    if isinstance(value, tuple):
        return ", ".join(" ".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in value) or "none"
    return str(value)


def write_run(folder: Path | None, asked: GridRequest, sessions: list[dict[str, Any]]) -> None:
    """Write down what is asked and who runs it."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"asked": msgspec.to_builtins(asked), "sessions": sessions}
        write_whole(folder / RUN, json.dumps(content, indent=2) + "\n")
