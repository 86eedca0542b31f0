"""Measures every aim of docs/results/aims.md, and writes their table.

    python scripts/benchmarks/aims.py --output aims                          all that this device can show
    python scripts/benchmarks/aims.py --output aims --only tokens --only codes
    python scripts/benchmarks/aims.py --output aims --list                   what would run, and nothing else

A GPU has Llama-3.1-8B's shapes with random weights and takes some 25 minutes; a CPU has the demo model and takes five.
The same command goes on where it was stopped: what has ended is not measured again. `--output` holds what each command
printed, and the table can be printed from it anywhere.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkv_jax.benchmark.grid import OURS
from clusterkv_jax.benchmark.table import put_into
from clusterkv_jax.storage.files import write_whole

Row = Mapping[str, Any]
ROOT = Path(__file__).resolve().parents[2]
LLAMA = "clusterkv benchmark --model llama-3.1-8b"
# Sequences in the memory of `--full-caches`, per full cache: rows in bf16, and in int8 a fifth and an eighth of them.
IN_BF16, IN_INT8, EIGHTH = 4.8, 9.4, 15.0
PEER, STATIC = "transformers", "transformers-static"
LENGTHS = (32768, 65536, 131072)  # whose tokens have an aim


@dataclass(frozen=True)
class Measurement:
    """A command that prints a table; `clusterkv benchmark` keeps its own in a folder beside."""

    name: str
    command: str

    def arguments(self, folder: Path) -> list[str]:
        """What is executed, by this Python."""
        program, *rest = shlex.split(self.command)
        if program == "clusterkv":
            output = os.path.relpath(folder / self.name, ROOT)
            return [sys.executable, "-m", "clusterkv_jax.cli", *rest, "--output", output]
        return [sys.executable, *rest] if program == "python" else [program, *rest]


@dataclass(frozen=True)
class Aim:
    """A figure of one measurement or more: what it should be, and how it is found among their rows.

    `reached` raises LookupError where a row is missing, ValueError where its measurement failed.
    """

    figure: str
    wanted: str
    of: tuple[str, ...]
    reached: Callable[..., str]


def gpu_measurements(full_caches: int) -> list[Measurement]:
    """What a GPU runs; equal memory is that of so many full caches."""
    fifth = f"{LLAMA} --methods centroidkv --budgets 0.2 --lengths 64k"
    eighth = f"{LLAMA} --methods centroidkv --budgets 0.125 --lengths 64k"
    many = "--new-tokens 129 --repeats 2 --peers ''"

    def count(per_cache):
        return round(per_cache * full_caches)

    # Contexts of 3,584 tokens would be of two sizes, by one token, and so compile twice.
    questions = "--methods auto --shares 0.125 --cases 100 --tokens 3500 --cache-dtypes none,int8,int4"
    return [
        Measurement(
            "tokens",
            f"{LLAMA} --methods full,centroidkv,auto --budgets 0.2 --lengths 16k,32k,64k,128k --repeats 2 --peers ''",
        ),
        Measurement("peers", f"{fifth} --repeats 2 --peers transformers,transformers-static"),
        Measurement("full-caches", f"{LLAMA} --methods full --lengths 64k {many} --batches {full_caches}"),
        Measurement("bf16", f"{fifth} {many} --batches {count(IN_BF16)}"),
        Measurement("int8", f"{fifth} {many} --cache-dtype int8 --batches {count(IN_INT8)}"),
        Measurement("eighth", f"{eighth} {many} --cache-dtype int8 --batches {count(EIGHTH)}"),
        Measurement(
            "engine",
            f"{LLAMA} --methods centroidkv --budgets 0.2 --engine 200 --lengths 1k,32k --batches 16 "
            "--new-tokens 512 --repeats 1",
        ),
        Measurement("questions", "python scripts/benchmarks/benchmark_questions.py --slots 16"),
        Measurement(
            "codes", "python scripts/benchmarks/benchmark_quantised.py --slots 65536 131072 --dtypes bfloat16 int8"
        ),
        Measurement("needles", f"python scripts/studies/needle_scores.py {questions}"),
        Measurement("start", "python scripts/benchmarks/benchmark_start.py --folder build/llama --processes 2"),
    ]


CPU_MEASUREMENTS = [
    Measurement(
        "cpu",
        "clusterkv benchmark --methods full --lengths 4k --new-tokens 257 --repeats 5 "
        "--peers transformers,transformers-static",
    ),
    Measurement("demo", "make demo"),
]


def gpu_aims() -> list[Aim]:
    """What is shown of a GPU."""

    def floors(method):
        return lambda rows: _each(cell(rows, method, n)["over_floor"] for n in LENGTHS)

    def of_caches(full, rows):
        return f"{cell(rows)['tokens_per_s'] / cell(full)['tokens_per_s']:.1f} ×"

    def beside(rows, peer):
        return _ratio(cell(rows, peer), cell(rows, "centroidkv"), "tpot")

    return [
        Aim("a token over its floor, 20 %; 32k, 64k, 128k", "≤ 1.15 ×", ("tokens",), floors("centroidkv")),
        Aim("a token over its floor, full cache; 32k, 64k, 128k", "≤ 1.10 ×", ("tokens",), floors("full")),
        Aim("a token of `auto` over CentroidKV's; the same", "1 ×", ("tokens",), _token_of_auto),
        Aim("CentroidKV's delay of a prompt; 16k, 32k, 64k, 128k", "≤ 1 %", ("tokens",), _delay("centroidkv")),
        Aim("`auto`'s delay of a prompt; the same", "≤ 1 %", ("tokens",), _delay("auto")),
        Aim("a token beside transformers' growing cache, 64k", "≥ 10 ×", ("peers",), lambda x: beside(x, PEER)),
        Aim("a token beside its compiled static cache, 64k", "≥ 5.6 ×", ("peers",), lambda x: beside(x, STATIC)),
        Aim("tokens a second in the memory of {n} full caches, 20 %", "≥ 4.9 ×", ("full-caches", "bf16"), of_caches),
        Aim("the same in int8", "≥ 9 ×", ("full-caches", "int8"), of_caches),
        Aim("the same with 12.5 % in int8", "≥ 14 ×", ("full-caches", "eighth"), of_caches),
        Aim("an engine over full batches, 200 requests", "≥ 85 %", ("engine",), _engine),
        Aim("64 questions over 64 readings, 64k", "≥ 40 ×", ("questions",), _questions),
        Aim("attention to int8 rows, of the bandwidth; 64k and 128k, 1 and 8 sequences", "≥ 80 %", ("codes",), _codes),
        Aim("needles found in int8 and int4 rather than float32, points", "≥ − 0.5, − 2", ("needles",), _needles),
        Aim("compiling in a second process", "≤ 3 s", ("start",), lambda rows: f"{rows[-1]['compiling']} s"),
    ]


def cpu_aims() -> list[Aim]:
    """What is shown of a CPU."""
    return [
        Aim("a token of the demo model beside transformers", "≥ 1 ×", ("cpu",), lambda rows: _best_peer(rows, "tpot")),
        Aim("a prompt of the demo model beside transformers", "≥ 1 ×", ("cpu",), lambda rows: _best_peer(rows, "ttft")),
        Aim("`make demo`, once installed", "≤ 20 s", ("demo",), lambda rows: f"{rows[0]['seconds']:.1f} s"),
    ]


# --- figures ---


def cell(rows: Sequence[Row], who: str | None = None, length: int | None = None) -> Row:
    """The row of a method or a peer at this length. Raises LookupError if there is none, ValueError if it failed."""
    names = [(row, row["cell"]["method" if row["cell"]["side"] == OURS else "side"]) for row in rows]
    found = [row for row, name in names if who in (None, name) and length in (None, row["cell"]["length"])]
    if not found:
        raise LookupError(f"No row of {who} at {length} tokens.")
    if found[0]["failed"]:
        raise ValueError(found[0]["failed"])
    return found[0]


def _each(numbers: Iterator[float], form: str = "{:.2f}", unit: str = " ×") -> str:
    return " / ".join(form.format(number) for number in numbers).replace("-", "− ") + unit


def _ratio(above: Row, below: Row, time_of: str) -> str:
    return f"{above[time_of]['median'] / below[time_of]['median']:.2f} ×"


def _best_peer(rows: Sequence[Row], time_of: str) -> str:
    faster = min((cell(rows, peer) for peer in (PEER, STATIC)), key=lambda row: row[time_of]["median"])
    return _ratio(faster, cell(rows, "full"), time_of)


def _token_of_auto(rows: Sequence[Row]) -> str:
    both = ((cell(rows, name, n)["tpot"]["median"] for name in ("auto", "centroidkv")) for n in LENGTHS)
    return _each(auto / centroidkv for auto, centroidkv in both)


def _delay(method: str) -> Callable[[Sequence[Row]], str]:
    def reached(rows: Sequence[Row]) -> str:
        lengths = sorted({row["cell"]["length"] for row in rows})
        both = ((cell(rows, name, n)["ttft"]["median"] for name in (method, "full")) for n in lengths)
        return _each((100 * (ours / full - 1) for ours, full in both), "{:.1f}", " %")

    return reached


def _engine(rows: Sequence[Row]) -> str:
    row = cell(rows)
    return f"{row['of_ideal']['median']:.0%}, {row['programs']} programs compiled meanwhile".replace("%", " %")


def _questions(rows: Sequence[Row]) -> str:
    return max((row["as fast as reading each time"] for row in rows), key=lambda text: float(text.split()[0]))


def _codes(rows: Sequence[Row]) -> str:
    shares = [row["of read bandwidth"].rstrip("%") for row in rows if row["rows"] == "int8"]
    return " / ".join(shares) + " %"


def _needles(rows: Sequence[Row]) -> str:
    usual, *stored = (float(row["12.50%"]) for row in rows)
    return _each((100 * (value - usual) for value in stored), "{:.1f}", "")


# --- running ---


def main() -> None:
    """Run what has not ended yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the measurements")
    parser.add_argument("--only", action="append", help="a measurement; repeat it [all]")
    parser.add_argument("--full-caches", type=int, default=10, help="full caches of 64k tokens that a GPU has room for")
    parser.add_argument(
        "--markdown", type=Path, help="page whose lines <!-- benchmark NAME --> and <!-- end --> get it"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    options = parser.parse_args()
    folder = options.output.resolve()
    device = the_device(folder, keep=not options.list)
    gpu = device["platform"] == "gpu"
    measurements = gpu_measurements(options.full_caches) if gpu else CPU_MEASUREMENTS
    unknown = set(options.only or ()) - {one.name for one in measurements}
    if unknown:
        parser.error(f"--only {sorted(unknown)[0]} is none of {', '.join(one.name for one in measurements)}.")
    if options.list:
        print("\n".join(f"{one.name:12} {one.command}" for one in measurements))
        return
    for one in (one for one in measurements if kept(one, folder).exists()):
        if (before := json.loads(kept(one, folder).read_text())["command"]) != one.command:
            parser.error(f"--output {options.output} holds {one.name} of another command: {before}")
    missing = [
        one for one in measurements if one.name in (options.only or [one.name]) and not kept(one, folder).exists()
    ]
    if missing and (here := found_device()) != device:
        parser.error(f"--output {options.output} holds what {device['name']} measured, and this is {here['name']}.")
    for one in missing:
        measure(one, folder)
    aims = gpu_aims() if gpu else cpu_aims()
    text = f"{table(aims, measurements, folder, options.full_caches)}\n\n{device['name']}, jax {device['jax']}."
    print(text)
    if options.markdown is not None:
        put_into(options.markdown, folder.name, text)


def the_device(folder: Path, keep: bool) -> dict[str, str]:
    """What the folder's measurements were made on; of a new folder, what jax finds here, which it may keep."""
    file = folder / "device.json"
    if file.exists():
        return json.loads(file.read_text())
    device = found_device()
    if keep:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(device, indent=2) + "\n")
    return device


def found_device() -> dict[str, str]:
    """What jax finds here, asked in a process of its own: measurements need the device's whole memory."""
    ask = "import jax, json; d = jax.devices()[0]; print(json.dumps([d.platform, d.device_kind, jax.__version__]))"
    done = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(("platform", "name", "jax"), json.loads(done.stdout.splitlines()[-1]), strict=True))


def kept(one: Measurement, folder: Path) -> Path:
    """Where it is written that a measurement has ended."""
    return folder / f"{one.name}.json"


def measure(one: Measurement, folder: Path) -> None:
    """Run it, and keep what it printed. Raises SystemExit if it fails."""
    print(f"{one.name}: {one.command}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    done = subprocess.run(one.arguments(folder), stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{one.name} ended with status {done.returncode}: {one.command}")
    write_whole(
        kept(one, folder),
        json.dumps({"command": one.command, "seconds": seconds, "text": done.stdout}, indent=2) + "\n",
    )
    print(f"{one.name}: {seconds:.0f} s", file=sys.stderr, flush=True)


def rows_of(one: Measurement, folder: Path) -> list[Row] | None:
    """The rows that it measured; None if it has not ended. A command without a table has one row: its seconds."""
    if not kept(one, folder).exists():
        return None
    if one.command.startswith("clusterkv"):
        return json.loads((folder / one.name / "results.json").read_text())["rows"]
    found = json.loads(kept(one, folder).read_text())
    return list(printed_rows(found["text"])) or [{"seconds": found["seconds"]}]


def printed_rows(text: str) -> Iterator[Row]:
    """The rows of a Markdown table, by the names of its columns."""
    lines = [
        [part.strip() for part in line.strip("| \n").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    if lines:
        yield from (dict(zip(lines[0], line, strict=True)) for line in lines[2:])


def table(aims: Sequence[Aim], measurements: Sequence[Measurement], folder: Path, full_caches: int) -> str:
    """Each aim with what was reached, and the commands of the measurements below."""
    found = {one.name: rows_of(one, folder) for one in measurements}
    lines = ["| figure | reached | aim | measurement |", "| --- | ---: | ---: | --- |"]
    for aim in aims:
        figure = aim.figure.format(n=full_caches)
        reached = _reached(aim, [found[name] for name in aim.of])
        lines.append(f"| {figure} | {reached} | {aim.wanted} | {', '.join(aim.of)} |")
    commands = (f"# {one.name}\n{wrapped(one.command)}" for one in measurements)
    return "\n".join([*lines, "", "```bash", *commands, "```"])


def wrapped(command: str) -> str:
    """A command in lines of a page, as a shell reads it."""
    lines = textwrap.wrap(command, 116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines)


def _reached(aim: Aim, rows: Sequence[list[Row] | None]) -> str:
    """What was reached, or why there is no figure; a peer that is not installed has no row."""
    if None in rows:
        return "not measured"
    try:
        return aim.reached(*rows)
    except LookupError:
        return "not measured"
    except ValueError as error:
        print(f"{aim.figure}: {error}", file=sys.stderr)
        return "failed"


if __name__ == "__main__":
    main()
