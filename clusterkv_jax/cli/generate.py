"""`clusterkv generate`: read a long text, keep a clustered cache of it, answer from it; `clusterkv methods`."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import mean
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from clusterkv_jax.cli.named import check_prompts, meant
from clusterkv_jax.cli.options import (
    CALIBRATION,
    MODEL,
    CompilationCache,
    budgets_option,
    cache_dtype_option,
    methods_option,
    parse_budget,
    split,
    stored_as,
)
from clusterkv_jax.cli.terminal import compiling, one_sentence_errors, plain_console, use_compilation_cache
from clusterkv_jax.cli.texts import InChat, Raw, SpecialTokens, System, TemplateArguments, asked, how_to_read, read_text

EXAMPLES = """[bold]Examples[/bold]

Answer from a book chapter with a quarter of the cache:

  clusterkv generate --prompt-file book.txt --question "Who kept watch?" \\
    --method centroidkv --cache-ratio 0.25

Compare two methods on two questions, with 1,024 KV pairs kept:

  clusterkv generate --prompt-file book.txt --question "Who?" \\
    --question "Where?" --method full --method centroidkv --cache-tokens 1024

Answer about many texts, eight at a time:

  clusterkv generate --prompt-file one.txt --prompt-file two.txt \\
    --prompt-file three.txt --question "Who?" --method snapkv --budget .25

From a pipe to a program, with a model of your own:

  cat report.txt | clusterkv generate --model ./my-llama --prompt-file - \\
    --system "Be brief." --question "Sum it up." --method centroidkv --cache-ratio .2 --json

A model of the hub at a tag, drawing as its authors say, with a calibration of
the hub:

  clusterkv generate --model owner/name@v1.0 --sampling model \\
    --prompt-file book.txt --method auto --cache-ratio .125 \\
    --calibration owner/name-calibration

Models come from the hub's cache where they are in it; HF_HUB_OFFLINE=1 asks
for nothing else. For a gated model accept its licence on its page, then 'hf
auth login'.

[bold]clusterkv methods[/bold] lists what --method takes.
"""

_cache = partial(typer.Option, rich_help_panel="Cache")
_drawing = partial(typer.Option, rich_help_panel="Sampling")
_output = partial(typer.Option, rich_help_panel="Output")


@dataclasses.dataclass(frozen=True)
class Run:
    """One method's answers, one per file and question, and what they cost: all together, or each in an engine."""

    name: str
    method: Any
    texts: list[str]
    ends: Sequence[str]
    stats: list[Any]
    engine: Any = None


def generate(
    prompt_file: Annotated[
        list[str], typer.Option(help="The text to read, UTF-8; '-' reads standard input; repeatable.")
    ],
    model: Annotated[str, typer.Option(help=MODEL)] = "demo",
    methods: Annotated[list[str], methods_option(rich_help_panel="Cache")] = ["full"],
    budgets: Annotated[list[str] | None, budgets_option(rich_help_panel="Cache")] = None,
    cache_ratio: Annotated[float | None, _cache(help="--budget, a share such as 0.25.")] = None,
    cache_tokens: Annotated[int | None, _cache(help="--budget, rows such as 1024.")] = None,
    cache_dtype: Annotated[str | None, cache_dtype_option(rich_help_panel="Cache")] = None,
    calibration: Annotated[str | None, _cache(help=CALIBRATION)] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(help="Asked after the text has been compressed, so the cache cannot know it; repeatable."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 64,
    sampling: Annotated[
        str | None,
        _drawing(help="'model': draw as its authors say in generation_config.json.", show_default="as below"),
    ] = None,
    temperature: Annotated[float, _drawing(help="0 takes the likeliest token, more draws more freely.")] = 0.0,
    top_k: Annotated[int | None, _drawing(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None,
        _drawing(help="Draw from the likeliest tokens that together reach p."),
    ] = None,
    min_p: Annotated[
        float | None,
        _drawing(help="Drop tokens less likely than this share of the best."),
    ] = None,
    seed: Annotated[int, _drawing(help="The same seed draws the same tokens.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End an answer before this text; repeatable.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="End an answer with this token; repeatable.")] = None,
    max_positions: Annotated[
        int | None,
        typer.Option(help="Longest text with its answer; up to 4096, Phi-3.5 takes its short factors.", min=1),
    ] = None,
    prefill_chunk: Annotated[int | None, _cache(help="Read the text in pieces of so many tokens.")] = None,
    slots: Annotated[int, typer.Option(help="Most answers written together, where several texts are read.", min=1)] = 8,
    raw: Raw = False,
    chat: InChat = False,
    system: System = None,
    chat_template_kwargs: TemplateArguments = None,
    special_tokens: SpecialTokens = True,
    compilation_cache: CompilationCache = True,
    as_json: Annotated[bool, _output("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, _output("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Continue a text, or answer questions about it, from a compressed cache."""
    with one_sentence_errors(debug):
        texts = [read_text(file) for file in prompt_file]
        use_compilation_cache(compilation_cache)
        import clusterkv_jax as ckv
        from clusterkv_jax.calibration import read
        from clusterkv_jax.checkpoints import calibrated
        from clusterkv_jax.generation import compile_ahead
        from clusterkv_jax.presets import check_calibrated
        from clusterkv_jax.sampling import check_seed

        check_seed(seed, "--seed")
        measured = None if calibration is None else read(calibration)
        asked_of = _budgets(budgets, cache_ratio, cache_tokens)
        names = split(methods)
        candidates = _methods(names, asked_of, measured, cache_dtype, meant(model, names, measured))
        check_calibrated(model, measured, dict(candidates))

        _check_drawing(sampling, temperature, top_k, top_p, min_p)
        drawing = ckv.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        network = ckv.load(model, max_positions=max_positions)
        network = network if measured is None else calibrated(network, measured)
        reading = how_to_read(network.tokenizer, raw, chat, system, chat_template_kwargs, special_tokens)
        prompts, questions = asked(texts, question or [], reading["chat"])
        stream = len(candidates) == 1 and len(prompts) == 1 and not as_json
        sizes: Any = {"questions": questions, "max_new_tokens": max_new_tokens, "prefill_chunk": prefill_chunk}
        sizes |= {"sampling": drawing if sampling is None else network.sampling, **reading}
        sizes |= {"stop": tuple(stop or ()), "stop_ids": tuple(stop_id or ())}
        check_prompts(network, prompts, dict(candidates), sizes)
        answer = partial(ckv.generate, network, prompts, **sizes, seed=seed)
        runs = []
        for name, candidate in candidates:
            if len(texts) > 1:
                runs.append(_served(name, candidate, network, prompts, sizes, seed, slots, quiet=as_json))
                continue
            with compiling(name, quiet=as_json) as on_program:
                compile_ahead(network, prompts, method=candidate, **sizes, on_program=on_program)
            with _progress(name, quiet=as_json) as (progress, clear):
                result = answer(method=candidate, progress=progress, on_text=_streamer(clear) if stream else None)
            runs.append(Run(name, candidate, result.texts, result.finish_reasons, [result.stats]))
        files = prompt_file if len(texts) > 1 else []
        if as_json:
            print(json.dumps(_as_json(model, files, question or [], runs), indent=2, ensure_ascii=False))
            return
        console = plain_console()
        console.print()
        if not stream:
            console.print(_answers(files, question or [], runs))
        console.print(_costs(runs))


def _check_drawing(sampling: str | None, *others: float | None) -> None:
    """Raise ValueError for anything but the model's own way to draw, alone."""
    if sampling not in (None, "model"):
        raise ValueError(f"--sampling must be model, or be left out, got {sampling!r}.")
    if sampling is not None and any(others):
        raise ValueError("Give --sampling model, or --temperature and the filters, not both.")


def _budgets(budgets: list[str] | None, ratio: float | None, tokens: int | None) -> dict[str, Any]:
    """The budgets by the texts that name them; none where the presets have theirs."""
    from clusterkv_jax.budget import Budget

    if ratio is not None and tokens is not None:
        raise ValueError(f"Give --cache-ratio or --cache-tokens, not both (got {ratio} and {tokens}).")
    if ratio is None and tokens is None:
        return {text: parse_budget(text) for text in split(budgets or [])}
    if budgets:
        raise ValueError(f"Give --budget, --cache-ratio or --cache-tokens, not several (got {', '.join(budgets)} too).")
    return {str(ratio or tokens): Budget(ratio=ratio, tokens=tokens)}


def _methods(
    names: tuple[str, ...],
    budgets: dict[str, Any],
    calibration: Any,
    cache_dtype: str | None,
    meant: Mapping[str, str],
) -> list[tuple[str, Any]]:
    """The methods by name, each with every budget where it takes one."""
    from clusterkv_jax.presets import called, find_preset, preset

    if not names:
        raise ValueError("--method must name at least one method; clusterkv methods lists them.")
    takes_budget = {name: find_preset(name).takes_budget for name in names}
    if budgets and not any(takes_budget.values()):
        raise ValueError(f"--method {names[0]} keeps the whole cache and takes no --cache-ratio or --cache-tokens.")
    candidates, stored = [], stored_as(cache_dtype)
    for name in names:
        shown, one = called(name), meant.get(name, name)
        if not takes_budget[name]:
            candidates.append((shown, preset(one, **stored)))
        elif budgets:
            several = len(budgets) > 1
            candidates += [
                (f"{shown} {text}" if several else shown, preset(one, b, calibration, **stored))
                for text, b in budgets.items()
            ]
        elif find_preset(one).budget is None:
            raise ValueError(f"--method {name} needs --cache-ratio or --cache-tokens.")
        else:
            candidates.append((shown, preset(one, None, calibration, **stored)))
    return candidates


def _served(
    name: str,
    method: Any,
    network: Any,
    prompts: list[str],
    sizes: dict[str, Any],
    seed: int,
    slots: int,
    *,
    quiet: bool,
) -> Run:
    """Answers about several texts, by an engine that is as large as they need; a line says how it does."""
    import clusterkv_jax as ckv
    from clusterkv_jax.batch import make_batch
    from clusterkv_jax.engine.tally import in_a_line
    from clusterkv_jax.presets import completed

    how = {name: sizes[name] for name in ("max_new_tokens", "stop", "stop_ids", "sampling")} | {"seed": seed}
    batch = make_batch(network, prompts, **{name: size for name, size in sizes.items() if name != "sampling"})
    asked = batch.questions or [[] for _ in prompts]
    after = max(map(len, asked)) + batch.max_new_tokens
    engine = ckv.Engine(
        network,
        method=completed(network, method, batch.chat),
        slots=min(slots, len(prompts)),
        max_tokens=max(map(len, batch.texts)) + after,
        reserve=after,
        context_bytes=0,
        prefill_chunk=sizes["prefill_chunk"],
    )
    console = plain_console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    with console.status(Text(name)) as line:
        show = lambda stats: line.update(Text(f"{name}: {stats.finished} of {len(prompts)} · {in_a_line([stats])}"))  # noqa: E731
        results = engine.generate(batch.texts, questions=batch.questions, on_stats=show, **how)
    stats = engine.stats()
    console.print(f"{name}: {in_a_line([stats])}, {stats.compile_s:.1f} s of compiling", style="dim")
    ends = [result.finish_reasons[0] for result in results]
    return Run(name, method, [result.texts[0] for result in results], ends, [r.stats for r in results], stats)


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[tuple[Callable[[str, int, int], None] | None, Callable[[], None]]]:
    """Bars on standard error, gone when done; also how to clear them before text is streamed."""
    console = plain_console(stderr=True)
    if quiet or not console.is_terminal:
        yield None, lambda: None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bars = Progress(*columns, console=console, transient=True)
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(f"{name} {stage}", total=total)
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield show, bars.stop


def _streamer(clear: Callable[[], None]) -> Callable[[int, str], None]:
    """Write text as it comes; a terminal cannot show bars and text at once, so the bars go first."""

    def write(_row: int, text: str) -> None:
        clear()
        sys.stdout.write(text)
        sys.stdout.flush()

    return write


def _answers(files: list[str], questions: list[str], runs: list[Run]) -> Table:
    """Answers side by side: a row per file and question, a column per method."""
    table = Table(box=SIMPLE_HEAD, show_lines=len(runs[0].texts) > 1, title_justify="left", title_style="")
    if len(questions) == 1:
        table.title = Text(questions[0].strip())
    if files:
        table.add_column("text", overflow="fold")
    if len(questions) > 1:
        table.add_column("question", overflow="fold")
    for run in runs:
        table.add_column(run.name, overflow="fold")
    for row in range(len(runs[0].texts)):
        file, question = divmod(row, max(len(questions), 1))
        cells = ([files[file]] if files else []) + ([questions[question]] if len(questions) > 1 else [])
        table.add_row(*(Text(cell.strip()) for cell in [*cells, *(run.texts[row] for run in runs)]))
    return table


def _costs(runs: list[Run]) -> Table:
    """What each method kept and how fast it was; megabytes are allocated, with room for question and answer."""
    table = Table(box=SIMPLE_HEAD)
    recalling = any(stats.recalled_rows for run in runs for stats in run.stats)
    recalled = ("recalled",) if recalling else ()
    for column in ("method", "KV pairs", "kept", *recalled, "cache MB", "TTFT s", "tokens/s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for run in runs:
        total = lambda name: sum(getattr(stats, name) for stats in run.stats)  # noqa: B023, E731
        recalled = [stats.recalled_rows for stats in run.stats if stats.recalled_rows]
        table.add_row(
            run.name,
            f"{_span(list(map(_kept, run.stats)))} of {_span([stats.prompt_tokens for stats in run.stats])}",
            f"{sum(map(_kept, run.stats)) / sum(stats.prompt_tokens[0] for stats in run.stats):.1%}",
            *([_span(recalled) if recalled else "-"] if recalling else []),
            f"{(run.engine.memory.slots if run.engine else total('cache_bytes')) / 1e6:.2f}",
            f"{max(stats.ttft_s for stats in run.stats):.2f}",
            f"{run.engine.tokens_per_s:.1f}" if run.engine else _speed(run.stats[0]),
        )
    return table


def _kept(stats: Any) -> int:
    """KV pairs that a head keeps of the prompt, on average over all heads."""
    return round(mean(_numbers(stats.kept_rows)))


def _speed(stats: Any) -> str:
    """Tokens per second of all rows together, the first token of each apart: its time is TTFT."""
    steps = max(stats.new_tokens) - 1
    return f"{(sum(stats.new_tokens) - len(stats.new_tokens)) / (steps * stats.tpot_s):.1f}" if steps else "-"


def _as_json(model: str, files: list[str], questions: list[str], runs: list[Run]) -> dict[str, Any]:
    """The same as the tables, for programs; of several files `stats` are a list, and `engine` says how all went."""

    def one(run: Run) -> dict[str, Any]:
        said = {"name": run.name, "method": repr(run.method), "texts": run.texts, "finish_reasons": run.ends}
        stats = [dataclasses.asdict(stats) for stats in run.stats]
        return said | ({"stats": stats, "engine": dataclasses.asdict(run.engine)} if files else {"stats": stats[0]})

    named = {"files": files} if files else {}
    return {"model": model, **named, "questions": questions, "runs": [one(run) for run in runs]}


def _numbers(nested: Any) -> list[int]:
    """All numbers of nested sequences."""
    return [nested] if isinstance(nested, int) else [number for item in nested for number in _numbers(item)]


def _span(nested: Any) -> str:
    """Smallest to largest number, one number where they agree."""
    low, high = min(_numbers(nested)), max(_numbers(nested))
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"
