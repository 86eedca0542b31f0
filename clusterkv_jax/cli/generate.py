"""`clusterkv generate`: read a long text, keep a clustered cache of it, answer from it; `clusterkv methods`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from clusterkv_jax.cli.answers import MethodRun, answers, costs, in_json
from clusterkv_jax.cli.named import budgets_of, check_prompts, chosen, meant
from clusterkv_jax.cli.options import (
    CALIBRATION,
    MODEL,
    Chunk,
    CompilationCache,
    MinP,
    Reading,
    Renumber,
    SamplingOf,
    Seed,
    Temperature,
    TopK,
    TopP,
    Weights,
    Window,
    budgets_option,
    cache_dtype_option,
    check_drawing,
    methods_option,
    split,
)
from clusterkv_jax.cli.pipe import answer_pipe, check_save, comes_in_a_pipe
from clusterkv_jax.cli.read import Reading as SavedReading
from clusterkv_jax.cli.read import ask_saved, check_decided, placed, ready
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
    --system "Be brief." --question "Sum it up." --method snapkv \\
    --cache-ratio .2 --json

A model of the hub at a tag, drawing as its authors say, with a calibration of
the hub:

  clusterkv generate --model owner/name@v1.0 --sampling model \\
    --prompt-file book.txt --method auto --cache-ratio .125 \\
    --calibration owner/name-calibration

A log that never ends, in 2,048 rows; --cache asks the file meanwhile:

  tail -f log.txt | clusterkv generate --prompt-file - --reading gated \\
    --renumber --method kvzap --cache-tokens 2048 --save log.ckv

Models come from the hub's cache where they are in it; HF_HUB_OFFLINE=1 asks
for nothing else. For a gated model accept its licence on its page, then 'hf
auth login'.

[bold]clusterkv methods[/bold] lists what --method takes.
"""

_cache = partial(typer.Option, rich_help_panel="Cache")
_output = partial(typer.Option, rich_help_panel="Output")


def generate(
    prompt_file: Annotated[
        list[str], typer.Option(help="The text to read, UTF-8; '-' reads standard input; repeatable.")
    ] = [],
    cache: Annotated[
        Path | None, typer.Option(help="In place of a text, what 'clusterkv read' made of it; needs a --question.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=MODEL, show_default="demo, or the model of --cache")] = None,
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
    sampling: SamplingOf = None,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End an answer before this text; repeatable.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="End an answer with this token; repeatable.")] = None,
    weights: Weights = None,
    max_positions: Annotated[
        int | None,
        typer.Option(help="Longest text with its answer; up to 4096, Phi-3.5 takes its short factors.", min=1),
    ] = None,
    reading: Reading = "whole",
    window: Window = 4096,
    chunk: Chunk = 2048,
    renumber: Renumber = False,
    save: Annotated[
        Path | None, _cache(help="Keep what is left of a gated pipe in this file, for --cache; see --save-every.")
    ] = None,
    save_every: Annotated[float, _cache(help="Seconds between two files of --save.", min=0)] = 60.0,
    prefill_chunk: Annotated[int | None, _cache(help="Read the text in pieces of so many tokens.")] = None,
    keep_short: Annotated[
        bool, _cache("--keep-short", help="Keep texts whole that are too short for their budget.")
    ] = False,
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
        if renumber and len(prompt_file) > 1:
            raise ValueError(f"--renumber reads one text, got {len(prompt_file)}.")
        if (cache is None) == (not prompt_file):
            raise ValueError("One of --prompt-file and --cache is needed.")
        asked_of = budgets_of(budgets, cache_ratio, cache_tokens)
        names = split(methods)
        comes = comes_in_a_pipe(prompt_file, reading, names, asked_of, bool(question or save))
        check_save(save, comes=comes)
        texts = [] if comes else [read_text(file) for file in prompt_file]
        use_compilation_cache(compilation_cache)
        import clusterkv_jax as ckv
        from clusterkv_jax.calibration import read
        from clusterkv_jax.checkpoints.loading import calibrated
        from clusterkv_jax.generation.batch import gate_of
        from clusterkv_jax.generation.generate import compile_ahead
        from clusterkv_jax.presets import check_calibrated
        from clusterkv_jax.sampling import check_seed

        check_seed(seed, "--seed")
        check_drawing(sampling, temperature, top_k, top_p, min_p)
        drawing = ckv.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        told = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": tuple(stop or ())}
        told |= {"stop_ids": tuple(stop_id or ()), "sampling": drawing if sampling is None else None}
        if cache is not None:
            given = {"--method": len(methods) > 1, "--budget": budgets, "--cache-ratio": cache_ratio}
            given |= {"--cache-tokens": cache_tokens, "--cache-dtype": cache_dtype, "--calibration": calibration}
            given |= {"--raw": raw, "--system": system, "--chat-template-kwargs": chat_template_kwargs}
            given |= {"--no-special-tokens": not special_tokens, "--prefill-chunk": prefill_chunk}
            given |= {"--max-positions": max_positions, "--keep-short": keep_short, "--reading": reading != "whole"}
            check_decided(given)
            method = None if methods == ["full"] else methods[0]
            runs = [ask_saved(cache, model, method, question or [], told, slots, quiet=as_json)]
            _show(runs, model or str(cache), [], question or [], as_json=as_json)
            return
        model = model or "demo"
        measured = None if calibration is None else read(calibration)
        candidates = chosen(names, asked_of, measured, cache_dtype, meant(model, names, measured))
        check_calibrated(model, measured, dict(candidates))

        network = ckv.load(model, max_positions=max_positions, weights=weights)
        network = network if measured is None else calibrated(network, measured)
        if comes:
            read_so = reading, window, chunk, prefill_chunk
            how = SavedReading(
                *(placed(model), placed(names[0]), None, next(iter(asked_of.values())).tokens, cache_dtype),
                *(calibration and placed(calibration), raw, system, chat_template_kwargs, special_tokens, 0, 0, ""),
            )
            opened, gate = ready(network, *candidates[0], how), gate_of(*read_so, renumber=renumber)
            runs = answer_pipe(opened, how, gate, question or [], told, slots, save, save_every, quiet=as_json)
            _show(runs, model, [], question or [], as_json=as_json)
            return
        text_options = how_to_read(network.tokenizer, raw, chat, system, chat_template_kwargs, special_tokens)
        prompts, questions = asked(texts, question or [], text_options["chat"])
        stream = len(candidates) == 1 and len(prompts) == 1 and not as_json
        sizes: Any = {"questions": questions, "max_new_tokens": max_new_tokens, "prefill_chunk": prefill_chunk}
        sizes |= {"reading": reading, "window": window, "chunk": chunk, "renumber": renumber}
        sizes |= {"sampling": drawing if sampling is None else network.sampling, **text_options}
        sizes |= {"stop": tuple(stop or ()), "stop_ids": tuple(stop_id or ())}
        check_prompts(network, prompts, dict(candidates), sizes, keep_short=keep_short)
        sizes |= {"keep_short": keep_short}
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
            runs.append(MethodRun(name, candidate, result.texts, result.finish_reasons, [result.stats]))
        files = prompt_file if len(texts) > 1 else []
        _show(runs, model, files, question or [], as_json=as_json, streamed=stream)


def _show(
    runs: list[MethodRun], model: str, files: list[str], questions: list[str], *, as_json: bool, streamed: bool = False
) -> None:
    """Print tables, or one JSON object; what was streamed stands there already."""
    if as_json:
        print(in_json(model, files, questions, runs))
        return
    if not runs:
        return
    console = plain_console()
    console.print()
    if not streamed:
        console.print(answers(files, questions, runs))
    console.print(costs(runs))


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
) -> MethodRun:
    """Answers about several texts, by an engine that is as large as they need; a line says how it does."""
    import clusterkv_jax as ckv
    from clusterkv_jax.engine.metrics import stats_line
    from clusterkv_jax.generation.batch import make_batch
    from clusterkv_jax.presets import completed

    how = {name: sizes[name] for name in ("max_new_tokens", "stop", "stop_ids", "sampling")} | {"seed": seed}
    of_batch = {name: size for name, size in sizes.items() if name not in ("sampling", "keep_short")}
    batch = make_batch(network, prompts, **of_batch)
    asked = batch.questions or [[] for _ in prompts]
    after = max(map(len, asked)) + batch.max_new_tokens
    engine = ckv.Engine(
        network,
        method=completed(network, method, batch.chat),
        slots=min(slots, len(prompts)),
        max_tokens=max(map(len, batch.texts)) + after,
        reserve=after,
        context_bytes=0,
        **{name: sizes[name] for name in ("prefill_chunk", "reading", "window", "chunk")},
        keep_short=sizes["keep_short"],
    )
    console = plain_console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    with console.status(Text(name)) as line:

        def show(stats):
            return line.update(Text(f"{name}: {stats.finished} of {len(prompts)} · {stats_line([stats])}"))

        results = engine.generate(batch.texts, questions=batch.questions, on_stats=show, **how)
    stats = engine.stats()
    console.print(f"{name}: {stats_line([stats])}, {stats.compile_s:.1f} s of compiling", style="dim")
    ends = [result.finish_reasons[0] for result in results]
    return MethodRun(name, method, [result.texts[0] for result in results], ends, [r.stats for r in results], stats)


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
