"""Named settings of the methods: the papers' own, from `configs/methods/`, and yours, from any YAML file.

A preset names a method, says where its numbers come from, and may leave the budget open:

    method: Chelsea
    description: one line for people who choose
    source: where the numbers are printed
    settings: {r_init: 0.35, r_decay: 0.1, r_steps: 2}
    budget: {ratio: 0.2}          # optional
    calibration: my-llama.yaml    # optional: what `clusterkv calibrate` wrote, beside this file
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from clusterkv_jax import methods
from clusterkv_jax.budget import Budget
from clusterkv_jax.calibration import Calibration
from clusterkv_jax.calibration import read as read_calibration

_KEYS = ("method", "description", "source", "settings", "budget", "calibration")
# In the order of the documentation; pairs of methods (`Composed`) are made in Python.
_METHODS = {
    cls.__name__: cls
    for cls in (
        methods.Full,
        methods.CentroidKV,
        methods.Chelsea,
        methods.GravityKV,
        methods.ChunkKV,
        methods.SnapKV,
        methods.PyramidKV,
        methods.AdaKV,
        methods.ExpectedAttention,
        methods.KeyDiff,
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
    found = find_preset(name)
    calibrated = calibration or found.calibration
    method = _made(found, budget, settings)
    return method if calibrated is None else calibrated.applied(method)


def _made(found: Preset, budget: Budget | None, settings: Mapping[str, Any]):
    name = found.name
    checked = _checked_settings(found.method, settings, f"preset {name!r}")
    chosen = budget or found.budget
    if found.takes_budget:
        if chosen is None:
            raise ValueError(
                f"{found.method.__name__} needs a budget and preset {name!r} leaves it open: "
                "give a share of the cache or a number of rows."
            )
        return found.method(chosen, **{**found.settings, **checked})
    if budget is not None:
        raise ValueError(f"{found.method.__name__} keeps everything and takes no budget, got {budget}.")
    return found.method(**{**found.settings, **checked})


def find_preset(name: str) -> Preset:
    """Look a preset up by its name, its method's name in small letters, or its file."""
    if name.endswith((".yaml", ".yml")):
        return read_preset(Path(name))
    known = list_presets()
    if name not in known:
        raise ValueError(f"Unknown method or preset {name!r}; known: {', '.join(known)}, or the path of a .yaml file.")
    return known[name]


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
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"Preset file {file} is not YAML text: {' '.join(str(error).split())}.") from error
    where = f"preset file {file}"
    _check_keys(content, _KEYS, where)
    missing = [key for key in ("method", "description", "source") if not isinstance(content.get(key), str)]
    if missing:
        raise ValueError(f"Key {missing[0]!r} of {where} must be a text, got {content.get(missing[0])!r}.")
    if content["method"] not in _METHODS:
        raise ValueError(f"Key 'method' of {where} must be one of {', '.join(_METHODS)}, got {content['method']!r}.")
    method = _METHODS[content["method"]]
    budget = content.get("budget")
    return Preset(
        name=Path(file.name).stem,
        method=method,
        description=content["description"],
        source=content["source"],
        settings=_checked_settings(method, content.get("settings", {}), where),
        budget=None if budget is None else _budget(budget, where),
        calibration=_calibration(content.get("calibration"), file, where),
    )


def _calibration(name: Any, file: Any, where: str) -> Calibration | None:
    """The calibration file of that name beside the preset."""
    if name is not None and not isinstance(name, str):
        raise ValueError(f"Key 'calibration' of {where} must be the name of a file, got {name!r}.")
    return None if name is None else read_calibration(file.parent / name)


def _budget(content: Any, where: str) -> Budget:
    where = f"'budget' of {where}"
    _check_keys(content, _fields(Budget), where)
    return Budget(**_checked_values(Budget, content, where))


def _checked_settings(method: type, settings: Any, where: str) -> dict[str, Any]:
    """Settings of a method with their keys, types and values checked; the budget is not among them."""
    allowed = {key: default for key, default in _fields(method).items() if key != "budget"}
    _check_keys(settings, allowed, f"'settings' of {where}")
    values = _checked_values(method, settings, where)
    budget = {"budget": Budget(ratio=1.0)} if "budget" in _fields(method) else {}
    try:
        method(**budget, **values)
    except ValueError as error:
        raise ValueError(f"Impossible setting in {where}: {error}") from error
    return values


def _checked_values(cls: type, content: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in content.items():
        value = _as_tuple(value)
        if not _fits(value, hints[key]):
            raise ValueError(f"Key {key!r} of {where} must be {_describe(hints[key])}, got {value!r}.")
        values[key] = value
    return values


def _check_keys(content: Any, allowed, where: str) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"Expected keys and values in {where}, got {content!r}.")
    for key in content:
        if key not in allowed:
            raise ValueError(f"Unknown key {key!r} in {where}; allowed: {', '.join(allowed) or 'none'}.")


def _fields(cls: type) -> dict[str, dataclasses.Field]:
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


def _as_tuple(value: Any) -> Any:
    """YAML lists become tuples: methods are hashable."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value is of an annotated type; a whole number is also a number, true is neither."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        inner = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return len(inner) == len(value) and all(map(_fits, value, inner))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _describe(hint: Any) -> str:
    """An annotated type in words, for error messages."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if origin is tuple:
        return f"a list of {_describe(arguments[0]).removeprefix('a ')}s"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return names.get(hint, str(hint))
