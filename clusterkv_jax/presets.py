"""Methods by name: the papers' settings, from `configs/methods/`, and yours, from files and installed packages.

    snapkv              a method, or a preset
    mine.yaml           a preset of one's own
    mine.py:Class       a method of one's own
    its-name            a method that a package names among its entry points

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
import difflib
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clusterkv_jax import methods
from clusterkv_jax.budget import MOST_ROWS, Budget
from clusterkv_jax.calibration import Calibration, fingerprint, with_shares
from clusterkv_jax.calibration import read as read_calibration
from clusterkv_jax.checkpoints.loading import Model, check_model, open_checkpoint
from clusterkv_jax.checkpoints.model_dir import locate
from clusterkv_jax.checkpoints.packaged_calibrations import packaged_calibration
from clusterkv_jax.learned.repetition import instruction
from clusterkv_jax.methods import outside
from clusterkv_jax.methods.auto import settled
from clusterkv_jax.runtime.errors import shown
from clusterkv_jax.storage import schema
from clusterkv_jax.storage.buckets import place
from clusterkv_jax.storage.hub import CALIBRATION
from clusterkv_jax.text.chat import Chat, frame_ids, has_template

# Numbers of settings are rows or shares, that sums of in 32 bits hold; a budget of bytes is larger.
MOST, MOST_BUDGET_BYTES = MOST_ROWS, 2**50
# What is recommended, and what stands in for it where a model has no learned scores (docs/results/pretrained.md).
AUTO, UNLEARNED = "auto", "compactor"
_KEYS = ("method", "description", "source", "settings", "budget", "calibration")
# Methods of methods are made in Python.
_METHODS = {name: cls for name, cls in methods.METHODS.items() if cls not in (methods.Composed, methods.Matched)}


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


def as_method(
    method: methods.Method | str | None,
    *,
    budget: Budget | None = None,
    ratio: float | None = None,
    tokens: int | None = None,
    learned: bool = True,
    model: str = "MODEL",
) -> Any:
    """The method of a name with a budget, of which at most one way to say it is given; an object as it is.

    Without `learned` scores "auto" means another method, and a warning says so of the `model`. None is the full cache.

    Raises ValueError for an unknown name, an impossible budget, and a budget beside an object, which has its own.
    """
    given = {"budget": budget, "ratio": ratio, "tokens": tokens}
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(method, str):
        if given:
            raise ValueError(f"{next(iter(given))} goes with a method's name such as 'snapkv', got {shown(method)}.")
        return methods.Full() if method is None else method
    if len(given) > 1:
        raise ValueError(f"Give one of budget, ratio and tokens, got {' and '.join(given)}.")
    if budget is not None and not isinstance(budget, Budget):
        raise ValueError(f"budget must be an object such as Budget(ratio=0.25), got {shown(budget)}.")
    if ratio is not None or tokens is not None:
        budget = Budget(ratio=ratio, tokens=tokens)
    if method == AUTO and not learned:
        warnings.warn(f"{in_place_of_auto(model)}.", stacklevel=3)
    return preset(chosen(method, learned), budget)


def chosen(name: str, learned: bool) -> str:
    """The preset that a name means for a model with or without learned scores."""
    return UNLEARNED if name == AUTO and not learned else name


def in_place_of_auto(model: str = "MODEL") -> str:
    """What to say where "auto" has no calibration to go by, and how to make one."""
    return (
        f"{model} has no calibration, so {AUTO} takes {UNLEARNED}, the best without one; to make one: {_command(model)}"
    )


def _command(model: str) -> str:
    made = f"{model}/{CALIBRATION}" if Path(model).is_dir() else CALIBRATION
    return f"clusterkv calibrate {model} --data BOOKS --output {made}"


def is_calibrated(model: str, calibration: Calibration | None = None) -> bool:
    """Whether the model of a name will have learned scores, by this calibration or by what `load` finds for it."""
    if getattr(calibration, "surrogate", None) is not None or (locate(model) / CALIBRATION).is_file():
        return True
    with contextlib.suppress(ValueError):  # what is wrong with the weights `load` says
        return packaged_calibration(open_checkpoint(model).fingerprint(np.dtype(np.float32))) is not None
    return False


def check_calibrated(model: str, calibration: Calibration | None, by_name: Mapping[str, methods.Method]) -> None:
    """Raise ValueError, before weights are read, for a method of learned scores that the model will not have."""
    for name, method in by_name.items():
        if "scores" in method.inputs(0) and not is_calibrated(model, calibration):
            raise ValueError(
                f"{name} keeps rows by learned scores, and {model} has no calibration; to make one: {_command(model)}."
            )


def method_for(model: Model, method: methods.Method | str | None, **budget: Any) -> methods.Method:
    """`as_method` for a model, as `generate` and an engine take it."""
    learned = isinstance(model, Model) and any("surrogate" in layer for layer in model.params["layers"])
    return as_method(method, **budget, learned=learned, model=getattr(model, "name", "MODEL"))


def completed(model: Model, method: methods.Method, chat: Chat = Chat()) -> methods.Method:  # noqa: B008  (frozen)
    """The method with what only a model knows: its calibration's choice and shares, words of its tokenizer, and its
    chat template with what `chat` says of it.

    `generate` and `Engine` complete a method themselves. `prefill`, `decode_step` and `load_cache` see no model: with
    the completed method their caches are those of `generate`. A method that needs nothing of a model stays as it is.

    Raises ValueError for anything but a model.
    """
    check_model(model)
    if model.calibration is not None:
        method = settled(method, model.calibration)
    result: Any = with_shares(model.calibration, method)
    if model.tokenizer is None or "repetition" not in method.inputs(0):
        return result
    frame = None
    if has_template(model.tokenizer):
        with contextlib.suppress(ValueError):  # of a template without a frame, in which nothing can be asked
            frame = frame_ids(model.tokenizer, chat)
    return result.with_words(instruction(model.tokenizer), frame)


def described(model: Model, method: methods.Method) -> str:
    """What answers depend on: the method, and the model's calibration where it takes scores or shares from there."""
    takes_it = "scores" in method.inputs(0) or with_shares(model.calibration, method) != method
    if model.calibration is None or not takes_it:
        return written(method)
    return f"{written(method)} with calibration {fingerprint(model.calibration)}"


def written(method: methods.Method) -> str:
    """The method as Python writes it, with the file that its class comes from where the package has none of it."""
    file = outside.origin(method)
    return repr(method) if file is None else f"{method!r} of {file}"


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
    """Whether a method's name is that of a file, or of a class in one."""
    return name.endswith((".yaml", ".yml")) or outside.is_class_in_file(name)


def called(name: str) -> str:
    """What results call the method of a name: a class in a file by its own name."""
    return name.rsplit(":", 1)[1] if outside.is_class_in_file(name) else name


def find_preset(name: str) -> Preset:
    """Look a preset up by its name, its method's name in small letters, its file, or its class.

    Raises ValueError for a name that nothing has, and says which one is near.
    """
    if outside.is_class_in_file(name):
        return Preset(called(name), outside.class_in_file(name), "a method of one's own", name)
    if is_file(name):
        return read_preset(place(name))
    entries, installed = list_presets(), outside.installed()
    if name in entries:
        return entries[name]
    if name in installed:
        return Preset(name, outside.class_of(installed[name]), "of an installed package", installed[name].value)
    known = [*entries, *installed]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
        f"Unknown method or preset {schema.shown(repr(name))}; known: {', '.join(known)}, the path of a .yaml file, "
        f"or FILE.py:Class{meant}."
    )


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
    if outside.is_class_in_file(name):
        method = outside.class_in_file(name, file.parent)
    elif name in _METHODS:
        method = _METHODS[name]
    else:
        raise ValueError(
            f"Key 'method' of {where} must be one of {', '.join(_METHODS)}, or FILE.py:Class beside it, got "
            f"{schema.shown(repr(name))}."
        )
    budget = content.get("budget")
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
