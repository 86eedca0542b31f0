"""The documentation tells the truth: its Python runs and prints what it says, its files and commands exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterkv_jax import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def _blocks(language):
    return [
        pytest.param(code, id=f"{page.name}-{i}")
        for page in PAGES
        for i, (found, code) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
        if found == language
    ]


@pytest.mark.parametrize("code", _blocks("python"))
def test_python_runs_and_prints_what_it_says(code, monkeypatch):
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {})
    says = [line.split("  # ", 1)[1] for line in code.splitlines() if line.startswith("print(") and "  # " in line]
    for line, said in zip(printed.getvalue().splitlines(), says, strict=True):
        assert said == line or said.startswith(f"{line}: "), f"prints {line!r}, the comment says {said!r}"


@pytest.mark.parametrize("code", _blocks("bash"))
def test_commands_exist(code):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", code, re.MULTILINE):
        assert f"\n{target}:" in makefile
    for command in re.findall(r"^clusterkv (.*(?:\\\n.*)*)", code, re.MULTILINE):
        name = command.split()[0]
        assert name in ("generate", "methods", "calibrate", "evaluate", "inspect", "join", "lm-eval")
        if name == "lm-eval":  # its options are the harness's
            continue
        path = [name]
        if name == "inspect":
            path.append("recall" if command.split()[1] == "recall" else "keys")
        options = CliRunner().invoke(cli.app, [*path, "--help"], env={"COLUMNS": "300"}).stdout
        for option in re.findall(r"(--[\w-]+)", command):
            assert f"{option} " in options, option


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link
