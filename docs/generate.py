"""Pages made when the site is built: the front page from the README, the command line from its typer app, the presets
from their files, the models from the table that the tests go through.

mkdocs calls `on_files` (see mkdocs.yml); tests call `pages` and need no mkdocs for it.
"""

import inspect
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from clusterkv_jax.blocks.causal_attention import missing
from clusterkv_jax.cli import app
from clusterkv_jax.models.registry import FAMILIES, from_hf
from clusterkv_jax.presets import Preset, list_presets
from tests.support.families import HEAD_DIMS, PARITY, PUBLISHED, SAME_AS

ROOT = Path(__file__).parent.parent


def pages() -> dict[str, str]:
    """The text of each generated page, by its path below `docs/`."""
    return {
        "index.md": front_page(),
        "reference/cli.md": command_line(),
        "reference/models.md": models(),
        "reference/presets.md": presets(),
    }


def on_files(files: Any, config: Any) -> Any:
    """The hook of mkdocs: generated pages join those that it found."""
    from mkdocs.structure.files import File

    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def front_page() -> str:
    """The README, whose links lead from `docs/`, or to the repository where they lead out of it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    return re.sub(r"\]\((?!https?:)(docs/)?", lambda link: "](" if link[1] else f"]({address}/blob/main/", text)


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


def models() -> str:
    """A line for each family, by what the tests do with it."""
    parts = [
        "# Models\n",
        "`load` and `--model` read these families, by the `model_type` of their config.json; `clusterkv models` lists",
        "them. The columns are tests of the repository, and each goes through every family of this table:\n",
        "- **loads**: small checkpoints in the family's own layout (`tests/test_checkpoints.py`).",
        "- **as transformers**: settings whose logits and greedy tokens equal those of transformers on torch, over up",
        "  to 600 tokens (`make parity`).",
        "- **methods**: a method answers within the budget, and no sequence notices another: every other method with",
        "  one family (`make test-sweeps`), all with every family (`make test-sweeps ARGS='-m exhaustive'`).",
        "- **also has**: what a setting of this table has beside plain causal attention and an MLP.",
        "- **kernels**: who reads a prompt in 16 bit on a GPU and on a TPU: cuDNN or splash, or plain XLA, by the",
        "  sizes of heads that are published. Decoding takes the attention kernels of this library in every family",
        "  (`tests/test_model_attention.py`).",
        "- **mesh**: the logits of one device on a mesh of eight (`make test-mesh`).",
        "- **TPU**: the decode loop compiled for a v5e (`make test-compile`).\n",
    ]
    parts += _table(
        *("model_type", "models", "loads", "as transformers", "methods", "also has", "kernels", "mesh", "TPU"),
        rows=map(_family, FAMILIES),
    )
    parts += [
        "cuDNN takes heads of up to 128 without a soft cap of scores, splash those of 128 and 256, neither takes sink",
        "logits. [Sliding layers](../concepts/sliding-layers.md) keep their window and are never compressed.",
        "[Flax models](../guides/flax.md) are those that are written elsewhere; [GGUF files](../guides/gguf.md) hold",
        "most of these families too.\n",
    ]
    return "\n".join(parts)


def _family(name: str) -> list[str]:
    other = SAME_AS.get(name, name)
    compared = name if _cases(name) else other
    tested = "yes" if name in PUBLISHED else f"as `{other}`"
    names = f"`{name}`", _cell(FAMILIES[name].models)
    cells = _beside(compared), _kernels(compared)
    return [*names, tested, ", ".join(_cases(compared)), tested, *cells, tested, tested]


def _cases(name: str) -> dict[str, dict[str, Any]]:
    """The configurations of a family that are compared with transformers."""
    return {case: published for case, published in PARITY.items() if published["model_type"] == name}


# What a model may have beside plain attention and an MLP, by the fields of its configuration.
BESIDE = {
    "window": "window",
    "unrotated_layers": "layers without rotations",
    "soft_cap": "soft cap",
    "sink_logits": "sinks",
    "experts": "experts",
}


def _beside(name: str) -> str:
    """What a model of a family has in one of the settings that are tested."""
    configs = [from_hf(published) for published in (PUBLISHED.get(name), *_cases(name).values()) if published]
    return ", ".join(words for field, words in BESIDE.items() if any(getattr(config, field) for config in configs))


def _kernels(name: str) -> str:
    """By whom the prompts of a family are read on a GPU, and on a TPU."""
    config = from_hf(PUBLISHED.get(name) or next(iter(_cases(name).values())))

    def of(backend: str, title: str) -> str:
        taken = [dim for dim in HEAD_DIMS[name] if not missing(backend, dim, config.soft_cap, bool(config.sink_logits))]
        sizes = "" if len(taken) == len(HEAD_DIMS[name]) else f" of {', '.join(map(str, taken))}, XLA"
        return f"{title}{sizes}" if taken else "XLA"

    return f"{of('cudnn', 'cuDNN')}; {of('splash', 'splash')}"


def _table(*header: str, rows: Iterable[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
