"""`clusterkv benchmark`: time and memory of methods, and of what other libraries do with the same shapes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterkv_jax.cli.options import (
    Weights,
    budgets_option,
    cache_dtype_option,
    check_taken,
    methods_option,
    parse_entries,
    split,
)
from clusterkv_jax.cli.terminal import one_sentence_errors, plain_console

EXAMPLES = """[bold]Examples[/bold]

The demo model, about a minute on a CPU:

  clusterkv benchmark

Llama-3.1-8B's shapes with random weights, beside transformers:

  clusterkv benchmark --model llama-3.1-8b --methods full,centroidkv \\
    --budgets 0.2 --lengths 16k,64k --batches 1,16 \\
    --peers transformers,transformers-static --output speed

Requests that come and go, with 1k to 16k tokens, in 16 slots:

  clusterkv benchmark --model llama-3.1-8b --methods full,centroidkv \\
    --budgets 0.2 --engine 200 --lengths 1k,16k --batches 16

The same command goes on where it was stopped, and prints the table of a run
that is done.
"""
MODEL = "'demo', a folder or hub id in Hugging Face format, or a packaged shape such as llama-3.1-8b."
STORED = "How rows are stored, between commas: model (its own type), int8, float8_e4m3, int4."
BUDGET = "0.2"  # where none is given
_what = partial(typer.Option, rich_help_panel="What is timed")
_output = partial(typer.Option, rich_help_panel="Output")


def benchmark(
    model: Annotated[str, typer.Option(help=MODEL)] = "demo",
    methods: Annotated[list[str], methods_option(rich_help_panel="What is timed")] = ["full,centroidkv"],
    budgets: Annotated[list[str] | None, budgets_option(rich_help_panel="What is timed", show_default=BUDGET)] = None,
    cache_dtype: Annotated[
        list[str], cache_dtype_option(help=STORED, rich_help_panel="What is timed", show_default=True)
    ] = ["model"],
    lengths: Annotated[str, _what(help="Tokens of the prompts, such as 4096 or 16k, between commas.")] = "4k",
    batches: Annotated[str, _what(help="Sequences that decode together, between commas.")] = "1",
    peers: Annotated[
        str, _what(help="transformers, transformers-static, kvpress, between commas; '' for none.")
    ] = "transformers",
    repeats: Annotated[int, _what(help="Timings of each, beside the first, which compiles.", min=1)] = 5,
    new_tokens: Annotated[int, _what(help="Tokens generated in each timing.", min=2)] = 289,
    engine: Annotated[
        int,
        _what(
            help="Time so many requests that come and go, instead of batches: --batches are slots, --lengths the least "
            "and the most tokens.",
            min=0,
            show_default=False,
        ),
    ] = 0,
    weights: Weights = None,
    mesh: Annotated[
        str | None, _what(help="Devices that share the model, such as model=2.", show_default="one device")
    ] = None,
    output: Annotated[Path | None, _output(help="Folder of the results; a run that was stopped goes on there.")] = None,
    markdown: Annotated[
        Path | None,
        _output(help="Page whose lines <!-- benchmark NAME --> and <!-- end --> get the table; NAME is --output's."),
    ] = None,
    as_json: Annotated[bool, _output("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, _output("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Time methods by prompt length and batch: first token, each token after it, memory, and the floor of both."""
    with one_sentence_errors(debug):
        from clusterkv_jax.benchmark import table
        from clusterkv_jax.benchmark.run import run
        from clusterkv_jax.checkpoints.in_codes import weights_as

        if markdown is not None and output is None:
            raise ValueError(f"--markdown {markdown} needs --output, whose name says which table of the page it is.")
        asked = the_question(
            model, methods, budgets, lengths, batches, peers, repeats, new_tokens, mesh, split(cache_dtype), engine
        )
        weights_as(weights, "cpu")
        asked = replace(asked, weights=weights)
        with _progress(as_json) as on_step:
            results = run(asked, output, on_step)
        text = table.markdown(results.rows, results.about)
        found = as_object(results)
        notes = list(results.notes)
        if output is not None:
            notes += _write(output, results, text, found)
        if markdown is not None and output is not None:
            table.put_into(markdown, output.resolve().name, text)
        if as_json:
            print(json.dumps(found, indent=2))
            return
        print(text)
        for note in notes:
            plain_console(stderr=True).print(note, style="dim", highlight=False, soft_wrap=True)


def the_question(
    model: str,
    methods: list[str],
    budgets: list[str] | None,
    lengths: str,
    batches: str,
    peers: str,
    repeats: int,
    new_tokens: int,
    mesh: str | None,
    dtypes: tuple[str, ...],
    requests: int = 0,
) -> Any:
    """What is asked, checked. Raises ValueError for what no side could answer."""
    from clusterkv_jax.benchmark.grid import GridRequest, check_peers, parse_batch, parse_dtypes, parse_tokens
    from clusterkv_jax.planning.shapes import model_config, packaged_shapes
    from clusterkv_jax.presets import is_file, written
    from clusterkv_jax.runtime.sharding import mesh_sizes

    stored = parse_dtypes(dtypes)
    # Every type is tried with every method, so that one which a method cannot store is told before anything is timed.
    shares = split(budgets or [BUDGET])
    entries, *_ = [parse_entries(split(methods), shares, cache_dtype=dtype) for dtype in stored]
    if budgets:
        check_taken(entries, shares)
    counts = tuple(map(parse_tokens, split(lengths))), tuple(map(parse_batch, split(batches)))
    for option, texts, values in zip(("--lengths", "--batches"), (lengths, batches), counts, strict=True):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{option} takes one or more different numbers, got {texts!r}.")
    check_peers(split(peers))
    if mesh is not None:
        mesh_sizes(mesh)
    config = model_config(model)
    if model not in packaged_shapes() and max(counts[0]) + new_tokens > config.max_positions:
        raise ValueError(
            f"--lengths {max(counts[0])} and {new_tokens} new tokens exceed the model's "
            f"{config.max_positions} positions."
        )
    budgets_of = tuple((entry.name, _number(entry.budget)) for entry in entries)
    others = () if requests else split(peers)  # what other libraries time are batches
    files = tuple(written(entry.method) for entry in entries if is_file(entry.name))
    return GridRequest(model, budgets_of, *counts, others, repeats, new_tokens, mesh, stored, requests, files)


def _number(budget: str) -> float | int | None:
    """A share below 1, or rows; None for the full cache."""
    if budget.isdigit() and budget != "1":
        return int(budget)
    return None if float(budget) >= 1 else float(budget)


def as_object(results: Any) -> dict[str, Any]:
    """The results for programs."""
    from clusterkv_jax.benchmark.summary import as_json

    return {**results.about, "rows": [as_json(row) for row in results.rows], "notes": results.notes}


def _write(output: Path, results: Any, text: str, found: dict[str, Any]) -> list[str]:
    """table.md, results.json and pictures; a sentence where there are no pictures."""
    from clusterkv_jax.cli import benchmark_picture
    from clusterkv_jax.storage.files import write_whole

    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "table.md", f"{text}\n")
    write_whole(output / "results.json", json.dumps(found, indent=2) + "\n")
    try:
        benchmark_picture.draw(results.rows, output)
    except ValueError as error:
        return [str(error)]
    return []


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A line on standard error for each timing, and what is left."""
    console = plain_console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    with console.status("Starting ...") as spinner:

        def show(step: Any) -> None:
            from clusterkv_jax.benchmark.table import name

            if "failed" in step.line:
                what = step.line["failed"]
            else:
                what = f"TTFT {step.line['ttft_s']:.3f} s, TPOT {1e3 * step.line['tpot_s']:.2f} ms"
            left = f"{step.left_s:,.0f} s left"
            repeat = f"repeat {step.repeat}" if step.repeat else "first call"
            console.print(f"[{step.number}/{step.total}] {name(step.cell)}, {repeat}: {what}; {left}")
            spinner.update(f"{step.number} of {step.total} timings, {left} ...")

        yield show
