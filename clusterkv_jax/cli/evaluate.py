"""`clusterkv evaluate`: a suite through methods and budgets, as results.jsonl, run.json, table.md and report.html."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from clusterkv_jax.cli.named import by_class, meant
from clusterkv_jax.cli.options import (
    CALIBRATION,
    MODEL,
    CacheFolder,
    CompilationCache,
    CoordinatorAddress,
    Distributed,
    Mesh,
    NumProcesses,
    PeerTimeout,
    ProcessId,
    Weights,
    budgets_option,
    cache_dtype_option,
    check_taken,
    methods_option,
    parse_count,
    parse_entries,
    split,
    stored_as,
)
from clusterkv_jax.cli.results_folder import results_folder
from clusterkv_jax.cli.terminal import one_sentence_errors, pace, plain_console, use_compilation_cache

_what = partial(typer.Option, rich_help_panel="What is asked")


def evaluate(
    suite: Annotated[str, typer.Option(help="ruler, longbench, niah, gsm8k, pg19 ...; 'list' shows all of them.")],
    model: Annotated[str, typer.Option(help=MODEL)] = "demo",
    methods: Annotated[list[str], methods_option()] = ["full"],
    budgets: Annotated[list[str], budgets_option()] = ["1.0"],
    cache_dtype: Annotated[str | None, cache_dtype_option()] = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="Folder of the results, or gs://; a run goes on there, and takes more methods, budgets and tasks.",
            show_default="results/SUITE-MODEL",
        ),
    ] = None,
    tasks: Annotated[
        str, _what(help="Tasks of the suite, or groups of them, between commas.", show_default="all")
    ] = "",
    lengths: Annotated[str, _what(help="Tokens of generated examples, between commas.")] = "4096",
    limit: Annotated[
        int | None,
        _what(help="Most examples of each task, and of each length, depth or book.", min=1, show_default="the suite's"),
    ] = None,
    query_aware: Annotated[
        bool, _what("--query-aware", help="Let methods see the question before they compress.")
    ] = False,
    data: Annotated[str | None, _what(help="Local file or folder, or 'hub', for tasks from data sets.")] = None,
    books: Annotated[
        str | None,
        _what(help="Local book or folder of books, or 'hub' for PG19.", show_default="two books of the package"),
    ] = None,
    seed: Annotated[int, _what(help="Of everything that is generated.", min=0)] = 0,
    calibration: Annotated[str | None, typer.Option(help=f"{CALIBRATION} All methods get it.")] = None,
    batch_size: Annotated[int, typer.Option(help="Most examples answered together.", min=1)] = 16,
    dtype: Annotated[str | None, typer.Option(help="Type of the parameters.", show_default="as stored")] = None,
    weights: Weights = None,
    published: Annotated[
        str | None, typer.Option(help="Tables of papers to print beside, between commas.", show_default="the model's")
    ] = None,
    mesh: Mesh = None,
    distributed: Distributed = False,
    coordinator_address: CoordinatorAddress = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    peer_timeout: PeerTimeout = 120,
    compilation_cache: CompilationCache = True,
    cache_folder: CacheFolder = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Answer a suite's questions with compressed caches and make a table of the scores."""
    with ExitStack() as stack:
        stack.enter_context(one_sentence_errors(debug))
        if suite == "list":
            _list_suites()
            return
        from clusterkv_jax.blocks.embedding import number_dtype
        from clusterkv_jax.calibration import read
        from clusterkv_jax.checkpoints.loading import calibrated
        from clusterkv_jax.cli import distributed_run
        from clusterkv_jax.evaluation import batching, manifest, outputs, records, replicas, responses
        from clusterkv_jax.evaluation.settings import settings
        from clusterkv_jax.evaluation.tasks import cases as building
        from clusterkv_jax.evaluation.tasks import suites
        from clusterkv_jax.presets import check_calibrated, described, preset

        asked = {"query-aware": query_aware, "limit": limit, "seed": seed, "data": data, "books": books}
        asked |= {"dtype": dtype, "weights": weights, "cache": cache_dtype, "calibration": calibration}
        output = output or results_folder(suite, model, **asked)
        results = outputs.at(output)
        use_compilation_cache(compilation_cache, cache_folder)
        who = coordinator_address, num_processes, process_id
        others = stack.enter_context(distributed_run.joined(distributed, results, *who, peer_timeout, debug))
        model = model if "://" in model else Path(model).as_posix()  # T/ is T
        peers = _peers(suite, model, published)
        measured = None if calibration is None else read(calibration)
        names = split(methods)
        entries = parse_entries(names, split(budgets), measured, cache_dtype, meant(model, names, measured))
        entries = by_class(entries)
        check_taken(entries, split(budgets))
        check_calibrated(model, measured, {entry.name: entry.method for entry in entries})
        entries = batching.with_full(entries, preset("full", **stored_as(cache_dtype)))
        options = suites.Options(split(tasks), tuple(map(parse_count, split(lengths))), limit, data, books, seed)
        everywhere = distributed_run.the_replicas(mesh, others)
        process = 0 if others is None else others.index
        if process == 0:
            stack.enter_context(results.opened())
        here = [replica for replica in everywhere if process in replica.processes]
        network = here[0].load(model, dtype, weights)
        network = network if measured is None else calibrated(network, measured)
        networks = [network, *(replica.copy(network) for replica in here[1:])]
        if network.tokenizer is None:
            raise ValueError(f"Model {model} has no tokenizer, which evaluation needs.")
        positions = network.config.max_positions
        if without := suites.left_out(suite, options):
            note = f"{', '.join(without)} left out: they ask about a data set; add --data FOLDER or --data hub."
            plain_console(stderr=True, highlight=False).print(note, style="dim")
        with plain_console(stderr=True).status(Text(f"Building the cases of {suite} ...")):
            examples = suites.cases(suite, options, network.tokenizer, positions)
            order = building.query_aware if query_aware else lambda case: case
            jobs = [
                batching.Job(i, case, building.build_prompt(order(case), network.tokenizer, positions))
                for i, case in enumerate(examples)
            ]
        config = {
            "suite": suite,
            "model": model,
            "parameters": network.config.weights,
            "dtype": str(number_dtype(network.params)),
            "query_aware": query_aware,
            "batch_size": batch_size,
        }
        config = settings(config, jobs, entries, partial(described, network))
        batches = batching.plan(jobs, entries, batch_size, partial(responses.possible, network))
        serving: dict[int, Any] = {}
        answers = [
            replica.responder(each, batches, batch_size, partial(serving.__setitem__, replica.number))
            for replica, each in zip(here, networks, strict=True)
        ]
        team = replicas.ReplicaGroup(everywhere, list(zip(here, answers, strict=True)), process)
        if others is not None and process:
            distributed_run.serve(config, batches, team, others)
            return
        about = manifest.about(mesh, None if others is None else others.hosts)
        with pace(len(jobs) * len(entries), sum(len(replica.devices) for replica in everywhere), serving) as on_lines:
            lines = distributed_run.answered(results, config, about, batches, team, others, on_lines)
        summary = _write(results.folder, records.read_run(results.folder), lines, peers)
        results.complete()
        _show(summary, output)


def join(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `clusterkv evaluate` wrote.")],
    output: Annotated[Path, typer.Option(help="Folder of the joint results; new.")],
    published: Annotated[
        str | None, typer.Option(help="Tables of papers to print beside, between commas.", show_default="the model's")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Make one table and report of runs that shared a suite's methods among them, on several devices say."""
    with one_sentence_errors(debug):
        from clusterkv_jax.evaluation import runner
        from clusterkv_jax.storage.files import replacing, write_whole

        run, lines = runner.join(folders)
        peers = _peers(run["config"]["suite"], run["config"]["model"], published)
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as folder:  # a part of it would be in the way of the next attempt
            if output.exists():
                raise ValueError(f"{output} exists; name a new folder.")
            folder.mkdir()
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_whole(folder / runner.RESULTS, text)
            write_whole(folder / runner.RUN, json.dumps(run, indent=2, ensure_ascii=False) + "\n")
            summary = _write(folder, run, lines, peers)
        _show(summary, output)


def lm_eval(
    context: typer.Context,
    mesh: Mesh = None,
    distributed: Distributed = False,
    coordinator_address: CoordinatorAddress = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    peer_timeout: PeerTimeout = 120,
    cache_folder: CacheFolder = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """lm-evaluation-harness's own command, with this project's model: --model clusterkv --model_args method=..."""
    from clusterkv_jax.evaluation.extras import library

    with ExitStack() as stack:
        stack.enter_context(one_sentence_errors(debug))
        library("lm_eval", "clusterkv lm-eval")
        from clusterkv_jax.cli import distributed_run
        from clusterkv_jax.evaluation import lm_eval_model

        use_compilation_cache(True, cache_folder)
        who = coordinator_address, num_processes, process_id
        others = stack.enter_context(distributed_run.joined(distributed, None, *who, peer_timeout, debug))
        everywhere = distributed_run.the_replicas(mesh, others)
        if others is not None and others.index:
            lm_eval_model.serve(lm_eval_model.Pod(everywhere, others.index), others)
        else:
            lm_eval_model.main(context.args, lm_eval_model.Pod(everywhere, 0, others))


# What the harness's command is told goes to it as it is, --help too.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _peers(suite: str, model: str, published: str | None) -> list[Any]:
    """The tables to print beside: those named between commas, or the suite's and model's own."""
    from clusterkv_jax.evaluation.report import table

    return [table.published(name) for name in (table.matching(suite, model) if published is None else split(published))]


def _write(folder: Path, run: Any, lines: Sequence[Any], peers: Sequence[Any]) -> Any:
    """table.md and report.html from the lines; returns the table."""
    from clusterkv_jax.evaluation.report import report, table
    from clusterkv_jax.storage.files import write_whole

    summary = table.beside(table.summarize(lines, run["sessions"]), peers)
    write_whole(folder / "table.md", table.markdown(summary))
    write_whole(folder / "report.html", report.report(summary, lines, run))
    return summary


def _show(summary: Any, output: str | Path) -> None:
    """The table on the screen, and where the files are."""
    from clusterkv_jax.evaluation.report import table

    console = plain_console()
    console = console if console.is_terminal else plain_console(width=240)
    columns = summary.columns
    unbounded = console.options.update_width(10**6)
    if console.measure(_screen(summary, columns), options=unbounded).minimum > console.width:
        columns = ()
    console.print(_screen(summary, columns))
    if not columns:
        console.print(f"The scores of {len(summary.columns)} tasks are in table.md and report.html.", style="dim")
    for note in table.notes(summary):
        console.print(note, style="dim")
    written = f"Written to {output}: results.jsonl, run.json, table.md, report.html"
    console.print(written, highlight=False, soft_wrap=True)


def _screen(summary: Any, columns: Sequence[str]) -> Table:
    """The table without the intervals of single tasks, which table.md has."""
    from clusterkv_jax.evaluation.report.table import budget_name, cell_text

    averages = [cell_text(row.average, summary.perplexity) for row in summary.rows]
    grid = Table("method", "kept", box=SIMPLE_HEAD)
    grid.add_column("average", justify="right", min_width=max(map(len, averages)))
    for name in columns:
        grid.add_column(Text(name), justify="right", no_wrap=True)
    for row, average in zip(summary.rows, averages, strict=True):
        cells = [row.cells.get(name) for name in columns]
        values = [cell_text(cell, summary.perplexity).split(" ")[0] for cell in cells]
        name = row.method if row.measured else f"{row.method}, {row.source}"
        look = None if row.measured else "dim italic"
        grid.add_row(Text(name), budget_name(row.budget), average, *values, style=look)
    return grid


def _list_suites() -> None:
    from clusterkv_jax.evaluation.tasks.suites import SUITES

    listed = Table(box=None, pad_edge=False)
    for name in ("suite", "what it is", "tasks"):
        listed.add_column(name)
    for name, suite in SUITES.items():
        listed.add_row(name, suite.description, ", ".join((*suite.groups, *suite.tasks)) or "a book each")
    plain_console().print(listed)
