"""Pages made from the code when the site is built: the command line from its typer app, the presets from their files.

mkdocs calls `on_files` (see mkdocs.yml); tests call `pages` and need no mkdocs for it.
"""

import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from clusterkv_jax.cli import app
from clusterkv_jax.presets import Preset, list_presets


def pages() -> dict[str, str]:
    """The text of each generated page, by its path below `docs/`."""
    return {"reference/cli.md": command_line(), "reference/presets.md": presets()}


def on_files(files: Any, config: Any) -> Any:
    """The hook of mkdocs: generated pages join those that it found."""
    from mkdocs.structure.files import File

    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def command_line() -> str:
    """A section for each subcommand of `clusterkv`, with every option that its `--help` shows."""
    root = typer.main.get_command(app)
    parts = ["# Command line\n", f"{root.help}\n", "`clusterkv COMMAND --help` shows the same text in a terminal.\n"]
    for name, command in _commands("clusterkv", root):
        parts += _command(name, command)
    return "\n".join(parts)


def _commands(path: str, group: Any) -> Iterator[tuple[str, Any]]:
    """The commands of a group by their whole name; a group of commands comes before its own."""
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(f"{path} {name}", command)


def _command(name: str, command: Any) -> list[str]:
    parts = [f"## {name}\n", f"{(command.help or '').strip()}\n"]
    if hasattr(command, "commands"):
        return parts
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = [param.name.upper() + (" ..." if param.nargs == -1 else "") for param in arguments]
    parts += ["```text", " ".join([name, *usage, "[OPTIONS]"]), "```\n"]
    hints = typing.get_type_hints(inspect.unwrap(command.callback))
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        if not getattr(param, "hidden", False):
            panels.setdefault(_panel(param), []).append(param)
    for panel, params in panels.items():
        rows = [_option(param, hints.get(param.name)) for param in params]
        parts += _table(panel, "takes", "default", "what it does", rows=rows)
    if command.epilog:
        parts += _epilog(command.epilog)
    return parts


def _panel(param: Any) -> str:
    return "arguments" if param.param_type_name == "argument" else getattr(param, "rich_help_panel", None) or "options"


def _option(param: Any, hint: Any) -> list[str]:
    argument = param.param_type_name == "argument"
    names = [param.name.upper()] if argument else [*param.opts, *param.secondary_opts]
    return [", ".join(f"`{name}`" for name in names), _kind(hint), _default(param), _cell(param.help or "")]


def _kind(hint: Any) -> str:
    """What a user writes behind an option, from the annotation of the function that takes it."""
    if typing.get_origin(hint) is list:
        return f"{_kind(typing.get_args(hint)[0])}, several times"
    if inner := [part for part in typing.get_args(hint) if part is not type(None)]:
        return _kind(inner[0])
    return {str: "text", int: "whole number", float: "number", Path: "path"}.get(hint, "")


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return param.show_default
    if param.default is None or (param.default is False and not param.secondary_opts):
        return ""
    return "on" if param.default is True else f"`{param.default}`" if str(param.default) else ""


def _epilog(text: str) -> list[str]:
    """Examples of a command: text where rich shows text, a fence around what is indented."""
    parts: list[str] = []
    for paragraph in re.sub(r"\[bold\](.*?)\[/bold\]", r"**\1**", text).strip().split("\n\n"):
        if paragraph.startswith("  "):
            lines = (line.removeprefix("  ") for line in paragraph.splitlines())
            parts += ["```bash", *lines, "```\n"]
        else:
            parts.append(f"{paragraph}\n")
    return parts


def presets() -> str:
    """A section for each method with its presets, their settings and where the numbers are printed."""
    parts = [
        "# Presets\n",
        "A preset is a method with the settings of a paper. `clusterkv methods` lists them,",
        "`--method NAME` and `preset(NAME, budget)` use them. Each is a file in `configs/methods/`.",
        "A setting that a preset does not name keeps the [method's default](api.md#methods).\n",
    ]
    by_method: dict[type, list[Preset]] = {}
    for preset in list_presets().values():
        by_method.setdefault(preset.method, []).append(preset)
    for method, found in sorted(by_method.items(), key=lambda item: item[0].__name__.lower()):
        parts.append(f"## {method.__name__}\n")
        parts += _table("preset", "what it does", "settings", "source", rows=map(_preset, found))
    return "\n".join(parts)


def _preset(preset: Preset) -> list[str]:
    listed = [f"`{key}={value!r}`" for key, value in preset.settings.items()]
    if preset.calibration is not None:
        listed.append(f"a calibration of the model `{preset.calibration.model}`")
    return [f"`{preset.name}`", _cell(preset.description), ", ".join(listed), _cell(preset.source)]


def _table(*header: str, rows: Iterable[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
