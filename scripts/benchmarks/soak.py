"""What a process that lives long takes: hundreds of requests by all methods, and a large evaluation.

\b
    python scripts/benchmarks/soak.py requests                   500 requests, 120 different ones
    python scripts/benchmarks/soak.py evaluation                 every preset with 4 budgets and 6 lengths
    python scripts/benchmarks/soak.py requests --requests 20     in small

Nearly all of the time goes into compiling. XLA_FLAGS=--xla_cpu_use_fusion_emitters=false shortens it on a CPU.

Each sample is a line of requests.jsonl or evaluation.jsonl: resident memory of the host, memory mappings, bytes in use
on the device, live arrays. The curves are drawn beside it, as .svg, when the run is over. A run that was stopped goes
on, in a new process, where the same command finds its file; a dotted line in the picture says where.

Nothing may grow for ever: resident memory and mappings rise while programs are compiled, and stay below half of the
mappings that Linux grants, where the programs longest unused are dropped.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.progress import track

import clusterkv_jax as ckv
from clusterkv_jax import cli
from clusterkv_jax.checkpoints.loading import save_huggingface
from clusterkv_jax.evaluation.report.plots import COLOURS, as_svg, new_panels
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.presets import list_presets, preset
from clusterkv_jax.runtime import programs
from clusterkv_jax.storage.files import write_whole

WIDTHS = (192, 256, 320, 384, 512, 640)  # most tokens of a prompt, as `batch.bucket` makes them
LENGTHS, BUDGETS = "384,512,640,768,896,1024", "0.75,0.5,0.375,0.25"
MEASURES = {"resident": "host MB", "device": "device MB", "mappings": "mappings", "arrays": "live arrays"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)
Output = Annotated[Path, typer.Option(help="Folder of the samples and the picture.")]
ModelName = Annotated[str, typer.Option(help="'demo', or a folder of a Llama model with a tokenizer.")]
Layers = Annotated[int, typer.Option(help="Only the model's first layers: they decide how long programs compile.")]
Limit = Annotated[int | None, typer.Option(help="Most mappings.", show_default="half of what Linux grants")]


@app.command()
def requests(
    requests: Annotated[int, typer.Option(help="How many in all.")] = 500,
    kinds: Annotated[int, typer.Option(help="Different ones among them, which compile programs of their own.")] = 120,
    model: ModelName = "demo",
    layers: Layers = 2,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Of the kinds, their order and the prompts.")] = 0,
    output: Output = Path("docs/results/soak"),
) -> None:
    """Answer requests of mixed methods, widths, batches, questions and sampling; a sample after each."""
    network = first_layers(ckv.load(model), layers)
    names = [*fitting(network.config), "clusterkv, host store"]
    with samples(output / "requests.jsonl") as (earlier, write):
        for number in track(range(len(earlier), requests), "requests", console=Console(stderr=True)):
            kind = number if number < kinds else int(np.random.default_rng((seed, number)).integers(kinds))
            begin = time.perf_counter()
            answer(network, names[kind % len(names)], np.random.default_rng((seed, 0, kind)), number)
            programs.make_room(limit)
            write(request=number, method=names[kind % len(names)], seconds=round(time.perf_counter() - begin, 3))
    report(output / "requests.jsonl", "request", limit)


@app.command()
def evaluation(
    methods: Annotated[str, typer.Option(help="Presets, between commas.", show_default="all")] = "",
    budgets: Annotated[str, typer.Option(help="Shares of the cache, between commas.")] = BUDGETS,
    lengths: Annotated[str, typer.Option(help="Tokens of the examples, between commas.")] = LENGTHS,
    every: Annotated[float, typer.Option(help="Seconds between two samples.")] = 2.0,
    model: ModelName = "demo",
    layers: Layers = 2,
    folder: Annotated[Path, typer.Option(help="Of the model's first layers and the evaluation's results.")] = Path(
        "results/soak"
    ),
    output: Output = Path("docs/results/soak"),
) -> None:
    """Run `clusterkv evaluate` in this process, an example of each length; a sample every few seconds."""
    network = first_layers(ckv.load(model), layers)
    tokenizer = folder / "tokenizer.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(tokenizer, network.tokenizer.backend_tokenizer.to_str())
    save_huggingface(folder / "model", network.params, network.config, tokenizer_json=tokenizer, dtype="float32")
    command = ["evaluate", "--suite", "ruler", "--tasks", "niah_single_1", "--limit", "1", "--lengths", lengths]
    command += ["--methods", methods or ",".join(fitting(network.config)), "--budgets", budgets]
    command += ["--model", str(folder / "model"), "--output", str(folder / "run"), "--no-compilation-cache", "--debug"]
    with samples(output / "evaluation.jsonl") as (earlier, write):
        before = earlier[-1]["minutes"] if earlier else 0.0
        begin, over = time.perf_counter(), threading.Event()

        def watch() -> None:
            while not over.wait(every):
                write(minutes=round(before + (time.perf_counter() - begin) / 60, 3))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            cli.app(command, standalone_mode=False)
        finally:
            over.set()
            thread.join()
    report(output / "evaluation.jsonl", "minutes", None)


# --- what is run ---


def first_layers(model: ckv.Model, layers: int) -> ckv.Model:
    """The model without its later layers."""
    config = replace(model.config, num_layers=min(layers, model.config.num_layers))
    return replace(model, params={**model.params, "layers": model.params["layers"][:layers]}, config=config)


def fitting(config: ModelConfig) -> list[str]:
    """The presets that were not calibrated for a model of other layers or heads."""

    def fits(entry: Any) -> bool:
        try:
            return entry.calibration is None or entry.calibration.check(config) is None
        except ValueError:
            return False

    return [name for name, entry in list_presets().items() if fits(entry)]


def answer(model: ckv.Model, name: str, rng: np.random.Generator, number: int) -> ckv.Result:
    """A request: its method by name, its sizes by `rng`, its tokens by its number."""
    name, *host = name.split(", ")
    settings: dict[str, Any] = {"store": "host"} if host else {}
    budget = ckv.Budget(ratio=float(rng.choice([0.5, 0.75]))) if list_presets()[name].takes_budget else None
    width, batch, asks = int(rng.choice(WIDTHS)), int(rng.integers(1, 4)), bool(rng.integers(2))
    tokens = np.random.default_rng(number)

    def draw(length):
        return tokens.integers(1, model.config.vocab_size, size=length).tolist()

    return ckv.generate(
        model,
        [draw(int(tokens.integers(width - 19, width + 1))) for _ in range(batch)],
        method=preset(name, budget, **settings),
        questions=[draw(12) for _ in range(batch)] if asks else None,
        max_new_tokens=int(rng.choice([8, 40])),
        sampling=ckv.Sampling(temperature=float(rng.choice([0.0, 0.8]))),
        seed=number,
    )


# --- samples ---


@contextmanager
def samples(file: Path) -> Iterator[tuple[list[dict[str, Any]], Callable[..., None]]]:
    """Those of earlier processes, and write(**facts): one more, of this process, with these facts."""
    file.parent.mkdir(parents=True, exist_ok=True)
    earlier = read(file)
    process = earlier[-1]["process"] + 1 if earlier else 0
    with file.open("a", encoding="utf-8") as opened:

        def write(**facts: Any) -> None:
            opened.write(json.dumps({**facts, "process": process, **sample()}) + "\n")
            opened.flush()

        yield earlier, write


def read(file: Path) -> list[dict[str, Any]]:
    """The samples of a file; a torn last line is cut off."""
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0] if file.exists() else ""
    write_whole(file, whole + "\n" * bool(whole))
    return [json.loads(line) for line in whole.splitlines()]


def sample() -> dict[str, int]:
    """What this process takes now; the device's bytes where it counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    device = jax.local_devices()[0].memory_stats() or {}
    return {
        "resident": pages * 4096,
        "mappings": programs.mappings(),
        "arrays": len(jax.live_arrays()),
        **({"device": device["bytes_in_use"]} if "bytes_in_use" in device else {}),
    }


def report(file: Path, over: str, limit: int | None) -> None:
    """Draw the samples, and say how much each measure grew over their second half."""
    taken = read(file)
    limit = int(Path("/proc/sys/vm/max_map_count").read_text()) // 2 if limit is None else limit
    write_whole(file.with_suffix(".svg"), draw(taken, over, limit))
    for name in MEASURES:
        values = [line[name] for line in taken if name in line]
        if values:
            half = values[len(values) // 2 :]
            print(f"{name}: {values[0]:,} at first, at most {max(values):,}; {half[0]:,} at half, {half[-1]:,} at last")
    print(f"Written to {file} and {file.with_suffix('.svg')}")


def draw(taken: list[dict[str, Any]], over: str, limit: int) -> str:
    """A panel per measure."""
    names = [name for name in MEASURES if name in taken[0]]
    figure, panels = new_panels(7.5, 0.6 + 1.7 * len(names), len(names))
    places = [line[over] for line in taken]
    starts = [line[over] for last, line in pairwise(taken) if line["process"] > last["process"]]
    for axes, name, colour in zip(panels, names, COLOURS, strict=False):
        unit = 1e6 if MEASURES[name].endswith("MB") else 1
        axes.plot(places, [line[name] / unit for line in taken], color=colour, linewidth=1)
        axes.set_ylabel(MEASURES[name], fontsize=8)
        axes.set_ylim(0, None)
        for start in starts:
            axes.axvline(start, color="black", linestyle=":", linewidth=0.8)
        if name == "mappings":
            axes.axhline(limit, color="black", linestyle="--", linewidth=0.8)
            axes.annotate(f"{limit:,}: programs are dropped", (places[0], limit), fontsize=7, va="bottom")
    panels[-1].set_xlabel(over)
    return as_svg(figure)


if __name__ == "__main__":
    # What is measured is what programs take, not how fast they are.
    jax.config.update("jax_disable_most_optimizations", True)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("clusterkv_jax.runtime.programs").setLevel(logging.INFO)
    app()
