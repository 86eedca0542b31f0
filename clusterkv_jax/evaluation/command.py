"""`clusterkv evaluate`: a suite through methods and budgets, as results.jsonl, run.json, table.md and report.html."""

import hashlib
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from clusterkv_jax.terminal import one_sentence_errors, progress_bar

_what = partial(typer.Option, rich_help_panel="What is asked")
_packages = ("clusterkv-jax", "jax", "jaxlib", "numpy", "transformers", "tokenizers")


def evaluate(
    suite: Annotated[str, typer.Option(help="ruler, longbench, niah, gsm8k, pg19 ...; 'list' shows all of them.")],
    model: Annotated[str, typer.Option(help="'demo', a folder or a hub id in Hugging Face format.")] = "demo",
    methods: Annotated[str, typer.Option(help="Methods, presets or preset files, between commas.")] = "full",
    budgets: Annotated[str, typer.Option(help="Shares of the cache (0.25) or rows (1024), between commas.")] = "1.0",
    output: Annotated[Path, typer.Option(help="Folder of the results; a run that was stopped goes on there.")] = Path(
        "results"
    ),
    tasks: Annotated[str, _what(help="Tasks of the suite, between commas.", show_default="all")] = "",
    lengths: Annotated[str, _what(help="Tokens of generated examples, between commas.")] = "4096",
    limit: Annotated[int | None, _what(help="Most examples of each task.", show_default="the suite's")] = None,
    query_aware: Annotated[
        bool, _what("--query-aware", help="Let methods see the question before they compress.")
    ] = False,
    data: Annotated[str | None, _what(help="Local file or folder instead of the hub.")] = None,
    books: Annotated[str | None, _what(help="Local book or folder of books.", show_default="PG19, test")] = None,
    seed: Annotated[int, _what(help="Of everything that is generated.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Most examples read together.")] = 16,
    dtype: Annotated[str | None, typer.Option(help="Type of the parameters.", show_default="as stored")] = None,
    published: Annotated[
        str | None, typer.Option(help="Tables of papers to print beside, between commas.", show_default="the model's")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Answer a suite's questions with compressed caches and make a table of the scores."""
    with one_sentence_errors(debug):
        if suite == "list":
            _list_suites()
            return
        import clusterkv_jax as ckv
        from clusterkv_jax.evaluation import responses, runner
        from clusterkv_jax.evaluation.tasks import cases as building
        from clusterkv_jax.evaluation.tasks import suites

        entries = parse_entries(_split(methods), _split(budgets))
        loaded = ckv.load(model, dtype=dtype)
        if loaded.tokenizer is None:
            raise ValueError(f"model {model} has no tokenizer, which evaluation needs.")
        options = suites.Options(_split(tasks), tuple(map(_whole, _split(lengths))), limit, data, books, seed)
        positions = loaded.config.max_positions
        with Console(stderr=True).status(f"Building the cases of {suite} ..."):
            found = suites.cases(suite, options, loaded.tokenizer, positions)
            found = [building.query_aware(case) for case in found] if query_aware else found
            jobs = [
                runner.Job(i, case, building.build_prompt(case, loaded.tokenizer, positions))
                for i, case in enumerate(found)
            ]
        config = {
            "suite": suite,
            "model": model,
            "parameters": fingerprint(loaded.params),
            "dtype": str(loaded.params["embed"].dtype),
            "methods": {f"{entry.name}@{entry.budget}": repr(entry.method) for entry in entries},
            "query_aware": query_aware,
            "batch_size": batch_size,
        }
        with progress_bar(len(jobs) * len(entries), "examples") as on_lines:
            lines = runner.run(
                output,
                config,
                about(),
                jobs,
                entries,
                responses.responder(loaded),
                batch_size=batch_size,
                possible=partial(responses.possible, loaded),
                on_lines=on_lines,
            )
        _write(output, suite, model, lines, None if published is None else _split(published))


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
        from clusterkv_jax.files import write_whole

        if output.exists():
            raise ValueError(f"{output} exists; name a new folder.")
        run, lines = runner.join(folders)
        output.mkdir(parents=True)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_whole(output / runner.RESULTS, text)
        write_whole(output / runner.RUN, json.dumps(run, indent=2, ensure_ascii=False) + "\n")
        config = run["config"]
        _write(output, config["suite"], config["model"], lines, None if published is None else _split(published))


def lm_eval(context: typer.Context) -> None:
    """lm-evaluation-harness's own command, with this project's model: --model clusterkv --model_args method=..."""
    from clusterkv_jax.evaluation.extras import library

    with one_sentence_errors(False):
        library("lm_eval", "clusterkv lm-eval")
        from clusterkv_jax.evaluation import lm_eval

        lm_eval.main(context.args)


class KeysByDefault(typer.core.TyperGroup):
    """`inspect MODEL` is `inspect keys MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Arguments that begin with no command's name are those of `keys`."""
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["keys", *args]
        return super().parse_args(ctx, args)


inspect = typer.Typer(cls=KeysByDefault, help="Draw what a model's keys look like, and what methods find in them.")


@inspect.command("keys")
def inspect_keys(
    model: Annotated[str, typer.Argument(help="'demo', a folder or a hub id in Hugging Face format.")],
    text: Annotated[Path, typer.Option(help="A text to look at, UTF-8; .gz too.")],
    methods: Annotated[str, typer.Option(help="Methods to compare, between commas.")] = "centroidkv",
    budget: Annotated[str, typer.Option(help="A share of the cache (0.25) or rows (1024).")] = "0.25",
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 2048,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("inspect.html"),
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Draw what a model's keys look like and what methods do to them, layer by layer."""
    with one_sentence_errors(debug):
        import clusterkv_jax as ckv
        from clusterkv_jax.evaluation.inspection import page as inspection_page
        from clusterkv_jax.evaluation.tasks import sources
        from clusterkv_jax.files import write_whole

        loaded = ckv.load(model)
        ids = _tokens_of(loaded, sources.body(sources.read_text(text)), tokens)
        chosen = {entry.name: entry.method for entry in parse_entries(_split(methods), (budget,))}
        write_whole(output, inspection_page.page_of(loaded, ids, chosen))
        Console().print(f"Written to {output}", highlight=False)


@inspect.command("recall")
def inspect_recall(
    model: Annotated[str, typer.Argument(help="'demo', a folder or a hub id in Hugging Face format.")],
    text: Annotated[Path, typer.Option(help="A text to look at, UTF-8; .gz too.")],
    methods: Annotated[str, typer.Option(help="Recall methods, between commas.")] = "clusterkv,quest",
    budgets: Annotated[str, typer.Option(help="Rows to recall, between commas.")] = "256,512,768,1024",
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 4096,
    steps: Annotated[int, typer.Option(help="The last of them, whose queries are compared.")] = 64,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("recall.html"),
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Measure how many of the rows with the largest attention each recall method selects."""
    with one_sentence_errors(debug):
        import clusterkv_jax as ckv
        from clusterkv_jax.evaluation.inspection import observations, recall_rates
        from clusterkv_jax.evaluation.tasks import sources
        from clusterkv_jax.files import write_whole
        from clusterkv_jax.methods import Recall

        entries = parse_entries(_split(methods), tuple(str(_whole(part, "--budgets")) for part in _split(budgets)))
        for entry in entries:
            if not isinstance(entry.method, Recall):
                raise ValueError(
                    f"--methods must be methods that recall, and {entry.name} keeps no more than it reads."
                )
        loaded = ckv.load(model)
        ids = _tokens_of(loaded, sources.body(sources.read_text(text)), tokens)
        if not 1 <= steps < tokens:
            raise ValueError(f"--steps must be between 1 and {tokens - 1}, got {steps}.")
        layers = observations.observe(loaded, ids)
        found = {}
        for entry in entries:
            found[entry.name, int(entry.budget)] = recall_rates.recall_rates(layers, entry.method, steps)
        write_whole(output, recall_rates.recall_page(loaded, tokens, steps, found))
        table = Table(box=SIMPLE_HEAD)
        table.add_column("method")
        rows = sorted({budget for _, budget in found})
        for budget in rows:
            table.add_column(f"B = {budget:,}", justify="right")
        for name in dict.fromkeys(name for name, _ in found):
            table.add_row(name, *(f"{recall_rates.mean_rate(found[name, budget]):.3f}" for budget in rows))
        Console().print(table)
        Console().print(f"Written to {output}", highlight=False)


def _tokens_of(loaded: Any, text: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text."""
    if loaded.tokenizer is None:
        raise ValueError(f"model {loaded.name} has no tokenizer, which inspection needs.")
    ids = loaded.tokenizer.encode(text, verbose=False)
    most = min(len(ids), loaded.config.max_positions)
    if not 256 <= tokens <= most:
        raise ValueError(f"--tokens must be between 256 and {most}, what text and model have, got {tokens}.")
    return ids[:tokens]


# What the harness's command is told goes to it as it is, --help too.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _write(output: Path, suite: str, model: str, lines: Sequence[Any], names: tuple[str, ...] | None) -> None:
    """table.md and report.html from the lines, and the table on the screen."""
    from clusterkv_jax.evaluation import runner
    from clusterkv_jax.evaluation.report import report, table
    from clusterkv_jax.files import write_whole

    chosen = table.matching(suite, model) if names is None else names
    summary = table.beside(table.summarize(lines), [table.published(name) for name in chosen])
    run = json.loads((output / runner.RUN).read_text(encoding="utf-8"))
    write_whole(output / "table.md", table.markdown(summary))
    write_whole(output / "report.html", report.report(summary, lines, run))
    console = Console()
    console = console if console.is_terminal else Console(width=240)
    console.print(_screen(summary))
    for note in table.notes(summary):
        console.print(note, style="dim")
    console.print(f"Written to {output}: results.jsonl, run.json, table.md, report.html", highlight=False)


def parse_entries(names: Sequence[str], budgets: Sequence[str]) -> list[Any]:
    """Every method with every budget below the full cache; the full cache once, for "full" or a budget of 1.0."""
    from clusterkv_jax.evaluation.runner import Entry
    from clusterkv_jax.methods import Full
    from clusterkv_jax.presets import find_preset, preset

    if not names or not budgets:
        raise ValueError("--methods and --budgets must each name at least one.")
    if len(set(names)) != len(names) or len(set(budgets)) != len(budgets):
        raise ValueError("--methods and --budgets must not name anything twice.")
    takes = {name: find_preset(name).takes_budget for name in names}
    whole = [budget for budget in budgets if (_budget(budget).ratio or 0) >= 1]
    entries = [Entry("full", "1.0", Full())] if whole or not all(takes.values()) else []
    for name in names:
        if takes[name]:
            entries += [Entry(name, text, preset(name, _budget(text))) for text in budgets if text not in whole]
    return entries


def _budget(text: str):
    from clusterkv_jax.budget import Budget

    try:
        return Budget(tokens=int(text)) if text.isdigit() and text != "1" else Budget(ratio=float(text))
    except ValueError as error:
        raise ValueError(f"--budgets takes shares such as 0.25 and rows such as 1024, got {text!r}.") from error


def fingerprint(params: Any) -> str:
    """Tells one checkpoint from another by a few numbers of every parameter."""
    import jax
    import numpy as np

    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf[tuple(slice(0, 4) for _ in leaf.shape)]).tobytes())
    return digest.hexdigest()[:16]


def about() -> dict[str, Any]:
    """The command, when and where it ran, and the versions of what it ran with."""
    import jax

    return {
        "command": shlex.join(["clusterkv", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _packages}},
        "commit": _commit(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-changed" if changed.stdout.strip() else "")


def _screen(summary: Any) -> Table:
    """The table without the intervals of single tasks, which table.md has."""
    from clusterkv_jax.evaluation.report.table import budget_name, cell_text

    found = Table(box=SIMPLE_HEAD)
    for name in ("method", "kept", *summary.columns, "average"):
        left = name in ("method", "kept")
        found.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=left or name == "average")
    for row in summary.rows:
        measured = row.source == "measured"
        cells = [row.cells.get(name) for name in summary.columns]
        values = [cell_text(cell, summary.perplexity).split(" ")[0] for cell in cells]
        name = row.method if measured else f"{row.method}, {row.source}"
        average = cell_text(row.average, summary.perplexity)
        found.add_row(name, budget_name(row.budget), *values, average, style=None if measured else "dim italic")
    return found


def _list_suites() -> None:
    from clusterkv_jax.evaluation.tasks.suites import SUITES

    listed = Table(box=None, pad_edge=False)
    for name in ("suite", "what it is", "tasks"):
        listed.add_column(name)
    for name, suite in SUITES.items():
        listed.add_row(name, suite.description, ", ".join(suite.tasks) or "a book each")
    Console().print(listed)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _whole(text: str, option: str = "--lengths") -> int:
    if not text.isdigit():
        raise ValueError(f"{option} takes whole numbers such as 4096, got {text!r}.")
    return int(text)
