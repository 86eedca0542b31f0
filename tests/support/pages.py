"""The documentation as texts: pages that are files, pages that the site makes, and the programs in them."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("docs", "models", "kernels", "configs", "scripts", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What the site has beside the pages that are files, by path.
GENERATED = {DOCS / name: text for name, text in generator().pages().items()}
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES} | GENERATED


def each(pages):
    return pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages])


def blocks(page, language):
    return [code for kind, code in FENCE.findall(TEXTS[page]) if kind == language]


def run_python(page):
    """The blocks of a page are one program, from top to bottom; each `print` prints the comment behind it."""
    names = {}
    for code in blocks(page, "python"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), names)
        says = [line.split("  # ", 1)[1] for line in code.splitlines() if line.startswith("print(") and "  # " in line]
        for line, said in zip(printed.getvalue().splitlines(), says, strict=True):
            assert said == line or said.startswith(f"{line}: "), f"prints {line!r}, the comment says {said!r}"


PROGRAMS = [page for page in TEXTS if blocks(page, "python")]
