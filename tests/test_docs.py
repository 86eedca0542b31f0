"""The documentation tells the truth: its commands, links and letters exist. tests/pages has its Python."""

import functools
import os
import re
import unicodedata
from pathlib import Path

import typer
import yaml
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import cli
from tests.support.pages import DOCS, GENERATED, PAGES, ROOT, TEXTS, blocks, each

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
SHAPE = re.compile(r'(?:Array|ndarray)[^"\n]{0,40}, "([^"\n]*)"')


@each(page for page in TEXTS if blocks(page, "bash"))
def test_commands_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for code in blocks(page, "bash"):
        for target in re.findall(r"^make ([\w-]+)", code, re.MULTILINE):
            assert f"\n{target}:" in makefile
        for script in re.findall(r"^python (\S+\.py)", code, re.MULTILINE):
            assert (ROOT / script).exists(), script
        for command in re.findall(r"(?:^|\| )clusterkv (.*(?:\\\n.*)*)", code, re.MULTILINE):
            _check_options(command)


def _check_options(command):
    """`--help` knows the options of a command line."""
    group, path = typer.main.get_command(cli.app), []
    for word in command.split():
        if not hasattr(group, "commands"):
            break
        word = word if word in group.commands else "keys"  # `inspect MODEL` is `inspect keys MODEL`
        group = group.commands[word]
        path.append(word)
    if path != ["lm-eval"]:  # its options are the harness's
        for option in re.findall(r"(?<!\S)(--[\w-]+)", command):
            assert f"{option} " in _help(tuple(path)), f"{' '.join(path)} has no {option}"


@functools.cache
def _help(path):
    return CliRunner().invoke(cli.app, [*path, "--help"], env={"COLUMNS": "300"}).stdout


@each(PAGES)
def test_links_lead_somewhere(page):
    for link, anchor in LINK.findall(_without_code(TEXTS[page])):
        target = Path(os.path.normpath(page.parent / link)) if link else page
        assert target in GENERATED or target.exists(), f"no file {link}"
        if anchor:
            assert anchor in _anchors(target), f"no heading #{anchor} in {target.name}"


def test_links_lead_somewhere_in_a_checkout_too():
    """Where no page has been made from the code."""
    for page in PAGES:
        for link, _ in LINK.findall(_without_code(TEXTS[page])):
            target = Path(os.path.normpath(page.parent / link)) if link else page
            assert target.exists(), f"{page.name}: {link} is made for the site alone"
            assert DOCS not in page.parents or DOCS in target.parents, f"{page.name}: {link} is outside of the site"


def test_the_front_page_is_the_readme():
    front = TEXTS[DOCS / "index.md"]
    assert re.sub(r"\]\([^)]*\)", "]", front) == re.sub(r"\]\([^)]*\)", "]", TEXTS[ROOT / "README.md"])


@functools.cache
def _anchors(page):
    """Of the headings of a page as the site makes them, and of the names that the API page shows."""
    text = _without_code(TEXTS[page])
    return {*map(_slug, re.findall(r"^#+ (.*)$", text, re.MULTILINE)), *re.findall(r"^::: (\S+)$", text, re.MULTILINE)}


def _slug(heading):
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _without_code(text):
    return re.sub(r"^(```+).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


@each(PAGES)
def test_lines_are_short(page):
    """Outside tables and fences, which may not be broken."""
    lines = _without_code(TEXTS[page]).splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_every_page_is_in_the_navigation():
    tree = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)["nav"]
    pages = {DOCS / page for page in _leaves(tree)}
    assert pages == {page for page in TEXTS if page.is_relative_to(DOCS)}


def _leaves(tree):
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(part)]


def test_the_api_page_has_every_public_name():
    names = set(re.findall(r"^::: clusterkv_jax\.(\w+)$", TEXTS[DOCS / "reference/api.md"], re.MULTILINE))
    assert names == set(ckv.__all__)


def test_the_models_page_says_what_kernels_meet():
    """A family of each kind, by what its configuration and the sizes of its heads say."""
    lines = [line for line in TEXTS[DOCS / "reference/models.md"].splitlines() if line.startswith("| ")]
    header, _, *rows = (line.strip("|").split(" | ") for line in lines)
    found = {}
    for row in rows:
        cells = {name.strip(): cell.strip() for name, cell in zip(header, row, strict=True)}
        found[cells["model_type"].strip("`")] = cells["also has"], cells["kernels"]
    expected = {
        "gemma2": ("window, soft cap", "XLA; splash"),
        "gemma3": ("window", "cuDNN of 128, XLA; splash"),
        "gpt_oss": ("window, sinks, experts", "XLA; XLA"),
        "llama": ("", "cuDNN; splash of 128, XLA"),
        "mixtral": ("window, experts", "cuDNN; splash"),
    }
    assert expected.items() <= found.items()


def test_the_glossary_has_every_shape_letter():
    letters = set()
    for folder in ("clusterkv_jax", "kernels", "models"):
        for file in (ROOT / folder).rglob("*.py"):
            letters.update(word for shape in SHAPE.findall(file.read_text(encoding="utf-8")) for word in shape.split())
    cells = re.findall(r"^\| ((?:\w, )*\w) \|", TEXTS[DOCS / "concepts/glossary.md"], re.MULTILINE)
    explained = {letter for cell in cells for letter in cell.split(", ")}
    assert {word for word in letters if re.fullmatch("[A-Za-z]", word)} <= explained
