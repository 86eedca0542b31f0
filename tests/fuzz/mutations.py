"""Files that are almost right: values replaced, keys dropped, doubled or renamed, bytes damaged."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from hypothesis import strategies as st

Kind = Literal["json", "jsonl", "yaml", "safetensors", "bytes"]
Draw = Callable[[st.SearchStrategy[Any]], Any]
Path = tuple[int, ...]


@dataclass(frozen=True)
class Raw:
    """Text that is written as it is."""

    text: str


@dataclass(frozen=True)
class Object:
    """A JSON object, whose keys may repeat."""

    pairs: tuple[tuple[Any, Any], ...]


ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 2**31, -(2**63) - 1, 2**64, 10**30, 1e308, 5e-324),
    *("", " ", "x", "0", "NaN", "null", "../..", "/etc/passwd", "\x00", "\ud800", "\u241e", "{{ x }}", "x" * 1_000_000),
    *((), ((),), (0,) * 100_000, Object(()), Object((("x", 0),)), Object((("", None), ("", 1)))),
    *map(Raw, ("NaN", "-Infinity", "1e999", "-0", "01", "9" * 5000, "'", "[1,,2]", "")),
    *map(Raw, ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "0" + "}" * 100_000, "[" * 50_000)),
]
YAML_VALUES = [
    *map(Raw, (".nan", "-.inf", "0x1F", "1_000", "1:30", "2026-01-01", "yes", "~", "*a", "&a [*a]", "&a {x: *a}")),
    *map(Raw, ("!!python/object/apply:os.getcwd []", "!!binary x", "!!set {a}", "{? [1]: 2}", "{[1]: 2}", "|", "\t")),
]


def mutated(sample: str | bytes, kind: Kind) -> st.SearchStrategy[bytes]:
    """The sample with one to three changes in its structure, or in its bytes whatever they mean."""
    raw = sample.encode() if isinstance(sample, str) else sample
    structural = {"json": _json, "jsonl": _jsonl, "yaml": _yaml, "safetensors": _safetensors}
    by_bytes = _bytes(raw)
    if kind == "bytes":
        return by_bytes
    changed = structural[kind](raw)
    return st.one_of(changed, changed, changed, by_bytes)


# --- by structure ---


@st.composite
def _json(draw: Draw, raw: bytes) -> bytes:
    return _written(_changed(draw, _tree(json.loads(raw)), ODD_VALUES))


@st.composite
def _yaml(draw: Draw, raw: bytes) -> bytes:
    """YAML reads JSON too."""
    return _written(_changed(draw, _tree(yaml.safe_load(raw)), ODD_VALUES + YAML_VALUES))


@st.composite
def _jsonl(draw: Draw, raw: bytes) -> bytes:
    """One line is changed, or lines are dropped, doubled, swapped, torn."""
    lines = raw.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    other = draw(st.integers(0, len(lines) - 1))
    change = draw(st.sampled_from(("line",) * 6 + ("drop", "double", "swap", "blank", "torn")))
    if change == "line":
        lines[at] = _written(_changed(draw, _tree(json.loads(lines[at])), ODD_VALUES))
    elif change == "drop":
        del lines[at]
    elif change == "double":
        lines.insert(other, lines[at])
    elif change == "swap":
        lines[at], lines[other] = lines[other], lines[at]
    elif change == "blank":
        lines.insert(at, b"")
    ends = b"" if change == "torn" else b"\n"
    return b"\n".join(lines)[: -5 if change == "torn" else None] + ends


@st.composite
def _safetensors(draw: Draw, raw: bytes) -> bytes:
    """The header is changed and its length corrected, or the tensors' bytes are damaged."""
    size = int.from_bytes(raw[:8], "little")
    header, tensors = raw[8 : 8 + size], raw[8 + size :]
    if draw(st.booleans()):
        header = _written(_changed(draw, _tree(json.loads(header)), ODD_VALUES))
    else:
        tensors = draw(_bytes(tensors))
    return len(header).to_bytes(8, "little") + header + tensors


def _tree(value: Any) -> Any:
    """JSON with objects as pairs and lists as tuples, which edits copy."""
    if isinstance(value, dict):
        return Object(tuple((key, _tree(x)) for key, x in value.items()))
    return tuple(map(_tree, value)) if isinstance(value, list) else value


def _changed(draw: Draw, tree: Any, odd: list[Any]) -> Any:
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        at = places[draw(st.integers(0, len(places) - 1))]
        kept = _at(tree, places[draw(st.integers(0, len(places) - 1))])
        value = st.sampled_from([*odd, kept]) | st.builds(_nudged, st.just(_at(tree, at)), st.sampled_from(range(4)))
        change = draw(st.sampled_from(("value", "value", "value", "drop", "double", "rename", "wrap")))
        tree = _edited(tree, at, change, draw(value), draw(st.sampled_from(("", "x", "name", "__class__", "method"))))
    return tree


def _nudged(value: Any, how: int) -> Any:
    """A value a little off, of the same type where that can be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Raw(_text(value) + " " + _text(value)) if how else (value,)
    return (value + 1, -value, value * 10**6, value + 0.5)[how]


def _places(tree: Any, path: Path = ()) -> Any:
    yield path
    children = [x for _, x in tree.pairs] if isinstance(tree, Object) else tree if isinstance(tree, tuple) else ()
    for i, child in enumerate(children[:50]):
        yield from _places(child, (*path, i))


def _at(tree: Any, path: Path) -> Any:
    for i in path:
        tree = tree.pairs[i][1] if isinstance(tree, Object) else tree[i]
    return tree


def _edited(tree: Any, path: Path, change: str, value: Any, key: str) -> Any:
    """The tree with one change at a place."""
    if not path:
        return (tree,) if change == "wrap" else value if change == "value" else tree
    i, rest = path[0], path[1:]
    parts = list(tree.pairs if isinstance(tree, Object) else tree)
    name, child = parts[i] if isinstance(tree, Object) else (None, parts[i])
    if rest:
        child = _edited(child, rest, change, value, key)
    elif change == "value":
        child = value
    elif change == "wrap":
        child = Object(((key, child),))
    new = (key if change == "rename" and not rest else name, child) if isinstance(tree, Object) else child
    parts[i : i + 1] = [] if change == "drop" and not rest else [new, new] if change == "double" and not rest else [new]
    return Object(tuple(parts)) if isinstance(tree, Object) else tuple(parts)


def _written(tree: Any) -> bytes:
    return _text(tree).encode("utf-8", "surrogatepass")


def _text(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Object):
        return "{" + ", ".join(f"{_text(str(key))}: {_text(value)}" for key, value in tree.pairs) + "}"
    if isinstance(tree, tuple):
        return "[" + ", ".join(map(_text, tree)) + "]"
    return json.dumps(tree, default=str)


# --- by bytes ---


@st.composite
def _bytes(draw: Draw, raw: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        end = min(len(raw), at + draw(st.integers(0, 64)))
        some = draw(st.binary(max_size=8))
        raw = draw(
            st.sampled_from(
                (
                    raw[:at],
                    raw[at:],
                    raw[:at] + some + raw[at:],
                    raw[:at] + raw[end:],
                    raw[:end] + raw[at:],
                    raw[:at] + bytes(255 - x for x in raw[at:end]) + raw[end:],
                    b"\xef\xbb\xbf" + raw,
                    raw.decode("latin-1").encode("utf-16"),
                    b"",
                )
            )
        )
    return raw
