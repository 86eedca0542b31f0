"""The `clusterkv` command and its subcommands.

Everything heavy (jax, tokenizers, the model) is imported by the command that needs it, so that `--help` is quick.
"""

import typer

from clusterkv_jax.cli import benchmark, calibrate, convert, evaluate, generate, inspect, lists, plan

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Decode from long prompts with a clustered KV cache that keeps a fraction of the rows.",
)
app.command(epilog=generate.EXAMPLES)(generate.generate)
app.command("methods")(lists.list_methods)
app.command("models")(lists.list_models)
app.command(epilog=calibrate.EXAMPLES)(calibrate.calibrate)
app.command(epilog=convert.EXAMPLES)(convert.convert)
app.command()(evaluate.evaluate)
app.command("join")(evaluate.join)
app.command(epilog=plan.EXAMPLES)(plan.plan)
app.command(epilog=benchmark.EXAMPLES)(benchmark.benchmark)
app.add_typer(inspect.inspect, name="inspect")
app.command(context_settings=evaluate.PASS_ON)(evaluate.lm_eval)
