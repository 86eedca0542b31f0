"""Two runs are compared answer by answer."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "compare_results.py"


@pytest.fixture(scope="module")
def run():
    import typer

    spec = importlib.util.spec_from_file_location("compare_results", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    app = typer.Typer()
    app.command()(script.main)
    return lambda *folders: CliRunner().invoke(app, [str(folder) for folder in folders])


def answers(folder: Path, texts: dict[str, str], prompt: str = "p", packed: bool = False) -> Path:
    folder.mkdir()
    lines = [
        {"method": "snapkv", "budget": "0.5", "task": "vt", "id": name, "prompt": prompt, "output": text, "score": 1.0}
        for name, text in texts.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / f"results.jsonl{'.gz' if packed else ''}").write_bytes(gzip.compress(text) if packed else text)
    return folder


def test_a_slice_is_found_in_its_table(run, tmp_path):
    slice_ = answers(tmp_path / "slice", {"vt/1": " A B"})
    table = answers(tmp_path / "table", {"vt/0": " C", "vt/1": " A B"}, packed=True)
    done = run(slice_, table)
    assert done.exit_code == 0, done.output
    assert "1 of 1" in done.output


def test_another_answer_is_shown_and_fails(run, tmp_path):
    first = answers(tmp_path / "first", {"vt/0": " C", "vt/1": " [A] B"})
    second = answers(tmp_path / "second", {"vt/0": " C", "vt/1": " B [A]"})
    done = run(first, second)
    assert done.exit_code == 1
    for text in ("1 of 2", "2 of 2", "vt/1", "' [A] B'", "' B [A]'"):
        assert text in done.output


def test_what_cannot_be_compared_is_one_sentence(run, tmp_path):
    first = answers(tmp_path / "first", {"vt/0": " C"})
    other = answers(tmp_path / "other", {"vt/0": " C"}, prompt="q")
    none = answers(tmp_path / "none", {"vt/9": " C"})
    (tmp_path / "empty").mkdir()
    for second, why in ((other, "asked vt/0 otherwise"), (none, "in common"), (tmp_path / "empty", "holds no results")):
        done = run(first, second)
        assert done.exit_code == 2
        assert why in " ".join(done.output.split())
