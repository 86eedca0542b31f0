"""`clusterkv chat`: a conversation in the terminal about texts, over their compressed cache; `turns` has its loop."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterkv_jax.cli.named import budgets_of, chosen, meant
from clusterkv_jax.cli.options import (
    CALIBRATION,
    MODEL,
    Chunk,
    CompilationCache,
    MinP,
    Reading,
    SamplingOf,
    Seed,
    Temperature,
    TopK,
    TopP,
    Window,
    cache_dtype_option,
    check_drawing,
)
from clusterkv_jax.cli.read import listed
from clusterkv_jax.cli.terminal import one_sentence_errors, plain_console, use_compilation_cache
from clusterkv_jax.cli.texts import System, TemplateArguments, how_to_read, read_text
from clusterkv_jax.cli.turns import opened, talk, told

EXAMPLES = """[bold]Examples[/bold]

Talk about a book, of whose cache an eighth is kept, with SmolLM2:

  clusterkv chat --file book.txt

About two files, with a model of your own that draws its words:

  clusterkv chat --model ./my-llama --file report.txt --file notes.txt \\
    --cache-ratio 0.25 --temperature 0.7

Go on with what /save wrote, by the model, method and budget it was made with:

  clusterkv chat --load talk.ckv

[bold]In the conversation[/bold]

  /full        the last answer again, from the full cache
  /stats       what the cache holds
  /save FILE   write the conversation; /load FILE goes on with one
  /help        what else there is
  /quit        end, as Ctrl-D does; Ctrl-C ends an answer and nothing else
"""

# Of a method that takes a budget, where nobody says how much.
RATIO = 0.125
_cache = partial(typer.Option, rich_help_panel="Cache")


def chat(
    context: typer.Context,
    file: Annotated[
        list[str] | None,
        typer.Option(help="A text in UTF-8, or a folder of them; repeatable.", show_default="a chapter of Moby-Dick"),
    ] = None,
    load: Annotated[Path | None, typer.Option(help="In place of a text, a conversation that /save wrote.")] = None,
    model: Annotated[str, typer.Option(help=MODEL)] = "smollm2",
    method: Annotated[str, _cache(help="A method, a preset, its .yaml file, or FILE.py:Class.")] = "auto",
    cache_ratio: Annotated[
        float | None, _cache(help="The share of all KV pairs to keep, also of what is said.", show_default=f"{RATIO}")
    ] = None,
    cache_tokens: Annotated[int | None, _cache(help="Or how many of each head, such as 1024.")] = None,
    cache_dtype: Annotated[str | None, cache_dtype_option(rich_help_panel="Cache")] = None,
    calibration: Annotated[str | None, _cache(help=CALIBRATION)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of all turns.", min=2, show_default="8,192, or the text and 4,096")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 256,
    sampling: SamplingOf = None,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    system: System = None,
    chat_template_kwargs: TemplateArguments = None,
    reading: Reading = "whole",
    window: Window = 4096,
    chunk: Chunk = 2048,
    compilation_cache: CompilationCache = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Talk about texts in the terminal. They are read once; all that is said goes into their compressed cache."""
    with one_sentence_errors(debug):
        _check(file or [], load, _named(context))
        text = "" if load else _text(file or [])
        use_compilation_cache(compilation_cache)
        import clusterkv_jax as ckv
        from clusterkv_jax.sampling import check_seed
        from clusterkv_jax.text.demo import QUESTION

        check_seed(seed, "--seed")
        check_drawing(sampling, temperature, top_k, top_p, min_p)
        console = plain_console(highlight=False, soft_wrap=True)
        if load is not None:
            network = ckv.load(model)
            begun = opened(f"Loading {load}", partial(ckv.Conversation.load, load, network))
            kept, about = type(begun.method).__name__, str(load)
        else:
            kept, about = method, ", ".join(file or ["a chapter of Moby-Dick, which --file replaces"])
            network, chosen = loaded(model, kept, cache_ratio, cache_tokens, cache_dtype, calibration)
            in_chat = how_to_read(network.tokenizer, False, False, system, chat_template_kwargs, True)
            drawing = ckv.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            how: Any = {"method": chosen, "max_new_tokens": max_new_tokens, "seed": seed}
            how |= {"reading": reading, "window": window, "chunk": chunk}
            how |= {name: in_chat[name] for name in ("system", "chat_template_kwargs")}
            how["sampling"] = drawing if sampling is None else network.sampling
            begun = opened("Reading the text", partial(_about, network, text, max_tokens, how))
        console.print(told(begun, f"{model} · {kept} · {about}"), style="dim")
        example = "" if file or load else f", such as: {QUESTION}"
        console.print(f"Type a question, or /help{example}", style="dim")
        talk(console, begun, lambda file: partial(ckv.Conversation.load, file, network))


def _about(model: Any, text: str, max_tokens: int | None, how: dict[str, Any]) -> Any:
    """A conversation that has read a text."""
    import clusterkv_jax as ckv
    from clusterkv_jax.text.tokenizer import encode

    most = max(8192, len(encode(model.tokenizer, text)) + 4096) if max_tokens is None else max_tokens
    conversation = ckv.Conversation(model, max_tokens=most, **how)
    conversation.read(text)
    return conversation


def _named(context: typer.Context) -> list[str]:
    """Options that were given."""
    named = (name for name in context.params if _is_given(context, name))
    return [f"--{name.replace('_', '-')}" for name in named]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check(files: list[str], load: Path | None, given: Sequence[str]) -> None:
    """Raise ValueError for what does not go together; a file says all but where the model is."""
    said = [name for name in given if name not in ("--load", "--model", "--compilation-cache", "--debug")]
    if load is not None and said:
        raise ValueError(f"--load goes on by what its file says; leave {said[0]} out.")
    if load is not None and not load.is_file():
        raise ValueError(f"There is no cache file {load}.")
    if "-" in files:
        raise ValueError("--file takes no '-': standard input is where the questions come from.")


def _text(files: list[str]) -> str:
    """All files as one text, or the chapter."""
    from clusterkv_jax.text.demo import demo_text

    text = "\n\n".join(read_text(file) for file in listed(files)) if files else demo_text()
    if not text.strip():
        raise ValueError(f"There is nothing to talk about: {', '.join(files)} holds no word.")
    return text


def loaded(
    model: str,
    method: str,
    ratio: float | None,
    tokens: int | None,
    cache_dtype: str | None,
    measured: str | None,
    weights: str | None = None,
    mesh: str | None = None,
) -> tuple[Any, Any]:
    """The model, its weights held in this way, over all devices of a mesh; and the method with its budget."""
    import clusterkv_jax as ckv
    from clusterkv_jax import calibration
    from clusterkv_jax.checkpoints.loading import calibrated
    from clusterkv_jax.presets import check_calibrated, find_preset
    from clusterkv_jax.runtime.sharding import named_mesh

    read = None if measured is None else calibration.read(measured)
    preset = find_preset(method)
    if ratio is None and tokens is None and preset.takes_budget and preset.budget is None:
        ratio = RATIO
    names = (method,)
    budgets = budgets_of(None, ratio, tokens)
    ((name, kept),) = chosen(names, budgets, read, cache_dtype, meant(model, names, read))
    check_calibrated(model, read, {name: kept})
    network = ckv.load(model, weights=weights, mesh=None if mesh is None else named_mesh(mesh))
    return network if read is None else calibrated(network, read), kept
