"""Named settings of the methods: the papers' own, from `configs/methods/`, and yours, from any YAML file.

A preset names a method, says where its numbers come from, and may leave the budget open:

    method: Chelsea
    description: one line for people who choose
    source: where the numbers are printed
    settings: {r_init: 0.35, r_decay: 0.1, r_steps: 2}
    budget: {ratio: 0.2}          # optional
    calibration: my-llama.yaml    # optional: what `clusterkv calibrate` wrote, beside this file
"""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from clusterkv_jax import methods, schema
from clusterkv_jax.buckets import place
from clusterkv_jax.budget import MOST_ROWS, Budget
from clusterkv_jax.calibration import Calibration, fingerprint, with_shares
from clusterkv_jax.calibration import read as read_calibration
from clusterkv_jax.checkpoints import Model, check_model
from clusterkv_jax.learned.repetition import instruction
from clusterkv_jax.text.chat import Chat, frame_ids, has_template

# Numbers of settings are rows or shares, that sums of in 32 bits hold; a budget of bytes is larger.
MOST, MOST_BUDGET_BYTES = MOST_ROWS, 2**50
_KEYS = ("method", "description", "source", "settings", "budget", "calibration")
# In the order of the documentation; methods of methods (`Composed`, `Matched`) are made in Python.
_METHODS = {
    cls.__name__: cls
    for cls in (
        methods.Full,
        methods.CentroidKV,
        methods.Chelsea,
        methods.GravityKV,
        methods.OrbitKV,
        methods.ChunkKV,
        methods.SnapKV,
        methods.PyramidKV,
        methods.AdaKV,
        methods.TOVA,
        methods.KVzap,
        methods.KVzip,
        methods.ExpectedAttention,
        methods.KeyDiff,
        methods.Knorm,
        methods.LagKV,
        methods.Compactor,
        methods.DropKV,
        methods.H2O,
        methods.StreamingLLM,
        methods.CaM,
        methods.ClusterKV,
        methods.Quest,
        methods.InfiniGen,
    )
}


@dataclass(frozen=True)
class Preset:
    """A method with settings: what a file in `configs/methods/` says, checked."""

    name: str
    method: type
    description: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    calibration: Calibration | None = None

    @property
    def takes_budget(self) -> bool:
        """Whether the method has a budget at all; `Full` has none."""
        return "budget" in _fields(self.method)


def preset(name: str, budget: Budget | None = None, calibration: Calibration | None = None, **settings: Any):
    """The method of a preset, of a method's own defaults (`"chelsea"`), or of a `.yaml` file.

    `budget`, `calibration` and `settings` go before what the preset says.
    """
    entry = find_preset(name)
    calibrated = calibration or entry.calibration
    method = _made(entry, budget, settings)
    return method if calibrated is None else calibrated.applied(method)


def completed(model: Model, method: methods.Method, chat: Chat = Chat()) -> methods.Method:  # noqa: B008  (frozen)
    """The method with what only a model knows: its calibration's shares, words of its tokenizer, and its chat template
    with what `chat` says of it.

    `generate` and `Engine` complete a method themselves. `prefill`, `decode_step` and `load_cache` see no model: with
    the completed method their caches are those of `generate`. A method that needs nothing of a model stays as it is.

    Raises ValueError for anything but a model.
    """
    check_model(model)
    result: Any = with_shares(model.calibration, method)
    if model.tokenizer is None or "repetition" not in method.needs(0):
        return result
    frame = None
    if has_template(model.tokenizer):
        with contextlib.suppress(ValueError):  # of a template without a frame, in which nothing can be asked
            frame = frame_ids(model.tokenizer, chat)
    return result.with_words(instruction(model.tokenizer), frame)


def described(model: Model, method: methods.Method) -> str:
    """What answers depend on: the method, and the model's calibration where it takes scores or shares from there."""
    takes_it = "scores" in method.needs(0) or with_shares(model.calibration, method) != method
    if model.calibration is None or not takes_it:
        return repr(method)
    return f"{method!r} with calibration {fingerprint(model.calibration)}"


def _made(entry: Preset, budget: Budget | None, settings: Mapping[str, Any]):
    name = entry.name
    checked = _checked_settings(entry.method, settings, f"preset {name!r}")
    effective = budget or entry.budget
    if entry.takes_budget:
        if effective is None:
            raise ValueError(
                f"{entry.method.__name__} needs a budget and preset {name!r} leaves it open: "
                "give a share of the cache or a number of rows."
            )
        return entry.method(effective, **{**entry.settings, **checked})
    if budget is not None:
        raise ValueError(f"{entry.method.__name__} keeps everything and takes no budget, got {budget}.")
    return entry.method(**{**entry.settings, **checked})


def is_file(name: str) -> bool:
    """Whether a preset's name is that of a file."""
    return name.endswith((".yaml", ".yml"))


def find_preset(name: str) -> Preset:
    """Look a preset up by its name, its method's name in small letters, or its file."""
    if is_file(name):
        return read_preset(place(name))
    entries = list_presets()
    if name not in entries:
        raise ValueError(
            f"Unknown method or preset {name!r}; known: {', '.join(entries)}, or the path of a .yaml file."
        )
    return entries[name]


def list_presets() -> dict[str, Preset]:
    """All presets by name; a method without a preset of its own name stands there with its defaults."""
    folder = resources.files("clusterkv_jax.configs") / "methods"
    presets = {p.name: p for p in (read_preset(file) for file in folder.iterdir() if file.name.endswith(".yaml"))}
    for name, cls in _METHODS.items():
        named = Preset(name.lower(), cls, f"{name} with the defaults of its class", "no paper")
        presets.setdefault(named.name, named)
    return dict(sorted(presets.items()))


def read_preset(file) -> Preset:
    """Read and check one preset file (a path or a package resource)."""
    where = f"preset file {file}"
    content = schema.from_yaml(schema.read_text(file, most=schema.MOST_YAML), f"Preset file {file}")
    schema.check_keys(content, _KEYS, where)
    name, description, source = (_converted(content.get(key), str, key, where) for key in _KEYS[:3])
    if name not in _METHODS:
        raise ValueError(
            f"Key 'method' of {where} must be one of {', '.join(_METHODS)}, got {schema.shown(repr(name))}."
        )
    method, budget = _METHODS[name], content.get("budget")
    measured = _converted(content.get("calibration"), str | None, "calibration", where)
    return Preset(
        name=Path(file.name).stem,
        method=method,
        description=description,
        source=source,
        settings=_checked_settings(method, content.get("settings", {}), where),
        budget=None if budget is None else _budget(budget, where),
        calibration=None if measured is None else _calibration(file.parent / measured, where),
    )


def _calibration(file: Any, where: str) -> Calibration:
    try:
        return read_calibration(file)
    except FileNotFoundError as error:
        raise ValueError(f"Key 'calibration' of {where} names no calibration: {error}") from error


def _budget(content: Any, where: str) -> Budget:
    where = f"'budget' of {where}"
    schema.check_keys(content, _fields(Budget), where)
    values = _checked_values(Budget, content, where)
    try:
        return Budget(**values)
    except ValueError as error:
        raise ValueError(f"Impossible {where}: {error}") from error


def _checked_settings(method: type, settings: Any, where: str) -> dict[str, Any]:
    """Settings of a method with their keys, types and values checked; the budget is not among them."""
    allowed = {key: default for key, default in _fields(method).items() if key != "budget"}
    schema.check_keys(settings, allowed, f"'settings' of {where}")
    values = _checked_values(method, settings, where)
    budget = {"budget": Budget(ratio=1.0)} if "budget" in _fields(method) else {}
    try:
        method(**budget, **values)
    except ValueError as error:
        raise ValueError(f"Impossible setting in {where}: {error}") from error
    return values


def _checked_values(cls: type, content: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {key: _converted(value, hints[key], key, where) for key, value in content.items()}


def _converted(value: Any, hint: Any, key: str, where: str) -> Any:
    """A YAML value as an annotated type: lists become tuples, a whole number is also a number, true is neither."""
    try:
        result = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"Key {key!r} of {where} must be {_describe(hint)}, got {schema.shown(repr(value))}."
        ) from error
    most = MOST_BUDGET_BYTES if key == "bytes" else MOST
    if any(abs(x) > most for x in _numbers(result)):
        raise ValueError(f"Key {key!r} of {where} allows numbers up to {most:,}, got {schema.shown(repr(value))}.")
    return result


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a value of a key, however deep."""
    if isinstance(value, int | float):
        yield value
    for part in value if isinstance(value, tuple) else ():
        yield from _numbers(part)


def _fields(cls: type) -> dict[str, dataclasses.Field]:
    by_place_first = sorted(dataclasses.fields(cls), key=lambda f: f.kw_only is True)
    return {f.name: f for f in by_place_first if f.init}


def _describe(hint: Any, many: bool = False) -> str:
    """An annotated type in words, for error messages."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(argument, many) for argument in arguments)
    if origin is tuple:
        return f"{'lists' if many else 'a list'} of {_describe(arguments[0], many=True)}"
    names = {int: "whole number", float: "number", str: "text"}
    if hint not in names:
        return {bool: "true or false", type(None): "null"}.get(hint, str(hint))
    return f"{names[hint]}s" if many else f"a {names[hint]}"
