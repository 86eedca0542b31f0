"""`clusterkv calibrate`: a model's surrogate of scores, shares of heads and outlier heads, as a file and a picture."""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from clusterkv_jax.cli.options import CompilationCache, ModelArgument, ModelOption, one_model
from clusterkv_jax.cli.terminal import can_draw, one_sentence_errors, plain_console, progress_bar, use_compilation_cache

EXAMPLES = """[bold]What for[/bold]

Heads need unequally many rows, and which rows matter can be told from what
enters a layer's attention. Both are the model's, not the text's, so they are
measured once, from plain text:

  clusterkv calibrate ./my-llama --data books/ --output my-llama.safetensors

The model repeats each piece of text, rows are worth what that looks at, and a
small linear map (the surrogate) learns to predict it. Methods then take the
file: "auto" and KVzap go by the surrogate, every other method gets its shares
of the budget, Chelsea its outlier heads:

  clusterkv generate --model ./my-llama --prompt-file book.txt --method auto \\
    --cache-ratio 0.125 --calibration my-llama.safetensors

Named calibration.safetensors and put into the model's folder, the file is
loaded with the model.

--push owner/name puts the file on the hub too, where --calibration owner/name
and load(calibration="owner/name") find it. In the repository of the model
itself it is loaded with the model.

A .yaml file as --output holds the numbers alone, to read and edit. From the
hub (needs the package datasets), with Llama-2's first layer whole as Chelsea
has it:

  clusterkv calibrate meta-llama/Llama-2-7b-hf --whole-layer 0 \\
    --data Salesforce/wikitext:wikitext-2-raw-v1:test
"""


class SurrogateKind(StrEnum):
    """What predicts the scores."""

    linear = "linear"
    mlp = "mlp"


# Pieces of text, and tokens of each.
THOROUGH, QUICK = (16, 4096), (4, 2048)
_statistic = partial(typer.Option, rich_help_panel="Statistic")


def calibrate(
    data: Annotated[
        str, typer.Option(help="A text file, a folder of .txt files (.gz too), or a hub data set as ID:CONFIG:SPLIT.")
    ],
    model: ModelArgument = None,
    model_option: ModelOption = None,
    output: Annotated[
        Path, typer.Option(help="A .safetensors file, or a .yaml file without the surrogate; a .png goes beside it.")
    ] = Path("calibration.safetensors"),
    plot: Annotated[bool, typer.Option(help="Draw the map of layers and heads (needs matplotlib).")] = True,
    push: Annotated[
        str | None, typer.Option(help="Also upload the file to this hub id, made if need be.", show_default="none")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="4 pieces of 2,048 tokens: an eighth of the time, less precise.")
    ] = False,
    sequences: Annotated[
        int | None, typer.Option(help="Most pieces of text read, chosen at random.", min=1, show_default="16")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each piece; --ratio of them are more rows than AdaKV's window of 32.",
            min=2,
            show_default="4096",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of pieces.", min=0)] = 0,
    surrogate: Annotated[
        SurrogateKind,
        typer.Option(help="linear, or mlp: one inner layer, which wants hundreds of --sequences and optax."),
    ] = SurrogateKind.linear,
    outliers: Annotated[float, _statistic(help="Share of all heads that become outlier heads.", min=0, max=1)] = 0.04,
    whole_layer: Annotated[
        list[int] | None, _statistic(help="A layer whose heads are all outliers; repeatable.", show_default="none")
    ] = None,
    threshold: Annotated[float, _statistic(help="A cosine below this is no similar neighbour.")] = 0.8,
    chunk: Annotated[int, _statistic(help="Rows among which a neighbour is looked for, even.", min=2, max=2**20)] = 256,
    ratio: Annotated[float, _statistic(help="Share of the cache that AdaKV spreads for the heads' shares.")] = 0.25,
    compilation_cache: CompilationCache = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Learn from plain text which rows matter, how many each head needs, and which heads do not cluster."""
    with one_sentence_errors(debug):
        _check(output, threshold, chunk, ratio)
        plot = plot and can_draw("the map of layers and heads")
        _check_push(push)
        most, length = QUICK if quick else THOROUGH
        sequences, tokens = sequences or most, tokens or length
        use_compilation_cache(compilation_cache)

        import numpy as np

        import clusterkv_jax as ckv
        from clusterkv_jax import calibration, observation
        from clusterkv_jax.evaluation.choice import QUICK_SHARES, SHARES, with_choice

        if int(ratio * tokens) <= ckv.AdaKV.window:
            raise ValueError(
                f"--ratio {ratio:g} of --tokens {tokens} is {int(ratio * tokens)} rows, and AdaKV needs more than its "
                f"window of {ckv.AdaKV.window}."
            )
        texts = read_texts(data)
        network = ckv.load(one_model(model, model_option))
        if tokens > network.config.max_positions:
            raise ValueError(f"--tokens {tokens} exceed the model's {network.config.max_positions} positions.")
        shape = (len(network.config.global_layers), network.config.num_kv_heads)
        calibration.choose_outliers(np.zeros(shape), outliers, tuple(whole_layer or ()))  # whether they can be chosen
        pieces = cut(network.tokenizer, texts, tokens, sequences, seed)
        total = observation.layers_read(network, pieces)
        with progress_bar(len(pieces), "pieces") as on_pieces:
            estimate = _estimating(total, len(pieces), tokens)

            def on_layers(done: int, _: int) -> None:
                estimate(done)
                on_pieces(done * len(pieces) / total)

            measures = observation.calibrate(
                network,
                pieces,
                outliers=outliers,
                whole_layers=tuple(whole_layer or ()),
                chunk=chunk,
                threshold=threshold,
                ratio=ratio,
                surrogate=surrogate.value,
                progress=on_layers,
                resume=output.with_name(f".{output.name}.started"),
            )
        with progress_bar(1, "of what auto may take") as on_choices:
            shares = QUICK_SHARES if quick else SHARES
            measures = with_choice(network, measures, pieces, shares, lambda done, of: on_choices(done / of))
        if plot:
            from clusterkv_jax.cli.calibration_picture import draw, draw_choices

            draw(measures, output.with_suffix(".png"))
            if isinstance(measures.auto, tuple):
                draw_choices(measures.auto, output.with_suffix(".auto.png"))
        calibration.write(output, measures)
        _report(measures, output, plot)
        if push is not None:
            plain_console().print(f"Uploaded: {calibration.push(measures, push)}", soft_wrap=True)


def _estimating(layers: int, pieces: int, tokens: int) -> Callable[[int], None]:
    """Says once, by how long two layers took, how long all of them take; nothing of a minute or less."""
    begin, first, said = 0.0, 0, False

    def on_layers(done: int) -> None:
        nonlocal begin, first, said
        if not begin:
            begin, first = time.monotonic(), done
        elif not said and done >= first + 2:
            minutes, said = layers * (time.monotonic() - begin) / (done - first) / 60, True
            share = QUICK[0] * QUICK[1] / (pieces * tokens)
            hint = f"; --quick takes {minutes * share:,.0f}" if share < 1 else ""
            line = f"About {minutes:,.0f} minutes for {pieces} pieces of {tokens:,} tokens{hint}."
            if minutes > 1:
                console = plain_console(stderr=True)
                console.print(f"{line} Stopped, it goes on where it was.", highlight=False, soft_wrap=True)

    return on_layers


def _check_push(push: str | None) -> None:
    """What would be noticed only after minutes of work."""
    if push is None:
        return
    from clusterkv_jax.storage import hub

    if hub.parse(push) is None:
        raise ValueError(f"--push must be a hub id such as owner/name, got {push!r}.")
    hub.check_login(f"--push {push}")


def _check(output: Path, threshold: float, chunk: int, ratio: float) -> None:
    """What would be noticed only after minutes of work."""
    if not -1 <= threshold <= 1:
        raise ValueError(f"--threshold must be between -1 and 1, got {threshold}.")
    if chunk % 2:
        raise ValueError(f"--chunk must be an even number of rows, got {chunk}.")
    if not 0 < ratio < 1:
        raise ValueError(f"--ratio must be between 0 and 1, got {ratio}.")
    if output.suffix not in (".safetensors", ".yaml", ".yml"):
        raise ValueError(f"--output must be a .safetensors or a .yaml file, got {output}.")
    if not output.parent.is_dir():
        raise ValueError(f"The folder {output.parent} does not exist; make it before a calibration is written there.")


def read_texts(data: str) -> list[str]:
    """Texts of a file, a folder, or a hub data set `ID[:CONFIG[:SPLIT]]` with a column "text"."""
    from clusterkv_jax.evaluation.tasks import sources

    place = Path(data)
    if place.exists():
        return list(map(running, sources.books(data).values()))
    name, _, part = data.partition(":")
    config, _, split = part.partition(":")
    if "/" not in name or data.startswith((".", "/")):
        raise ValueError(f"--data {data} is no file, no folder and no hub data set such as OWNER/NAME:CONFIG:SPLIT.")
    entries = sources.rows(None, name, (name, config or None, split or "train"), sources.TextRow)
    return [running("".join(row["text"] for row in entries))]


def running(text: str) -> str:
    """The text in one line: where a printer broke lines says nothing of what a head needs."""
    return " ".join(text.split())


def cut(tokenizer: Any, texts: Sequence[str], tokens: int, most: int, seed: int) -> list[list[int]]:
    """At most `most` pieces of `tokens` tokens, chosen at random from those that tile the texts.

    Raises ValueError where the texts do not fill one.
    """
    import numpy as np

    from clusterkv_jax.text.tokenizer import encode

    if tokenizer is None:
        raise ValueError("The model has no tokenizer, so no text can be read with it.")
    pieces = []
    longest = 0
    for text in texts:
        ids = encode(tokenizer, text)
        longest = max(longest, len(ids))
        pieces += [ids[start : start + tokens] for start in range(0, len(ids) - tokens + 1, tokens)]
    if not pieces:
        raise ValueError(f"No text has {tokens} tokens, the longest {longest}; give more text or fewer --tokens.")
    numbers = np.random.default_rng(seed).permutation(len(pieces))[:most]
    return [pieces[i] for i in sorted(numbers)]


def _report(measures: Any, output: Path, plot: bool) -> None:
    table = Table(box=SIMPLE_HEAD)
    columns = ["layer", "without neighbours, by head", "rows if clustered", "rows if chosen by attention"]
    tables = [measures.cluster_shares, measures.head_shares]
    if measures.least_scores is not None:
        columns += ["rows by scores, of 1/8", "explained"]
        tables += [measures.kept_shares(1 / 8), measures.explained]
    for name in columns:
        table.add_column(name, justify="right" if name == "layer" else "left")
    for layer, (shares, *others) in enumerate(zip(measures.outlier_share, *tables, strict=True)):
        styles = ["red" if (layer, head) in measures.outlier_heads else "" for head in range(len(shares))]
        cells = Text(" ").join(Text(f"{share:.0%}", style) for share, style in zip(shares, styles, strict=True))
        table.add_row(str(layer), cells, *(" ".join(f"{row:.2g}" for row in rows) for rows in others))
    console = plain_console()
    console.print(table)
    sizes = measures.settings
    heads = sum(map(len, measures.outlier_share))
    console.print(
        f"{len(measures.outlier_heads)} of {heads} heads are outliers, from {sizes['sequences']} pieces of "
        f"{sizes['tokens']:,} tokens.",
        highlight=False,
    )
    for at in measures.auto if isinstance(measures.auto, tuple) else ():
        losses = [f"{name} {loss:.3f} and {at.repeating[name]:.3f}" for name, loss in at.continuing.items()]
        line = f"auto takes {at.choice} at {at.ratio:.2%}; nats a token above the full cache, continuing and repeating:"
        console.print(f"{line} {', '.join(losses)}.", highlight=False, soft_wrap=True)
    files = f"{output} and {output.with_suffix('.png')}" if plot else f"{output}"
    console.print(f"Written to {files}", highlight=False, soft_wrap=True)
    if measures.surrogate is not None and output.suffix != ".safetensors":
        advice = f"auto, orbitkv and kvzap need it: name {output.with_suffix('.safetensors')}"
        line = f"The surrogate of scores is not in a {output.suffix} file; {advice}."
        console.print(line, highlight=False, soft_wrap=True)
