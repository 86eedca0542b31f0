"""Where rows and books come from: local files, or data sets of the Hugging Face hub."""

import gzip
import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from clusterkv_jax.evaluation.extras import library

HUB = "hub"
_GUTENBERG = re.compile(r"^\*\*\* ?(START|END) OF (?:THE|THIS) PROJECT GUTENBERG.*$", re.MULTILINE)


def rows(data: str | None, name: str, hub: tuple[str, str | None, str]) -> list[dict[str, Any]]:
    """Rows named `name`: from `data`, a .jsonl or .json file (.gz too) or a folder with one of that name, or the hub.

    `hub` is a data set's id, configuration and split; it is read with the package `datasets`.

    Raises ValueError where there is no such file, or a line is not JSON.
    """
    if data is not None:
        return read_rows(local(data, [f"{name}{end}" for end in (".jsonl", ".jsonl.gz", ".json", ".json.gz")]))
    source, config, split = hub
    dataset = library("datasets", "Reading from the hub").load_dataset(source, config, split=split)
    return [dict(row) for row in dataset]


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
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"file {file} is not UTF-8: byte {error.start} is {raw[error.start]:#04x}.") from error


def read_rows(file: Path) -> Any:
    """A list of objects, one JSON object a line; of a .json file whatever it holds."""
    text = read_text(file)
    try:
        if file.name.removesuffix(".gz").endswith(".json"):
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"file {file} is not JSON: {error}.") from error


def books(data: str | None) -> dict[str, str]:
    """Plain texts by name: a .txt file (.gz too), all of a folder, "hub" for the test books of PG19, or the two books
    that come with the package (Pride and Prejudice, Moby-Dick; named by their numbers at Project Gutenberg).
    """
    if data is None:
        data = str(resources.files("clusterkv_jax.evaluation.tasks") / "books")
    if data == HUB:
        entries = rows(None, "pg19", ("emozilla/pg19", None, "test"))
        return {row["short_book_title"]: row["text"] for row in entries}
    place = Path(data)
    entries = [path for end in ("txt", "txt.gz", "raw") for path in place.glob(f"*.{end}")]
    files = [place] if place.is_file() else sorted(entries)
    if not files:
        raise ValueError(f"There are no .txt or .txt.gz books in {data}.")
    return {file.name.split(".")[0]: body(read_text(file)) for file in files}


def body(text: str) -> str:
    """A book without what Project Gutenberg prints before and after it."""
    marks = {match.group(1): match for match in _GUTENBERG.finditer(text)}
    start = marks["START"].end() if "START" in marks else 0
    end = marks["END"].start() if "END" in marks else len(text)
    return text[start:end].strip()
