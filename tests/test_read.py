"""`clusterkv read` and `generate --cache`: a saved text answers as one that is read on the spot."""

import json

import pytest
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import cli, saving
from clusterkv_jax.cli.read import listed
from tests.support.byte_model import byte_folder

TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<assistant>"
TEXT = ("All visible objects, man, are but as pasteboard masks. " * 6)[:300]
FEW = ("--max-new-tokens", "4")
KEPT = ("--method", "centroidkv", "--cache-ratio", "0.5")


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model whose tokens are bytes, with a chat template."""
    return byte_folder(tmp_path_factory.mktemp("tiny"), TEMPLATE)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A text in the chat template, half of it kept."""
    file = tmp_path_factory.mktemp("read") / "text.ckv"
    (file.parent / "text.txt").write_text(TEXT)
    result = run("read", file.parent / "text.txt", "--output", file, "--model", model, "--room", 64, *KEPT)
    assert result.exit_code == 0, result.output
    assert "tokens read with centroidkv" in result.stdout
    return file


def test_a_saved_text_answers_as_one_that_is_read(model, saved):
    ask = ("--question", "Who?", "--question", "Where was it?", "--max-new-tokens", 4, "--json")
    later = run("generate", "--cache", saved, *ask)
    assert later.exit_code == 0, later.output
    now = run("generate", "--model", model, "--prompt-file", saved.with_suffix(".txt"), *KEPT, *ask)
    found, expected = (json.loads(result.stdout)["runs"][0] for result in (later, now))
    assert found["texts"] == expected["texts"]
    assert found["stats"][0]["kept_rows"] == expected["stats"]["kept_rows"]
    assert found["stats"][0]["prompt_tokens"] == expected["stats"]["prompt_tokens"][:1]
    shown = run("generate", "--cache", saved, "--question", "Who?", "--max-new-tokens", 4)
    assert "50.0%" in shown.stdout


def test_a_method_in_a_file_runs_only_where_it_is_given(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from clusterkv_jax import StreamingLLM\nfrom dataclasses import dataclass\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(StreamingLLM):\n    pass\n"
    )
    (tmp_path / "text.txt").write_text(TEXT)
    kept = ("--method", "mine.py:Mine", "--cache-ratio", 0.5, "--room", 64)
    assert run("read", "text.txt", "--output", "a.ckv", "--model", model, *kept).exit_code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ask = ("generate", "--cache", "../a.ckv", "--question", "Who?", "--max-new-tokens", 2)
    refused = run(*ask)
    assert refused.exit_code == 2
    assert "give it as --method too" in " ".join(refused.stderr.split())
    assert run(*ask, "--method", "../mine.py:Mine").exit_code == 0


def test_files_and_folders_are_one_text(tmp_path):
    (tmp_path / "notes").mkdir()
    for name in ("b.txt", "a.md", "c.png"):
        (tmp_path / "notes" / name).write_text(name)
    (tmp_path / "last.log").write_text("last")
    found = listed([str(tmp_path / "notes"), str(tmp_path / "last.log")])
    assert [file.removeprefix(f"{tmp_path}/") for file in found] == ["notes/a.md", "notes/b.txt", "last.log"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--question", "Who?"], "One of --prompt-file and --cache is needed."),
        (["generate", "--cache", "SAVED", "--prompt-file", "TEXT"], "One of --prompt-file and --cache is needed."),
        (["generate", "--cache", "SAVED"], "--cache needs a --question."),
        (["generate", "--cache", "SAVED", "--question", "Who?", "--method", "snapkv"], "leave --method out."),
        (["generate", "--cache", "SAVED", "--question", "Who?", "--raw"], "leave --raw out."),
        (["generate", "--cache", "SAVED", "--question", "Who?", "--max-new-tokens", "90"], "more than the 64 that"),
        (["generate", "--cache", "SAVED", "--question", "Who?", *FEW, "--model", "demo"], "was made by"),
        (["generate", "--cache", "TEXT", "--question", "Who?"], "is not a whole cache file"),
        (["generate", "--cache", "OTHER", "--question", "Who?"], "does not say how it was read"),
        (["read", "PDF", "--output", "x.ckv"], "is a PDF; make a text of it first, as "),
        (["read", "EMPTY", "--output", "x.ckv"], "holds no .txt or .md file."),
        (["read", "TEXT", "--output", "no/such/x.ckv"], "The folder no/such does not exist"),
    ],
)
def test_mistakes_get_one_sentence(model, saved, tmp_path, arguments, said):
    network = ckv.load(model)
    (tmp_path / "empty").mkdir()
    (tmp_path / "book.pdf").write_bytes(b"%PDF-1.7 and so on")
    if "OTHER" in arguments:
        cache = saving.load(saved, network.config, ckv.CentroidKV(ckv.Budget(ratio=0.5)))
        ckv.save_cache(tmp_path / "other.ckv", cache, network.config, ckv.CentroidKV(ckv.Budget(ratio=0.5)))
    places = {"SAVED": saved, "TEXT": saved.with_suffix(".txt"), "OTHER": tmp_path / "other.ckv"}
    places |= {"PDF": tmp_path / "book.pdf", "EMPTY": tmp_path / "empty"}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
