"""`clusterkv inspect`: pictures of a model's keys, and of what methods find in them."""

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.box import SIMPLE_HEAD
from rich.table import Table
from typing_extensions import override

from clusterkv_jax.cli.named import by_class, check_looks
from clusterkv_jax.cli.options import (
    CompilationCache,
    ModelArgument,
    ModelOption,
    budgets_option,
    check_taken,
    methods_option,
    one_model,
    parse_count,
    parse_entries,
    split,
)
from clusterkv_jax.cli.terminal import one_sentence_errors, plain_console, use_compilation_cache

BUDGET = "0.25"  # where none is given


class KeysByDefault(typer.core.TyperGroup):
    """`inspect MODEL` is `inspect keys MODEL`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Arguments that begin with no command's name are those of `keys`."""
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["keys", *args]
        return super().parse_args(ctx, args)


inspect = typer.Typer(cls=KeysByDefault, help="Draw what a model's keys look like, and what methods find in them.")


@inspect.command("keys")
def inspect_keys(
    text: Annotated[Path, typer.Option(help="A text to look at, UTF-8; .gz too.")],
    model: ModelArgument = None,
    model_option: ModelOption = None,
    methods: Annotated[list[str], methods_option()] = ["centroidkv"],
    budget: Annotated[
        str | None, typer.Option(help="A share of the cache (0.25) or rows (1024).", show_default=BUDGET)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 2048,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("inspect.html"),
    compilation_cache: CompilationCache = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Draw what a model's keys look like and what methods do to them, layer by layer."""
    with one_sentence_errors(debug):
        use_compilation_cache(compilation_cache)
        import clusterkv_jax as ckv
        from clusterkv_jax.evaluation.inspection import page as inspection_page
        from clusterkv_jax.evaluation.tasks import sources
        from clusterkv_jax.presets import AUTO, UNLEARNED
        from clusterkv_jax.storage.files import write_whole

        entries = parse_entries(split(methods), (budget or BUDGET,), meant={AUTO: UNLEARNED})
        by_name = {entry.name: entry.method for entry in by_class(entries)}
        check_looks(by_name)
        if budget is not None:
            check_taken(entries, (budget,))
        network = ckv.load(one_model(model, model_option))
        ids = _tokens_of(network, sources.body(sources.read_text(text)), tokens)
        write_whole(output, inspection_page.page_of(network, ids, by_name))
        plain_console().print(f"Written to {output}", highlight=False)


@inspect.command("recall")
def inspect_recall(
    text: Annotated[Path, typer.Option(help="A text to look at, UTF-8; .gz too.")],
    model: ModelArgument = None,
    model_option: ModelOption = None,
    methods: Annotated[list[str], methods_option(help="A method that recalls; repeat it, or use commas.")] = [
        "clusterkv,quest"
    ],
    budgets: Annotated[list[str], budgets_option(help="Rows to recall; repeat it, or use commas.")] = [
        "256,512,768,1024"
    ],
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 4096,
    steps: Annotated[int, typer.Option(help="The last of them, whose queries are compared.")] = 64,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("recall.html"),
    compilation_cache: CompilationCache = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Measure how many of the rows with the largest attention each recall method selects."""
    with one_sentence_errors(debug):
        use_compilation_cache(compilation_cache)
        import clusterkv_jax as ckv
        from clusterkv_jax.evaluation.inspection import observations, recall_rates
        from clusterkv_jax.evaluation.tasks import sources
        from clusterkv_jax.storage.files import write_whole

        entries = parse_entries(split(methods), tuple(str(parse_count(part, "--budgets")) for part in split(budgets)))
        for entry in entries:
            if entry.method.forgets:
                raise ValueError(
                    f"--methods must be methods that recall, and {entry.name} keeps no more than it reads."
                )
        network = ckv.load(one_model(model, model_option))
        ids = _tokens_of(network, sources.body(sources.read_text(text)), tokens)
        if not 1 <= steps < tokens:
            raise ValueError(f"--steps must be between 1 and {tokens - 1}, got {steps}.")
        layers = observations.observe(network, ids)
        rates = {}
        for entry in entries:
            rates[entry.name, int(entry.budget)] = recall_rates.recall_rates(layers, entry.method, steps)
        write_whole(output, recall_rates.recall_page(network, tokens, steps, rates))
        table = Table(box=SIMPLE_HEAD)
        table.add_column("method")
        rows = sorted({budget for _, budget in rates})
        for budget in rows:
            table.add_column(f"B = {budget:,}", justify="right")
        for name in dict.fromkeys(name for name, _ in rates):
            table.add_row(name, *(f"{recall_rates.mean_rate(rates[name, budget]):.3f}" for budget in rows))
        plain_console().print(table)
        plain_console().print(f"Written to {output}", highlight=False)


def _tokens_of(network: Any, text: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text."""
    from clusterkv_jax.text.tokenizer import encode

    if network.tokenizer is None:
        raise ValueError(f"Model {network.name} has no tokenizer, which inspection needs.")
    ids = encode(network.tokenizer, text, add_special_tokens=True)
    most = min(len(ids), network.config.max_positions)
    if not 256 <= tokens <= most:
        raise ValueError(f"--tokens must be between 256 and {most}, what text and model have, got {tokens}.")
    return ids[:tokens]
