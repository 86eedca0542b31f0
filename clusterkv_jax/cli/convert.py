"""`clusterkv convert`: a model of the hub as an Orbax checkpoint that every host reads its own part of."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from clusterkv_jax.cli.calibrate import cut, read_texts
from clusterkv_jax.cli.terminal import one_sentence_errors, plain_console, progress_bar

EXAMPLES = """[bold]What for[/bold]

A model that many hosts share is read from one folder or bucket by all of
them, each its own part of every tensor. Orbax's format (OCDBT) is made for
that:

  clusterkv convert meta-llama/Llama-3.1-70B gs://my-bucket/llama-70b

  clusterkv evaluate --suite ruler --model gs://my-bucket/llama-70b ...

The model passes through memory in parts of half a gigabyte. One for a bucket
is made on this machine first, and takes its size on the disk. Killed, the
same command goes on where it was; the folder gets its name when it is whole.
Weights in fp8, int8 or int4 are written as the numbers that they stand for.
With [bold]--weights int4[/bold] those of layers are rounded to codes, a quarter of the
bytes:

  clusterkv convert meta-llama/Llama-3.1-8B ./llama-int4 --weights int4

With [bold]--data[/bold] the model reads 16 pieces of a text, of 512 tokens each. What a
code is off is then made good by the others, so that less is lost:

  clusterkv convert ./my-llama ./llama-int4 --weights int4 --data books/

Needs the extra pods: pip install 'clusterkv-jax\\[pods]'.
"""


PIECES, TOKENS = 16, 512  # that --data gives


def convert(
    source: Annotated[
        str, typer.Argument(help="A folder of safetensors, a hub id (@revision), or demo.", show_default=False)
    ],
    target: Annotated[
        str, typer.Argument(help="The folder or gs:// address to write, which does not exist.", show_default=False)
    ],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="that of the token embeddings")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Round weights of layers to int8 or int4.", show_default="numbers")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Round int4 by what layers read: a text file, a folder of .txt files (.gz too), or a hub data set as "
            "ID:CONFIG:SPLIT.",
            show_default="none",
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Write a Hugging Face model as an Orbax checkpoint with checksums, tensor by tensor."""
    with one_sentence_errors(debug):
        import jax

        from clusterkv_jax.checkpoints import convert

        jax.config.update("jax_platforms", "cpu")  # accelerators are left to whoever computes
        pieces = None if data is None else _pieces(source, weights, data)
        with progress_bar(100, "percent") as on_percent:
            wrote = convert.convert(
                source,
                target,
                dtype=dtype,
                weights=weights,
                data=pieces,
                progress=lambda done, total: on_percent(100 * done // total),
            )
        text = f"Written to {target}" if wrote else f"{target} is whole already; nothing was done."
        plain_console().print(text, highlight=False, soft_wrap=True)


def _pieces(source: str, weights: str | None, data: str) -> list[list[int]]:
    from clusterkv_jax.checkpoints.loading import open_checkpoint

    if weights != "int4":
        raise ValueError(f"--data says how --weights int4 rounds, got --weights {weights}.")
    checkpoint = open_checkpoint(source)
    return begun(checkpoint.tokenizer(), read_texts(data), min(TOKENS, checkpoint.config.max_positions), PIECES)


def begun(tokenizer: Any, texts: Sequence[str], tokens: int, most: int) -> list[list[int]]:
    """At most `most` pieces of texts, of `tokens` tokens each, that begin as the tokenizer begins a text: some models
    read nothing well without that.
    """
    from clusterkv_jax.text.tokenizer import encode

    pieces = cut(tokenizer, texts, tokens, most, seed=0)
    whole, plain = encode(tokenizer, "a", add_special_tokens=True), encode(tokenizer, "a")
    begin = whole[: whole.index(plain[0])]
    return [[*begin, *piece][:tokens] for piece in pieces]
