"""Kills what writes files at random moments, fills the disk at random bytes, and looks at what is left.

    python scripts/studies/kills.py
    python scripts/studies/kills.py --only join,report --kills 5 --full 3

Each command runs once unbroken, and then again and again in a folder of its own, with other files where its own will
be. It is killed, half of the times at a moment between its first touch of the folder and its end, and half of them at
one of its calls of the system there. Or no file may grow beyond a random byte; or the folder is a disk of a random
size, where mounting is allowed. What is left must be the old files or the new ones, and the same command must then end
with the bytes of the unbroken run. Times and dates of a run are set aside. Linux and macOS.
"""

import importlib
import json
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from interruption import PAGE, End, Stop, disk, may_mount, resize, run
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax import cli, saving
from clusterkv_jax.checkpoints import loading
from clusterkv_jax.cli.terminal import use_compilation_cache
from clusterkv_jax.evaluation import runner
from clusterkv_jax.evaluation.batching import Job, MethodEntry, plan
from clusterkv_jax.evaluation.responses import Response
from clusterkv_jax.evaluation.settings import settings
from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from clusterkv_jax.methods import Method
from clusterkv_jax.models import parameters, registry

DEMO = Path(__file__).parents[2] / "models" / "demo"
# Imported once rather than in every process: the commands import what they need when they need it.
PRELOADED = (
    "clusterkv_jax.cli.commands",
    "clusterkv_jax.evaluation.manifest",
    "clusterkv_jax.evaluation.report.report",
    "clusterkv_jax.evaluation.tasks.suites",
    "clusterkv_jax.observation",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
METHOD = ckv.CentroidKV(ckv.Budget(tokens=100))
OLD = b"what lay here before"


@dataclass(frozen=True)
class Command:
    """What is run in a folder, on inputs that `prepare` has put there, and the files that it makes."""

    run: Callable[[Path, Path], None]
    makes: tuple[str, ...]
    prepare: Callable[[Path, Path], None] = lambda inputs, folder: None
    replaces: bool = True


def command_line(*arguments: Any) -> None:
    """`clusterkv` in this process, which it ends."""
    cli.main([str(argument) for argument in arguments])


def evaluation(inputs: Path, folder: Path) -> None:
    """Six examples of two methods, one at a time."""
    model = ("--model", inputs / "model", "--methods", "full,centroidkv", "--budgets", 150, "--batch-size", 1)
    asked = ("--suite", "ruler", "--tasks", "niah_single_1,niah_single_2,vt", "--lengths", 600, "--limit", 2)
    command_line("evaluate", *model, *asked, "--output", folder / "results")


def calibration(inputs: Path, folder: Path) -> None:
    """Two pieces of a book's chapter."""
    options = ("--sequences", 2, "--tokens", 256, "--chunk", 64, "--output", folder / "calibration.yaml")
    command_line("calibrate", inputs / "model", "--data", inputs / "text.txt", *options)


def joining(inputs: Path, folder: Path) -> None:
    """Two finished runs."""
    command_line("join", inputs / "full", inputs / "centroidkv", "--output", folder / "joint")


def saving_a_cache(inputs: Path, folder: Path) -> None:
    """A cache of 256 tokens."""
    use_compilation_cache(True)
    model = ckv.load(inputs / "model")
    tokens = np.arange(256, dtype=np.int32)[None]
    cache, _ = ckv.prefill(model.params, model.config, METHOD, tokens, np.asarray([256], np.int32))
    saving.save(folder / "cache.safetensors", cache, model.config, METHOD)


def finished(inputs: Path, folder: Path) -> None:
    """A run whose answers are all there."""
    shutil.copytree(inputs / "both" / "results", folder / "results")


RUN = tuple(f"results/{name}" for name in ("results.jsonl", "run.json", "table.md", "report.html"))
COMMANDS = {
    "evaluate": Command(evaluation, RUN, replaces=False),
    "report": Command(evaluation, RUN[2:], finished),
    "join": Command(joining, tuple(name.replace("results/", "joint/") for name in RUN), replaces=False),
    "calibrate": Command(calibration, ("calibration.yaml", "calibration.png")),
    "save_cache": Command(saving_a_cache, ("cache.safetensors",)),
}


# --- what is there ---


def contents(folder: Path) -> dict[str, bytes]:
    """The files that a command has made, without times, dates and what a killed process left."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    names = {str(file.relative_to(folder)): file for file in files}
    return {name: _timeless(file) for name, file in names.items() if not name.startswith(".") and "/." not in name}


def _timeless(file: Path) -> bytes:
    raw = file.read_bytes()
    if raw == OLD:
        return raw
    if file.name == "results.jsonl":
        lines = [json.loads(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]
        return b"".join(json.dumps({**line, "seconds": 0}).encode() + b"\n" for line in lines)
    if file.name == "run.json":
        return json.dumps({**json.loads(raw), "sessions": []}).encode()
    return re.sub(rb"<pre>.*</pre>", b"", raw, flags=re.DOTALL)


def leftovers(folder: Path) -> list[str]:
    """What a killed process left and the next one should remove."""
    return [str(file.relative_to(folder)) for file in folder.rglob(".*") if file.name != ".lock"]


# --- the trial ---


@dataclass(frozen=True)
class Found:
    """What was found of one command: kills that hit it, those that left something, full disks that ended it, faults."""

    kills: int = 0
    left: int = 0
    full: int = 0
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A command with its folders, and what its unbroken run made."""

    command: Command
    inputs: Path
    folder: Path
    scratch: Path
    files: Mapping[str, bytes]
    sizes: tuple[int, ...]
    touched: tuple[float, ...]


def unbroken(command: Command, inputs: Path, scratch: Path) -> Trial:
    """The second of two runs: the programs of the first are in the compilation cache."""
    trial = Trial(command, inputs, scratch / "work", scratch, {}, (), ())
    trial.folder.mkdir(exist_ok=True)
    for _ in range(2):
        begin(trial)
        end = go(trial)
        if end.code:
            raise RuntimeError(f"The unbroken run ends with {end.code}: {end.said}")
    sizes = tuple((trial.folder / name).stat().st_size for name in command.makes)
    return replace(trial, files=contents(trial.folder), sizes=sizes, touched=end.touched)


def begin(trial: Trial) -> None:
    """The folder as the command finds it: with its inputs, and old files in the place of its own."""
    for file in trial.folder.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    trial.command.prepare(trial.inputs, trial.folder)
    for name in trial.command.makes if trial.command.replaces else ():
        (trial.folder / name).write_bytes(OLD)


def go(trial: Trial, stop: Stop | None = None) -> End:
    """One run of the command."""
    return run(lambda: trial.command.run(trial.inputs, trial.folder), trial.folder, trial.scratch, stop)


def again(trial: Trial) -> list[str]:
    """What is torn; then runs the command once more and says where its end differs from the unbroken run's."""
    left = contents(trial.folder)
    found = [f"{name} is torn" for name, raw in left.items() if not is_whole(trial, name, raw)]
    end = go(trial)
    # A kill may come when all is done; `join` then has nothing to do.
    done = left == trial.files and "name a new folder" in end.said
    if end.code and not done:
        return [*found, f"the same command ends with {end.code}: {end.said[-300:]}"]
    files = contents(trial.folder)
    other = [f"{name} differs" for name in {**files, **trial.files} if files.get(name) != trial.files.get(name)]
    return [*found, *other, *(f"{name} is left over" for name in leftovers(trial.folder))]


def is_whole(trial: Trial, name: str, raw: bytes) -> bool:
    """Whether a file is the old one or the new one; results may lack lines at their end."""
    if name.endswith("results.jsonl") and trial.files[name].startswith(raw):
        return True
    return raw in (OLD, trial.files.get(name))


def kill(trial: Trial, chance: random.Random, by_time: bool) -> Found:
    """One kill; one that comes too late is tried again."""
    killed, stop = False, Stop()
    while not killed:
        begin(trial)
        moment, call = chance.uniform(trial.touched[0], trial.touched[-1]), chance.randint(1, len(trial.touched))
        stop = Stop(seconds=moment) if by_time else Stop(call=call)
        killed = go(trial, stop).code == -signal.SIGKILL
    left = bool(leftovers(trial.folder))
    return Found(kills=1, left=left, faults=tuple(f"{stop}: {text}" for text in again(trial)))


def fill(trial: Trial, chance: random.Random, mounts: bool) -> Found:
    """One run without room: in a disk of some pages, or with files of some bytes at most."""
    if not mounts:
        begin(trial)
        stop = Stop(byte=chance.randrange(max(trial.sizes)))
        end = go(trial, stop)
        return judged(trial, end, "File too large", str(stop))
    place = replace(trial, folder=trial.scratch / "disk")
    with disk(place.folder):
        begin(place)
        there, new = (sum(-(-size // PAGE) for size in sizes) for sizes in (sizes_in(place.folder), trial.sizes))
        pages = there + chance.randint(1, max(1, new - 1))
        resize(place.folder, pages)
        end = go(place)
        resize(place.folder, 2**14)
        return judged(place, end, "the disk is full", f"{pages} pages")


def judged(trial: Trial, end: End, reason: str, stop: str) -> Found:
    """What a run without room says and leaves."""
    found = [f"{name} is left over" for name in leftovers(trial.folder)]
    if end.code not in (0, 2) or (end.code == 2 and not is_sentence(end.said, trial.folder, reason)):
        found.append(f"ends with {end.code}: {end.said[-300:]}")
    return Found(full=end.code == 2, faults=tuple(f"{stop}: {text}" for text in (*found, *again(trial))))


def is_sentence(said: str, folder: Path, reason: str) -> bool:
    """Whether the last thing said is one sentence that names a file of the folder and the reason."""
    error = re.search(r"^Error: (.*)\Z", said.strip(), re.MULTILINE)
    return error is not None and str(folder) in error[1] and error[1].endswith(f"{reason}.")


def sizes_in(folder: Path) -> list[int]:
    """Bytes of every file."""
    return [file.stat().st_size for file in folder.rglob("*") if file.is_file()]


# --- inputs ---


def make_model(inputs: Path) -> None:
    """Two layers of random weights, with the demo model's tokenizer."""
    published = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = registry.from_hf(published | small)
    params = parameters.init(jax.random.key(0), config)
    loading.save_huggingface(inputs / "model", params, config, tokenizer_json=DEMO / "tokenizer.json", dtype="float32")
    shutil.copy(DEMO.parents[1] / "configs" / "demo" / "mast_head.txt", inputs / "text.txt")


def make_run(folder: Path, name: str, method: Method) -> None:
    """A finished run of a method, by a model that answers as it is asked."""
    prompts = [EncodedPrompt(tuple(range(40)), (i,)) for i in range(40)]
    jobs = [Job(i, Case(f"t/{i}", f"t{i % 2}", answers=(str(i % 7),)), prompt) for i, prompt in enumerate(prompts)]
    entries = [MethodEntry(name, "0.5", method)]

    def answers(batches):
        for batch in batches:
            yield batch, [Response(str(job.prompt.question[0] % 5), rows=20) for job in batch.jobs]

    config = settings({"suite": "ruler", "model": "stub"}, jobs, entries)
    runner.record(folder, config, {"n": name}, plan(jobs, entries, 16), answers)


def make_inputs(inputs: Path, names: Sequence[str]) -> None:
    """What the commands read."""
    steps: list[Callable[[], Any]] = []
    if set(names) - {"join"}:
        steps.append(lambda: make_model(inputs))
    if "report" in names:
        steps.append(lambda: evaluation(inputs, inputs / "both"))
    if "join" in names:
        steps.append(lambda: make_run(inputs / "full", "full", ckv.Full()))
        steps.append(lambda: make_run(inputs / "centroidkv", "centroidkv", METHOD))
    for step in steps:
        if (end := run(step, inputs, inputs)).code:
            raise RuntimeError(end.said)


def main(
    only: Annotated[str, typer.Option(help=f"Of {', '.join(COMMANDS)}.")] = ",".join(COMMANDS),
    kills: Annotated[int, typer.Option(help="Of each command.")] = 50,
    full: Annotated[int, typer.Option(help="Runs of each command without room.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the moments and bytes.")] = 0,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for compiled programs.", show_default="a temporary one")
    ] = None,
) -> None:
    """Print how often each command was stopped, what was left, and every fault; exit code 1 if there is one."""
    for module in PRELOADED:
        importlib.import_module(module)
    chance, grid, faults = random.Random(seed), Table(box=SIMPLE_HEAD), []
    for column in ("command", "kills", "of them with leftovers", "files cut", "full disks", "faults"):
        grid.add_column(column, justify="left" if column == "command" else "right")
    with tempfile.TemporaryDirectory() as name:
        scratch, inputs = Path(name), Path(name) / "inputs"
        inputs.mkdir()
        os.environ["XDG_CACHE_HOME"] = str(cache or scratch / "cache")
        mounts = may_mount(scratch / "disk")
        make_inputs(inputs, only.split(","))
        for command in only.split(","):
            trial, found = unbroken(COMMANDS[command], inputs, scratch), []
            steps = [partial(kill, by_time=i % 2 == 0) for i in range(kills)]
            steps += [partial(fill, mounts=False)] * full + [partial(fill, mounts=True)] * full * mounts
            for step in track(steps, command, console=Console(stderr=True)):
                found.append(step(trial, chance))
            cut, disks = found[kills : kills + full], found[kills + full :]
            new = [f"{command}: {text}" for one in found for text in one.faults]
            counts = (sum(one.kills for one in found), sum(one.left for one in found))
            counts += (sum(one.full for one in cut), sum(one.full for one in disks), len(new))
            grid.add_row(command, *map(str, counts))
            faults += new
    Console().print(grid)
    for fault in faults:
        print(fault)
    raise typer.Exit(bool(faults))


if __name__ == "__main__":
    typer.run(main)
