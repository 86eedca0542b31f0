"""What comes from outside passes one door: limits, strict JSON and YAML, declared types, errors that name the place."""

import gzip
from dataclasses import dataclass, field

import pytest

from clusterkv_jax.storage import schema


@dataclass(frozen=True)
class Sizes:
    rows: int
    shares: tuple[float, ...] = ()
    names: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": {"b": 1, "b": 2}}', "The key 'b' stands twice"),
        ("[NaN]", "NaN is not a finite number"),
        ("[-Infinity]", "-Infinity is not a finite number"),
        ("1e999", "1e999 is not a finite number"),
        ("[" * 200_000, "is nested deeper than 32 levels"),
        ("[" * 33 + "]" * 33, "is nested deeper than 32 levels"),
        ("9" * 5000, "4300 digits"),
        ('"\\ud800"', "surrogates not allowed"),
        ('{"a": 1', "line 1 column 8"),
    ],
)
def test_json_is_strict(text, problem):
    with pytest.raises(ValueError, match=f"^x.json.*{problem}.*\\.$"):
        schema.from_json(text, "x.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: The key 'a' stands twice"),
        ("a: &x [1]\nb: *x", "line 2: Aliases are not allowed"),
        ("&a [*a]", "line 1: Aliases are not allowed"),
        ("[" * 100_000, "line 1: More than 32 levels are not allowed"),
        ("a: !!python/name:os.system x", "line 1: Tags are not allowed"),
        ('a: "\\ud800"', "line 1: Half of a character is not allowed"),
        ("a: .nan", "line 1: .nan is not a finite number"),
        ("a: [1", "line 1: expected"),
        ("{[a]: 1}", "line 1: found unhashable key"),
        ("a: 2020-13-45", "month must be in 1..12"),
    ],
)
def test_yaml_is_strict(text, problem):
    with pytest.raises(ValueError, match=f"^x.yaml.*{problem}.*\\.$"):
        schema.from_yaml(text, "x.yaml")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"rows": "4"}, r", field 'rows': Expected int, got str \('4'\)"),
        ({"rows": True}, r", field 'rows': Expected int, got bool \(True\)"),
        ({"rows": 4, "shares": [1, "x" * 200]}, r", field 'shares.1': Expected float, got str \('x{79}\.\.\.\)"),
        ({"rows": 4, "names": {"a": None}}, r", field 'names.\.\.\.': Expected int, got null"),
        ({}, r": Object missing required field rows \(\{\}\)"),
        ([], r": Expected object, got array \(\[\]\)"),
    ],
)
def test_a_value_is_checked_in_every_field(value, problem):
    with pytest.raises(ValueError, match=f"^x.yaml{problem}\\.$"):
        schema.checked(value, Sizes, "x.yaml")


def test_what_is_valid_passes():
    text = "rows: 4\nshares: [1, 0.5]\nnames: {a: 1}"
    expected = Sizes(4, (1.0, 0.5), {"a": 1})
    assert schema.checked(schema.from_yaml(text, "x"), Sizes, "x") == expected
    text = '{"rows": 4, "shares": [1, 0.5], "names": {"a": 1}}'
    assert schema.checked(schema.from_json(text, "x"), Sizes, "x") == expected


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (gzip.compress(b"a" * 3000, mtime=0), "is larger than 2 KiB"),
        (gzip.compress(b"a" * 100, mtime=0)[:-9], "is not a whole gzip file"),
        (b"plain", "is not a whole gzip file"),
        (gzip.compress(b"ab\xff", mtime=0), "is not UTF-8 text: byte 2 is 0xff"),
    ],
)
def test_files_are_read_within_limits(tmp_path, raw, problem):
    (file := tmp_path / "x.gz").write_bytes(raw)
    with pytest.raises(ValueError, match=f"x.gz {problem}.*\\.$"):
        schema.read_text(file, most=2048)


def test_a_file_of_just_the_limit_is_read(tmp_path):
    (file := tmp_path / "x.json").write_text("a" * 2048)
    assert schema.read_text(file, most=2048) == "a" * 2048
    with pytest.raises(ValueError, match=r"x\.json is larger than 1 KiB"):
        schema.read_text(file, most=1024)
