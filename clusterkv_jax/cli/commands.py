"""The `clusterkv` command and its subcommands.

Everything heavy (jax, tokenizers, the model) is imported by the command that needs it, so that `--help` is quick.
"""

import importlib.metadata
from typing import Annotated

import typer

from clusterkv_jax.cli import (
    benchmark,
    calibrate,
    chat,
    compare,
    convert,
    demo,
    evaluate,
    generate,
    inspect,
    lists,
    plan,
    read,
    serve,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Answer from long texts with a KV cache that keeps a fraction of the tokens.",
)


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(importlib.metadata.version("clusterkv-jax"))
        raise typer.Exit
    return asked


@app.callback()
def _version(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command(epilog=generate.EXAMPLES)(generate.generate)
app.command(epilog=read.EXAMPLES)(read.read)
app.command(epilog=chat.EXAMPLES)(chat.chat)
app.command(epilog=serve.EXAMPLES)(serve.serve)
app.command()(demo.demo)
app.command("methods")(lists.list_methods)
app.command("models")(lists.list_models)
app.command(epilog=calibrate.EXAMPLES)(calibrate.calibrate)
app.command(epilog=convert.EXAMPLES)(convert.convert)
app.command()(evaluate.evaluate)
app.command("join")(evaluate.join)
app.command(epilog=compare.EXAMPLES)(compare.compare)
app.command(epilog=plan.EXAMPLES)(plan.plan)
app.command(epilog=benchmark.EXAMPLES)(benchmark.benchmark)
app.add_typer(inspect.inspect, name="inspect")
app.command(context_settings=evaluate.PASS_ON)(evaluate.lm_eval)
