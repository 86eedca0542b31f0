"""`clusterkv plan`: whether a model, a method and a context fit a topology, before anyone pays for it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterkv_jax.cli.options import Chunk, Reading, Window
from clusterkv_jax.cli.terminal import can_draw, one_sentence_errors, plain_console

EXAMPLES = """[bold]Examples[/bold]

Does Llama-3.1-70B read 131,072 tokens on sixteen v5e chips, with a fifth of
the cache?

  clusterkv plan --model llama-3.1-70b --method centroidkv --cache-ratio 0.2 \\
    --context 131072 --topology v5e:4x4

Your own model's shape, on eight H200, with a picture of memory over context:

  clusterkv plan --model ./my-llama --method snapkv --cache-ratio 0.25 \\
    --context 32768 --batch 8 --topology h200:8 --plot memory.png

No chip is needed and no weights: TPU programs are compiled by libtpu (the
extra `plan`).
"""

MODEL = "A packaged shape such as llama-3.1-8b, a folder with a config.json, a hub id (@revision), or 'demo'."
_size = partial(typer.Option, rich_help_panel="Request")


def plan(
    model: Annotated[str, typer.Option(help=MODEL)],
    topology: Annotated[str, typer.Option(help="Chips: v5e:4x4, v5p:2x2x2, v6e:4x4, h100:8 or h200:8.")],
    context: Annotated[int, _size(help="Tokens of each prompt.", min=1)],
    method: Annotated[str, typer.Option(help="A method, a preset, its .yaml file, or FILE.py:Class.")] = "full",
    cache_ratio: Annotated[float | None, typer.Option(help="Share of the cache that is kept, such as 0.2.")] = None,
    batch: Annotated[int, _size(help="Prompts read together.", min=1)] = 1,
    max_new_tokens: Annotated[int, _size(help="Tokens that may follow.", min=1)] = 512,
    reading: Reading = "whole",
    window: Window = 4096,
    chunk: Chunk = 2048,
    mesh: Annotated[
        str | None, typer.Option(help="Axes of the mesh, such as data=2,model=8.", show_default="by heads and batch")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Weights of layers in codes: int8 or int4.", show_default="numbers of the published type"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory over context, as .png (needs matplotlib).")] = None,
    time_limit: Annotated[float, typer.Option(help="Most seconds for compiling.", min=1)] = 1200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Say whether a model and its cache fit a topology: memory, limits, collectives and the least time of a token."""
    with one_sentence_errors(debug):
        from clusterkv_jax.generation.batch import gate_of
        from clusterkv_jax.planning.plan_types import PlanRequest
        from clusterkv_jax.planning.process import ask
        from clusterkv_jax.planning.report import plan as plan_of

        if weights not in (None, "int8", "int4"):
            raise ValueError(f"--weights must be int8 or int4, or be left out, got {weights!r}.")
        how: Any = {"weights": weights, "gate": gate_of(reading, window, chunk, None)}
        question = PlanRequest(model, method, cache_ratio, context, batch, max_new_tokens, topology, mesh, **how)
        chips = check(question)
        if plot is not None:
            from clusterkv_jax.cli import plan_picture

            plan_picture.check(plot)
            plot = plot if can_draw("the plan") else None
        start = time.monotonic()
        with _progress(as_json) as progress:
            measures = ask(question, time_limit, progress)
            if plot is not None:
                whole = replace(question, method="full", ratio=None, gate=None)
                both = {"full": ask(whole, time_limit, progress), method: measures}
                plan_picture.draw(both, chips, plot)
        found = plan_of(question, measures, chips) | {"seconds": round(time.monotonic() - start, 1)}
        if as_json:
            print(json.dumps(found, indent=2))
            return
        show(found, plain_console())
        if plot is not None:
            plain_console().print(f"Drawn in {plot}", highlight=False, soft_wrap=True)


def check(question: Any) -> Any:
    """The question's topology. Raises ValueError for what would be noticed only by the worker, or not at all."""
    from clusterkv_jax.planning.shapes import model_config
    from clusterkv_jax.planning.topology import choose_mesh, parse_topology
    from clusterkv_jax.presets import find_preset

    chips = parse_topology(question.topology)
    config = model_config(question.model)
    choose_mesh(config, chips.count, question.batch, question.mesh)
    if question.context > config.max_positions:
        raise ValueError(f"--context {question.context} exceeds the model's {config.max_positions} positions.")
    entry = find_preset(question.method)
    if question.ratio is not None and not entry.takes_budget:
        raise ValueError(f"--method {question.method} keeps the whole cache and takes no --cache-ratio.")
    if question.ratio is None and entry.takes_budget and entry.budget is None:
        raise ValueError(f"--method {question.method} needs --cache-ratio.")
    return chips


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is compiled; gone when done."""
    console = plain_console(stderr=True, quiet=quiet)
    with console.status("Starting ...") as spinner:
        yield lambda doing: spinner.update(Text(f"{doing[:1].upper()}{doing[1:]} ..."))


def show(found: dict[str, Any], console: Console) -> None:
    """A plan as tables and sentences."""
    from clusterkv_jax.planning.report import mesh_text, verdict

    ratio = "" if found["cache_ratio"] is None else f" {100 * found['cache_ratio']:g}%"
    title = f"{found['model']}, {found['method']}{ratio}, {found['batch']} x {found['context']:,} tokens"
    console.print(f"{title}, {found['topology']} as {mesh_text(found['mesh'])}", highlight=False)
    console.print(_memory(found))
    console.print(verdict(found), highlight=False, soft_wrap=True)
    console.print(_limits(found))
    console.print(_step(found))
    for line in (*found["refusals"], *found["notes"]):
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def _memory(found: dict[str, Any]) -> Table:
    table = _table("memory of each chip", "GiB")
    hbm = found["hbm"]
    compared = f", {hbm['cache'] / found['full_cache']:.1%} of the full one" if found["full_cache"] else ""
    rows = {
        "weights": "weights",
        "cache": f"cache{compared}",
        "programs": "compiled programs",
        "prefill_temporaries": "temporaries of prefill",
        "decode_temporaries": "temporaries of decode",
        "total": "in use at most: with the larger of both",
        "capacity": "the chip's",
    }
    for key, name in rows.items():
        table.add_row(name, _gib(hbm[key]))
    return table


def _limits(found: dict[str, Any]) -> Table:
    table = _table("all else equal", "at most")
    table.add_row("batch", f"{found['largest_batch']:,}" if found["largest_batch"] else "none")
    table.add_row("context", f"{found['longest_context']:,}" if found["longest_context"] else "none")
    if found["cache_ratio"] is not None:
        table.add_row("cache ratio", f"{found['largest_ratio']:g}" if found["largest_ratio"] else "none")
    fewest = found["fewest_chips"]
    table.add_row("fewest chips, by shapes", f"{fewest['chips']} as {fewest['mesh']}" if fewest else "none")
    return table


def _step(found: dict[str, Any]) -> Table:
    table = _table("a decode step", "count", "KB sent by a chip", "ms at least")
    for one in found["collectives"]:
        table.add_row(one["kind"], f"{one['count']:,}", f"{one['bytes'] / 1e3:,.0f}")
    floor = found["roofline"]
    table.add_row("sent over the links", "", "", f"{floor['sent_ms']:.3f}")
    table.add_row("read from memory", "", "", f"{floor['read_ms']:.3f}")
    table.add_row("a token of each sequence", "", "", f"{floor['ms_per_token']:.3f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"
