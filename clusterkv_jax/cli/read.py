"""`clusterkv read`: a text that is read once and kept as a file; `clusterkv generate --cache` asks it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from clusterkv_jax.cli.answers import MethodRun
from clusterkv_jax.cli.named import budgets_of, chosen, meant
from clusterkv_jax.cli.options import CALIBRATION, MODEL, CompilationCache, cache_dtype_option
from clusterkv_jax.cli.terminal import one_sentence_errors, plain_console, use_compilation_cache
from clusterkv_jax.cli.texts import Raw, SpecialTokens, System, TemplateArguments, asked, how_to_read, read_text

EXAMPLES = """[bold]Examples[/bold]

Read a book once, keep a quarter of it, and ask it as often as you like:

  clusterkv read book.txt --output book.ckv --method auto --cache-ratio 0.25

  clusterkv generate --cache book.ckv --question "Who kept watch?"

The .txt and .md files of a folder, by name, and another file, as one text:

  clusterkv read notes/ appendix.txt --output notes.ckv

A PDF becomes a text by pdftotext: pdftotext book.pdf book.txt
"""

# Files of a folder that are texts.
TEXTS = (".txt", ".md")
# The model, the method's name, the method with all that the model knows of it, and how texts are read.
Opened = tuple[Any, str, Any, dict[str, Any]]
_cache = partial(typer.Option, rich_help_panel="Cache")


@dataclass(frozen=True)
class Reading:
    """How a text was read, as a file has it beside the cache: what `read` was told, and the end of the text."""

    model: str
    method: str
    cache_ratio: float | None
    cache_tokens: int | None
    cache_dtype: str | None
    calibration: str | None
    raw: bool
    system: str | None
    chat_template_kwargs: str | None
    special_tokens: bool
    tokens: int
    room: int
    end: str


def read(
    files: Annotated[
        list[str], typer.Argument(help="Texts in UTF-8 and folders of them, read as one text; '-' is standard input.")
    ],
    output: Annotated[Path, typer.Option(help="The file to write, such as book.ckv.")],
    model: Annotated[str, typer.Option(help=MODEL)] = "demo",
    method: Annotated[str, _cache(help="A method, a preset, its .yaml file, or FILE.py:Class.")] = "full",
    cache_ratio: Annotated[float | None, _cache(help="The share of KV pairs to keep, such as 0.25.")] = None,
    cache_tokens: Annotated[int | None, _cache(help="Or how many of each head, such as 1024.")] = None,
    cache_dtype: Annotated[str | None, cache_dtype_option(rich_help_panel="Cache")] = None,
    calibration: Annotated[str | None, _cache(help=CALIBRATION)] = None,
    room: Annotated[int, typer.Option(help="Most tokens of a question and its answer together.", min=1)] = 512,
    raw: Raw = False,
    system: System = None,
    chat_template_kwargs: TemplateArguments = None,
    special_tokens: SpecialTokens = True,
    compilation_cache: CompilationCache = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Read a long text once and keep its compressed cache in a file, to be asked later."""
    with one_sentence_errors(debug):
        text = "\n\n".join(read_text(file) for file in listed(files))
        if not output.parent.is_dir():
            raise ValueError(f"The folder {output.parent} does not exist; make it before a cache is written there.")
        use_compilation_cache(compilation_cache)
        places = placed(model), placed(method), None if calibration is None else placed(calibration)
        how = Reading(
            *(*places[:2], cache_ratio, cache_tokens, cache_dtype, places[2], raw, system, chat_template_kwargs),
            *(special_tokens, 0, room, text[-2:]),
        )
        network, name, candidate, reading = opened(how)
        head = encoded(network, text, ["?"], reading)[0][0]
        how = replace(how, tokens=len(head))
        if how.tokens + room > network.config.max_positions:
            raise ValueError(
                f"The text of {how.tokens:,} tokens and --room {room} exceed the model's "
                f"{network.config.max_positions:,} positions."
            )
        engine = _engine(network, candidate, how, slots=1)
        with plain_console(stderr=True).status(Text(f"Reading {how.tokens:,} tokens ({name}) ...")):
            engine.save(engine.read(head), output, origin=asdict(how))
        size = output.stat().st_size / 1e6
        line = f"{how.tokens:,} tokens read with {name}, {size:,.1f} MB written to {output}"
        plain_console().print(line, highlight=False, soft_wrap=True)


def placed(name: str) -> str:
    """A name that is a file or folder here, or FILE.py:Class of one, as it is found from everywhere."""
    path, colon, inside = name.rpartition(":") if ".py:" in name else (name, "", "")
    named = name == "demo" or not (Path(path).suffix or Path(path).is_dir())
    return name if named or not Path(path).exists() else f"{Path(path).resolve()}{colon}{inside}"


def listed(files: Sequence[str]) -> list[str]:
    """Files, and the texts of folders in the order of their names. Raises ValueError for a folder without any."""
    found = []
    for file in files:
        inside = sorted(str(path) for path in Path(file).rglob("*") if path.suffix in TEXTS) if file != "-" else []
        if Path(file).is_dir() and not inside:
            raise ValueError(f"The folder {file} holds no {' or '.join(TEXTS)} file.")
        found += inside or [file]
    return found


def check_decided(given: Mapping[str, Any]) -> None:
    """Raise ValueError for options beside --cache that were decided when the text was read."""
    if wrong := [option for option, value in given.items() if value not in (None, False, [])]:
        raise ValueError(f"--cache holds a text as 'clusterkv read' was told to read it; leave {wrong[0]} out.")


def ask_saved(
    cache: Path,
    model: str | None,
    method: str | None,
    questions: list[str],
    options: Mapping[str, Any],
    slots: int,
    *,
    quiet: bool,
) -> MethodRun:
    """Answers to questions about a saved text, by the model that read it, or by `model`, which must be the same.

    `options` are those of `Engine.add`; without a sampling the model's own.
    """
    from clusterkv_jax import saving
    from clusterkv_jax.storage.schema import checked

    if not questions:
        raise ValueError("--cache needs a --question.")
    content = saving.origin(cache)
    if not content:
        raise ValueError(f"{cache} does not say how it was read; 'clusterkv read' makes files for --cache.")
    how = checked(content, Reading, str(cache))
    _check_method(cache, how.method, method)
    how = replace(how, model=model or how.model)
    return ask(cache, opened(how), how, questions, options, slots, quiet=quiet)


def ask(
    cache: Path,
    opened: Opened,
    how: Reading,
    questions: list[str],
    options: Mapping[str, Any],
    slots: int,
    *,
    quiet: bool,
) -> MethodRun:
    """Answers to questions about a saved text, by the model that read it, which is `opened`."""
    network, name, method, reading = opened
    tails = encoded(network, f"x{how.end}", questions, reading)[1]
    longest, new = max(map(len, tails)), options["max_new_tokens"]
    if longest + new > how.room:
        raise ValueError(
            f"A question of {longest} tokens and {new} new ones are more than the {how.room} that {cache} has room "
            "for; 'clusterkv read --room' makes more."
        )
    engine = _engine(network, method, how, min(len(questions), slots))
    with plain_console(stderr=True, quiet=quiet).status(Text(f"Asking {cache} ({name}) ...")):
        context = engine.read(cache)
        options = {**options, "sampling": options["sampling"] or network.sampling}
        results = engine.generate([context] * len(questions), questions=tails, **options)
    stats, ends = engine.stats(), [result.finish_reasons[0] for result in results]
    if stats.compile_s > 1:
        line = f"{name}: {stats.compile_s:.1f} s of compiling"
        plain_console(stderr=True, quiet=quiet).print(line, style="dim", highlight=False, soft_wrap=True)
    return MethodRun(name, method, [r.texts[0] for r in results], ends, [r.stats for r in results], stats)


def _check_method(cache: Path, named: str, given: str | None) -> None:
    """Raise ValueError for another method than the file's, and for one in a file, which is a program, not given too."""
    from clusterkv_jax.presets import is_file

    if given is None and is_file(named):
        raise ValueError(f"{cache} names a method in a file, {named}; give it as --method too, if you trust that file.")
    if given is not None and placed(given) != named:
        raise ValueError(f"{cache} was read with {named}, not {given}; leave --method out.")


def opened(how: Reading) -> Opened:
    """The model, the method with its name, and how texts are read."""
    import clusterkv_jax as ckv
    from clusterkv_jax import calibration
    from clusterkv_jax.checkpoints.loading import calibrated
    from clusterkv_jax.presets import check_calibrated

    measured = None if how.calibration is None else calibration.read(how.calibration)
    budgets = budgets_of(None, how.cache_ratio, how.cache_tokens)
    names = (how.method,)
    ((name, method),) = chosen(names, budgets, measured, how.cache_dtype, meant(how.model, names, measured))
    check_calibrated(how.model, measured, {name: method})
    network = ckv.load(how.model)
    return ready(network if measured is None else calibrated(network, measured), name, method, how)


def ready(network: Any, name: str, method: Any, how: Reading) -> Opened:
    """The model, the method with its name and all that the model knows of it, and how texts are read."""
    from clusterkv_jax.presets import completed
    from clusterkv_jax.text.prompts import as_chat

    plain = how.raw, False, how.system, how.chat_template_kwargs, how.special_tokens
    reading = how_to_read(network.tokenizer, *plain)
    chat = as_chat(reading["chat"], reading["system"], reading["chat_template_kwargs"])
    method = completed(network, method) if chat is None else completed(network, method, chat)
    return network, name, method, {"chat": chat, "special_tokens": how.special_tokens}


def encoded(network: Any, text: str, questions: Sequence[str], reading: Mapping[str, Any]) -> tuple[Any, Any]:
    """A text and questions below it as tokens."""
    from clusterkv_jax.text.prompts import encode_all

    texts, below = asked([text], list(questions), reading["chat"] is not None)
    return encode_all(network, texts, below, **reading)


def _engine(network: Any, method: Any, how: Reading, slots: int) -> Any:
    """An engine whose slots have the sizes of the file's."""
    import clusterkv_jax as ckv

    size = how.tokens + how.room
    return ckv.Engine(network, method=method, slots=slots, max_tokens=size, reserve=how.room, context_bytes=2**40)
