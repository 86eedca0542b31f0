"""Methods that commands are told by name: what the names mean for a model, and whether they can be, before any runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from clusterkv_jax.cli.options import parse_budget, split, stored_as
from clusterkv_jax.cli.terminal import plain_console


def meant(model: str, names: Sequence[str], calibration: Any = None) -> dict[str, str]:
    """Names that mean another preset for this model: "auto" without a calibration, which a line then says."""
    from clusterkv_jax.presets import AUTO, UNLEARNED, in_place_of_auto, is_calibrated

    if AUTO not in names or is_calibrated(model, calibration):
        return {}
    plain_console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"{in_place_of_auto(model)}."), style="dim")
    return {AUTO: UNLEARNED}


def by_class(entries: Sequence[Any]) -> list[Any]:
    """Entries under the names that results give them. Raises ValueError where two would be told apart no more."""
    from clusterkv_jax.presets import called

    named = [replace(entry, name=called(entry.name)) for entry in entries]
    for name in {entry.name for entry in named}:
        given = {entry.name for entry in entries if called(entry.name) == name}
        if len(given) > 1:
            raise ValueError(f"Two methods are called {name}: {' and '.join(sorted(given))}; rename one of them.")
    return named


def check_prompts(
    model: Any, prompts: Sequence[Any], methods: Mapping[str, Any], sizes: Mapping[str, Any], keep_short: bool = False
) -> None:
    """Raise ValueError for a method that cannot read these prompts; `sizes` are the arguments of `generate`."""
    import numpy as np

    from clusterkv_jax.engine.requests import request_of_batch
    from clusterkv_jax.generation.batch import make_batch
    from clusterkv_jax.generation.generate import kept_whole
    from clusterkv_jax.methods.plan import check_prompts, is_endless
    from clusterkv_jax.presets import completed

    sizes = {name: size for name, size in sizes.items() if name != "sampling"}
    endless = not keep_short and all(is_endless(method, model.config.max_positions) for method in methods.values())
    batch = make_batch(model, prompts, **sizes, endless=endless)
    lengths = np.asarray([len(text) for text in batch.texts], np.int64)
    for method in methods.values():
        method = completed(model, method, batch.chat)
        batch = replace(batch, whole=kept_whole(model, method, batch)) if keep_short else batch
        check_prompts(model.config, method, request_of_batch(model, method, batch), lengths)


def check_looks(methods: Mapping[str, Any]) -> None:
    """Raise ValueError for methods that a look at queries, keys and values cannot judge."""
    for name, method in methods.items():
        if wanted := {"scores", "repetition"} & method.inputs(0):
            raise ValueError(f"{name} goes by {wanted.pop()} of a whole model, which clusterkv inspect does not make.")


def budgets_of(budgets: list[str] | None, ratio: float | None, tokens: int | None) -> dict[str, Any]:
    """The budgets by the texts that name them; none where the presets have theirs."""
    from clusterkv_jax.budget import Budget

    if ratio is not None and tokens is not None:
        raise ValueError(f"Give --cache-ratio or --cache-tokens, not both (got {ratio} and {tokens}).")
    if ratio is None and tokens is None:
        return {text: parse_budget(text) for text in split(budgets or [])}
    if budgets:
        raise ValueError(f"Give --budget, --cache-ratio or --cache-tokens, not several (got {', '.join(budgets)} too).")
    return {str(ratio or tokens): Budget(ratio=ratio, tokens=tokens)}


def chosen(
    names: tuple[str, ...], budgets: dict[str, Any], calibration: Any, cache_dtype: str | None, meant: Mapping[str, str]
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
