"""Each public method has a page that names its fields, defaults and presets, and there is no page without a method."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from clusterkv_jax import methods
from clusterkv_jax.presets import list_presets

FOLDER = Path(__file__).parents[1] / "docs" / "methods"
PAGES = {page.stem: page for page in FOLDER.glob("*.md") if page.stem != "index"}
METHODS = {name.lower(): cls for name, cls in methods.METHODS.items()}
HEADINGS = ["Keeps", "Rule", "Parameters", "Example", "Source", "Decided here"]


def section(name, heading):
    text = PAGES[name].read_text(encoding="utf-8")
    return re.split(r"^## ", text, flags=re.MULTILINE)[1 + HEADINGS.index(heading)]


def table(text, first):
    """The rows of the table whose first column is called `first`, as cells."""
    match = re.search(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)*)", text, re.MULTILINE)
    assert match, f"no table begins with the column {first!r}"
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in match[1].splitlines()]


def written(field):
    """A default as Python code has it."""
    if field.default is dataclasses.MISSING:
        return "required"
    return f'`"{field.default}"`' if isinstance(field.default, str) else f"`{field.default!r}`"


def test_each_method_has_a_page_and_each_page_a_method():
    assert set(PAGES) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_pages_have_the_same_headings(name):
    text = PAGES[name].read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^##? (.*)$", prose, re.MULTILINE) == [METHODS[name].__name__, *HEADINGS]


@pytest.mark.parametrize("name", METHODS)
def test_the_table_names_every_field_and_its_default(name):
    rows = table(section(name, "Parameters"), "field")
    assert [row[:2] for row in rows] == [
        [f"`{field.name}`", written(field)] for field in dataclasses.fields(METHODS[name])
    ]
    assert all(len(row) == 3 and row[2] for row in rows)


@pytest.mark.parametrize("name", METHODS)
def test_the_docstring_says_what_every_field_means(name):
    """But for `cache_dtype`, which all have: `Storage` says it."""
    said = re.findall(
        r"^    (\w+): ", (inspect.getdoc(METHODS[name]) or "").partition("Attributes:\n")[2], re.MULTILINE
    )
    assert set(said) == {field.name for field in dataclasses.fields(METHODS[name])} - {"cache_dtype"}


@pytest.mark.parametrize("name", METHODS)
def test_the_page_lists_the_presets_of_its_method(name):
    presets = [f"`{preset.name}`" for preset in list_presets().values() if preset.method is METHODS[name]]
    rows = table(section(name, "Parameters"), "preset") if presets else []
    assert sorted(row[0] for row in rows) == sorted(presets)


def test_the_index_has_every_method_once():
    text = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert sorted(re.match(r"\[(\w+)\]\((\w+)\.md\)", row[0]).groups() for row in table(text, "method")) == sorted(
        (cls.__name__, name) for name, cls in METHODS.items()
    )
