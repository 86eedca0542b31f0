"""The one door for files from outside: read within limits, parsed strictly, checked against a declared type.

Every error is a ValueError of one sentence that names the file, the line or field, the value, and what is allowed.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from itertools import count
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import msgspec
import yaml
from typing_extensions import override

# A local path, or one of etils in a bucket: a PurePath that has pathlib's methods.
if TYPE_CHECKING:
    AnyPath = Path
else:
    AnyPath = PurePath
T = TypeVar("T")
KIB, MIB = 2**10, 2**20
# Configurations of models need four levels. What is deeper is an accident or an attack.
MOST_LEVELS = 32
# PyYAML reads so much in a second.
MOST_YAML = 256 * KIB
_SHOWN = 80


def read_text(file: AnyPath | Traversable, *, most: int) -> str:
    """A UTF-8 file of at most `most` bytes; unpacked where its name ends in .gz, `most` bytes of it at most.

    Raises ValueError for a larger file, one that is no whole gzip file, or no UTF-8; OSError as `open` does.
    """
    with _unpacked(file) as stream:
        raw = stream.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"{file} is larger than {size(most)}, the most that is read of such a file.")
    return as_text(raw, str(file))


def read_lines(file: AnyPath | Traversable, *, most: int) -> Iterator[tuple[str, bytes]]:
    """The lines of a file one by one with their ends, each after its place: "Line 3 of FILE".

    A line has at most `most` bytes; unpacked as `read_text` does. Raises as `read_text` does.
    """
    with _unpacked(file) as stream:
        for number in count(1):
            where = f"Line {number} of {file}"
            line = stream.readline(most + 1)
            if not line:
                return
            if len(line) > most:
                raise ValueError(f"{where} is larger than {size(most)}, the most that is read of a line.")
            yield where, line


def check_file(file: AnyPath | Traversable) -> None:
    """Raise ValueError for a pipe or a device: reading one may wait for ever."""
    if isinstance(file, Path) and file.exists() and not (file.is_file() or file.is_dir()):
        raise ValueError(f"{file} is a pipe or a device, and a file is needed.")


@contextmanager
def _unpacked(file: AnyPath | Traversable) -> Iterator[IO[bytes]]:
    """The bytes of a file; `read(n)` unpacks no more than n where its name ends in .gz."""
    if "\0" in str(file):
        raise ValueError(f"{str(file)!r} is no path: it holds a zero byte.")
    check_file(file)
    try:
        with file.open("rb") as stream:
            yield cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if file.name.endswith(".gz") else stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a whole gzip file: {shown(error)}.") from error


def as_text(raw: bytes, where: str) -> str:
    """Bytes as UTF-8. Raises ValueError that names the first byte which is none."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}.") from error


def from_json(text: str, where: str, *, finite: bool = True) -> Any:
    """The value of a JSON text. Keys that stand twice and deep nesting are refused, infinite numbers and NaN too if
    numbers are to be `finite`.
    """
    number = _finite if finite else float
    try:
        value = json.loads(text, object_pairs_hook=_without_twins, parse_constant=number, parse_float=number)
        _check_levels(value)
        if "\\ud" in text.lower():  # half of a character cannot be written again
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{where} is nested deeper than {MOST_LEVELS} levels.") from None
    except ValueError as error:  # of json, of the hooks, and of int() for numbers of thousands of digits
        raise ValueError(f"{where} is not valid JSON: {shown(error)}.") from error
    return value


def from_yaml(text: str, where: str) -> Any:
    """The value of a YAML text without tags. Aliases, infinite numbers, NaN, keys that stand twice, and deep nesting
    are refused.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{where}{line}: {shown(error.problem or error)}.") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"{where} is not valid YAML: {shown(error)}.") from error


def checked(value: Any, kind: type[T] | Any, where: str) -> T:
    """A parsed value as a declared type (a dataclass, a msgspec.Struct, `list[int]`, ...), checked in every field.

    Nothing is cast but lists to tuples and whole numbers to floats.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).replace("`", "").partition(" - at $")
        names = _PART.findall(path)
        field = f", field {'.'.join(names)!r}" if names else ""
        raise ValueError(f"{where}{field}: {problem}{_got(value, names)}.") from error
    except RecursionError:
        raise ValueError(f"{where} is nested deeper than {MOST_LEVELS} levels.") from None


def check_keys(value: Any, allowed: Collection[str], where: str) -> None:
    """Raise ValueError for what is no mapping, or has a key that is not allowed."""
    if not isinstance(value, Mapping):
        raise ValueError(f"Expected keys and values in {where}, got {shown(repr(value))}.")
    for key in value:
        if key not in allowed:
            raise ValueError(f"Unknown key {shown(repr(key))} in {where}; allowed: {', '.join(allowed) or 'none'}.")


def shown(value: Any) -> str:
    """A value or another library's error in a sentence: one line, without its full stop, cut where it is long."""
    text = " ".join(str(value).split()).rstrip(".")
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}..."


def size(count: int) -> str:
    """Bytes in words: "4 MiB"."""
    unit, name = (MIB, "MiB") if count >= MIB else (KIB, "KiB")
    return f"{count / unit:g} {name}"


# A field or an index of msgspec's paths, `$.layers[3].name`; [...] is some value of a mapping.
_PART = re.compile(r"\.\.\.|[^.\[\]]+")


def _got(value: Any, names: list[str]) -> str:
    """The value at a path, where the path leads to one."""
    for name in names:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return ""
    text = repr(value)
    return f" ({text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'})"


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = {}
    for key, part in pairs:
        if key in value:
            raise ValueError(f"The key {key[:_SHOWN]!r} stands twice.")
        value[key] = part
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:_SHOWN]} is not a finite number.")
    return value


def _check_levels(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [part for whole in level for part in _parts(whole)]
        if not level:
            return
    raise RecursionError


def _parts(value: Any) -> Iterator[Any]:
    whole = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (part for part in whole if isinstance(part, dict | list))


class _Loader(yaml.SafeLoader):
    """PyYAML's plain types, without what makes a small text a large or endless value."""

    levels = 0

    @override
    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self.refuse("Aliases are not allowed", event.start_mark)
        if event.tag not in (None, "!"):
            self.refuse(f"Tags are not allowed, got {event.tag[:_SHOWN]!r}", event.start_mark)
        if self.levels == MOST_LEVELS:
            self.refuse(f"More than {MOST_LEVELS} levels are not allowed", event.start_mark)
        self.levels += 1
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node

    @override
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        first: dict[str, Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                self.refuse(f"The key {key.value[:_SHOWN]!r} stands twice", key.start_mark)
        return super().construct_mapping(node, deep)

    @override
    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            self.refuse("Half of a character is not allowed", node.start_mark)
        return value

    @override
    def construct_yaml_float(self, node: Any) -> float:
        value = super().construct_yaml_float(node)
        if not math.isfinite(value):
            self.refuse(f"{node.value[:_SHOWN]} is not a finite number", node.start_mark)
        return value

    @staticmethod
    def refuse(problem: str, mark: Any) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
