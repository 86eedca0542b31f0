"""What commands take, from texts to methods and budgets."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import typer

CompilationCache = Annotated[
    bool,
    typer.Option(
        " /--no-compilation-cache",
        help="Do not keep compiled programs in your cache folder for the next call.",
        rich_help_panel="Compiled programs",
        show_default="kept",
    ),
]


_where = partial(typer.Option, rich_help_panel="Where it runs")
Mesh = Annotated[
    str | None,
    _where(help="Replicas and the devices of each, such as data=2,model=4.", show_default="one for each process"),
]
Distributed = Annotated[bool, _where("--distributed", help="One of several processes, which all get this command.")]
CoordinatorAddress = Annotated[
    str | None, _where(help="HOST:PORT of process 0.", show_default="found on TPU pods and under SLURM")
]
NumProcesses = Annotated[int | None, _where(help="How many they are.", min=1, show_default="found")]
ProcessId = Annotated[int | None, _where(help="Which one this is, from 0.", min=0, show_default="found")]
PeerTimeout = Annotated[float, _where(help="Seconds without a sign of a process after which all end with 75.", min=1)]
CacheFolder = Annotated[
    str | None, _where(help="Folder of compiled programs, or gs://, one for all hosts say.", show_default="yours")
]

_reading = partial(typer.Option, rich_help_panel="Cache")
Reading = Annotated[str, _reading(help="'whole' compresses a text after it has been read, 'gated' while it is read.")]
Window = Annotated[int, _reading(help="Gated, the newest tokens that stay until a text has been read.")]
Renumber = Annotated[
    bool, _reading("--renumber", help="Gated, renumber rows where the model's positions end: a text of any length.")
]
Chunk = Annotated[int, _reading(help="Gated, tokens that are read at once, at most --window.")]

_drawing = partial(typer.Option, rich_help_panel="Sampling")
SamplingOf = Annotated[
    str | None,
    _drawing("--sampling", help="'model': draw as its authors say in generation_config.json.", show_default="as below"),
]
Temperature = Annotated[float, _drawing(help="0 takes the likeliest token, more draws more freely.")]
TopK = Annotated[int | None, _drawing(help="Draw from the k likeliest tokens only.")]
TopP = Annotated[float | None, _drawing(help="Draw from the likeliest tokens that together reach p.")]
MinP = Annotated[float | None, _drawing(help="Drop tokens less likely than this share of the best.")]
Seed = Annotated[int, _drawing(help="The same seed draws the same tokens.")]

HELD = "How weights of layers are held: 'stored' (in the codes of files), 'dequantised', 'int8' or 'int4'."
Weights = Annotated[
    str | None, typer.Option("--weights", help=HELD, show_default="stored on the CPU, else dequantised")
]

MODEL = (
    "'demo', 'smollm2', a folder, a GGUF file, a gs:// address, or a hub id as owner/name, owner/name@revision (a "
    "branch, tag or commit) or owner/name:file.gguf."
)
CALIBRATION = "What 'clusterkv calibrate' measured: a file, a folder, a gs:// address, or a hub id such as owner/name."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same as the argument MODEL.", show_default=False)]


def methods_option(**about: Any) -> Any:
    """`--method`: repeated, or names between commas, which `--methods` reads better for."""
    text = "A method, a preset, its .yaml file, or FILE.py:Class; repeat it, or use commas, to compare several."
    return typer.Option("--method", "--methods", **{"help": text, **about})


def budgets_option(**about: Any) -> Any:
    """`--budget`, as `--method`."""
    text = "A share of the cache (0.25) or rows (1024); repeat it, or use commas, for several."
    return typer.Option("--budget", "--budgets", **{"help": text, **about})


def cache_dtype_option(**about: Any) -> Any:
    """`--cache-dtype`: how all methods store their rows."""
    text = "Store rows as int8, float8_e4m3 or int4, with a scale each."
    return typer.Option("--cache-dtype", **{"help": text, "show_default": "the model's", **about})


def stored_as(cache_dtype: str | None) -> dict[str, Any]:
    """The setting of a preset that `--cache-dtype` makes."""
    return {} if cache_dtype is None else {"cache_dtype": cache_dtype}


def one_model(argument: str | None, option: str | None) -> str:
    """The model, by either way to name it."""
    if (argument is None) == (option is None):
        names = "none" if argument is None else f"{argument} and {option}"
        raise ValueError(f"One model is needed, as MODEL or as --model, got {names}.")
    return argument or option or ""


def parse_entries(
    names: Sequence[str],
    budgets: Sequence[str],
    calibration: Any = None,
    cache_dtype: str | None = None,
    meant: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """Every method with every budget below the full cache; the full cache once, for "full" or a budget of 1.0.

    A calibration and a type of stored rows go before what a preset says. `meant` has names that mean another preset.
    """
    from clusterkv_jax.evaluation.batching import MethodEntry
    from clusterkv_jax.presets import find_preset, preset

    if not names or not budgets:
        raise ValueError("--methods and --budgets must each name at least one.")
    _check_twins("--methods", names, names)
    _check_twins("--budgets", budgets, list(map(parse_budget, budgets)))
    stored = stored_as(cache_dtype)
    takes = {name: find_preset(name).takes_budget for name in names}
    whole = [budget for budget in budgets if (parse_budget(budget).ratio or 0) >= 1]
    keeps_all = [name for name in names if not takes[name]]
    entries = [MethodEntry("full", "1.0", preset("full", **stored))] if whole or "full" in keeps_all else []
    entries += [MethodEntry(name, "1.0", preset(name, **stored)) for name in keeps_all if name != "full"]
    for name in names:
        if takes[name]:
            entries += [
                MethodEntry(name, text, preset(meant.get(name, name), parse_budget(text), calibration, **stored))
                for text in budgets
                if text not in whole
            ]
    return entries


def check_taken(entries: Sequence[Any], budgets: Sequence[str]) -> None:
    """Raise ValueError if all methods keep everything, and a budget says otherwise."""
    smaller = [text for text in budgets if (parse_budget(text).ratio or 0) < 1]
    if smaller and all(entry.name == "full" for entry in entries):
        raise ValueError(f"--budgets {','.join(smaller)} needs a method that takes a budget; full keeps everything.")


def _check_twins(option: str, texts: Sequence[str], values: Sequence[Any]) -> None:
    """Raise ValueError where two texts mean the same."""
    for place, value in enumerate(values):
        if (first := values.index(value)) != place:
            raise ValueError(f"{option} names the same twice: {texts[first]} and {texts[place]}.")


def parse_budget(text: str) -> Any:
    """A share of the cache such as 0.25, or rows such as 1024."""
    from clusterkv_jax.budget import MOST_ROWS, Budget
    from clusterkv_jax.evaluation.records import BUDGET

    if re.match(BUDGET, text):
        rows = text.isdigit() and text != "1"
        if rows and int(text) <= MOST_ROWS:
            return Budget(tokens=int(text))
        if not rows and float(text) <= 1:
            return Budget(ratio=float(text))
    raise ValueError(
        f"--budgets takes shares up to 1 such as 0.25, and rows such as 1024 up to {MOST_ROWS:,}, got {text!r}."
    )


def check_drawing(sampling: str | None, *others: float | None) -> None:
    """Raise ValueError for anything but the model's own way to draw, alone."""
    if sampling not in (None, "model"):
        raise ValueError(f"--sampling must be model, or be left out, got {sampling!r}.")
    if sampling is not None and any(others):
        raise ValueError("Give --sampling model, or --temperature and the filters, not both.")


def split(texts: str | Sequence[str]) -> tuple[str, ...]:
    """The parts between commas, of one text or of several."""
    every = [texts] if isinstance(texts, str) else texts
    return tuple(part.strip() for text in every for part in text.split(",") if part.strip())


def parse_count(text: str, option: str = "--lengths") -> int:
    """A whole number of at least 0."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError(f"{option} takes whole numbers such as 4096, got {text!r}.")
    return int(text)
