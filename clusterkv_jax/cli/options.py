"""What commands take, from texts to methods and budgets."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

CompilationCache = Annotated[
    bool,
    typer.Option(
        "--compilation-cache/--no-compilation-cache",
        help="Keep compiled programs in your cache folder, so that the next call starts at once.",
    ),
]


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
    whole = [budget for budget in budgets if (parse_budget(budget).ratio or 0) >= 1]
    entries = [Entry("full", "1.0", Full())] if whole or not all(takes.values()) else []
    for name in names:
        if takes[name]:
            entries += [Entry(name, text, preset(name, parse_budget(text))) for text in budgets if text not in whole]
    return entries


def parse_budget(text: str) -> Any:
    """A share of the cache such as 0.25, or rows such as 1024."""
    from clusterkv_jax.budget import Budget

    try:
        return Budget(tokens=int(text)) if text.isdigit() and text != "1" else Budget(ratio=float(text))
    except ValueError as error:
        raise ValueError(f"--budgets takes shares such as 0.25 and rows such as 1024, got {text!r}.") from error


def split(text: str) -> tuple[str, ...]:
    """The parts between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_count(text: str, option: str = "--lengths") -> int:
    """A whole number of at least 0."""
    if not text.isdigit():
        raise ValueError(f"{option} takes whole numbers such as 4096, got {text!r}.")
    return int(text)
