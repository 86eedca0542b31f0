"""Where rows and books come from: local files, or data sets of the Hugging Face hub."""

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from clusterkv_jax.evaluation.extras import library
from clusterkv_jax.storage import schema

HUB = "hub"
# Books have some megabytes, HotpotQA's file 46, rows of RULER at 131,072 tokens less than one.
MOST_TEXT, MOST_ROW = 128 * schema.MIB, 16 * schema.MIB
Row = TypeVar("Row")
_GUTENBERG = re.compile(r"^\*\*\* ?(START|END) OF (?:THE|THIS) PROJECT GUTENBERG.*$", re.MULTILINE)


def rows(data: str | None, name: str, hub: tuple[str, str | None, str], kind: type[Row] | Any) -> list[Row]:
    """Rows named `name` of a declared type, without the fields that it does not name: from `data`, a .jsonl or .json
    file (.gz too) or a folder with one of that name, or the hub.

    `hub` is a data set's id, configuration and split; it is read with the package `datasets`.

    Raises ValueError where there is no such file, and for a row that is not of that type.
    """
    if data is not None:
        return read_rows(local(data, [f"{name}{end}" for end in (".jsonl", ".jsonl.gz", ".json", ".json.gz")]), kind)
    source, config, split = hub
    dataset = library("datasets", "Reading from the hub").load_dataset(source, config, split=split)
    return [schema.checked(dict(row), kind, f"Row {number} of {source}") for number, row in enumerate(dataset)]


def local(data: str, patterns: Iterable[str]) -> Path:
    """`data` itself where it is a file, or the first file in that folder that matches one of the patterns."""
    place = Path(data)
    if place.is_file():
        return place
    if not place.is_dir():
        raise ValueError(f"There is no file or folder {data}.")
    match = next((path for pattern in patterns for path in sorted(place.glob(pattern))), None)
    if match is None:
        raise ValueError(f"Folder {data} holds none of {', '.join(patterns)}.")
    return match


def read_text(file: Path) -> str:
    """A UTF-8 file, unpacked where its name ends in .gz."""
    return schema.read_text(file, most=MOST_TEXT)


def read_rows(file: Path, kind: type[Row] | Any) -> list[Row]:
    """Rows of a declared type: one JSON object a line, or the one list that a .json file holds."""
    if is_json(file):
        return read_json(file, list[kind])
    return [
        schema.checked(schema.from_json(schema.as_text(raw, where), where), kind, where)
        for where, raw in schema.read_lines(file, most=MOST_ROW)
    ]


def is_json(file: Path) -> bool:
    """Whether a file is one JSON text, and not one a line."""
    return file.name.removesuffix(".gz").endswith(".json")


def read_json(file: Path, kind: type[Row] | Any) -> Row:
    """A .json file as a declared type."""
    return schema.checked(schema.from_json(schema.read_text(file, most=MOST_TEXT), str(file)), kind, str(file))


class TextRow(TypedDict):
    """A row of a data set that is nothing but text."""

    text: str


class _BookRow(TextRow):
    short_book_title: str


def books(data: str | None) -> dict[str, str]:
    """Plain texts by name: a .txt file (.gz too), all of a folder, "hub" for the test books of PG19, or the two books
    that come with the package (Pride and Prejudice, Moby-Dick; named by their numbers at Project Gutenberg).
    """
    if data is None:
        data = str(resources.files("clusterkv_jax.evaluation.tasks") / "books")
    if data == HUB:
        entries = rows(None, "pg19", ("emozilla/pg19", None, "test"), _BookRow)
        return {row["short_book_title"]: row["text"] for row in entries}
    place = Path(data)
    found = [path for end in ("txt", "txt.gz", "raw") for path in place.glob(f"*.{end}")]
    files = [place] if place.is_file() else sorted(found)
    if not files:
        raise ValueError(f"There are no .txt or .txt.gz books in {data}.")
    by_name: dict[str, str] = {}
    for file in files:
        if (name := file.name.split(".")[0]) in by_name:
            raise ValueError(f"Two books in {data} have the name {name!r}.")
        by_name[name] = body(read_text(file))
    return by_name


def body(text: str) -> str:
    """A book without what Project Gutenberg prints before and after it."""
    marks = {match.group(1): match for match in _GUTENBERG.finditer(text)}
    start = marks["START"].end() if "START" in marks else 0
    end = marks["END"].start() if "END" in marks else len(text)
    return text[start:end].strip()
