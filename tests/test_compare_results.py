"""Two runs are compared answer by answer."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.scripts import script


@pytest.fixture(scope="module")
def run():
    import typer

    app = typer.Typer()
    app.command()(script("compare_results.py").main)
    return lambda *folders: CliRunner().invoke(app, [str(folder) for folder in folders])


def answers(
    folder: Path, texts: dict[str, str], *, prompt: str = "p", score: float = 1.0, packed: bool = False
) -> Path:
    folder.mkdir()
    common = {"method": "snapkv", "budget": "0.5", "task": "[vt]", "prompt": prompt, "metric": "nll", "score": score}
    common |= {"rows": 8.0, "tokens": 8, "cut": 0, "compressed": True, "seconds": 0.1, "facts": {"position": 8}}
    text = "".join(json.dumps({**common, "id": name, "output": text}) + "\n" for name, text in texts.items()).encode()
    (folder / f"results.jsonl{'.gz' if packed else ''}").write_bytes(gzip.compress(text) if packed else text)
    return folder


def test_a_slice_is_found_in_its_table(run, tmp_path):
    slice_ = answers(tmp_path / "slice", {"vt/1": " A B"})
    table = answers(tmp_path / "table", {"vt/0": " C", "vt/1": " A B"}, packed=True)
    result = run(slice_, table)
    assert result.exit_code == 0, result.output
    for text in ("[vt]", "1 of 1", "0 answers are in", "1 in"):
        assert text in result.output


def test_another_answer_is_shown_and_fails(run, tmp_path):
    first = answers(tmp_path / "first", {"vt/0": " C", "vt/1": " [A] B"})
    second = answers(tmp_path / "second", {"vt/0": " C", "vt/1": " B [A]"})
    result = run(first, second)
    assert result.exit_code == 1
    for text in ("1 of 2", "vt/1", "' [A] B'", "' B [A]'"):
        assert text in result.output


@pytest.mark.parametrize(("score", "status"), [(2.000001, 0), (2.1, 1)])
def test_perplexities_are_compared_by_their_scores(run, tmp_path, score, status):
    first = answers(tmp_path / "first", {"book": ""}, score=2.0)
    second = answers(tmp_path / "second", {"book": ""}, score=score)
    result = run(first, second)
    assert result.exit_code == status, result.output
    assert ("2.1" in result.output) == bool(status)


def test_a_torn_last_line_is_left_out(run, tmp_path):
    first = answers(tmp_path / "first", {"vt/0": " C", "vt/1": " A"})
    second = answers(tmp_path / "second", {"vt/0": " C", "vt/1": " B"})
    file = second / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    result = run(first, second)
    assert result.exit_code == 0
    assert "1 of 1" in result.output


def test_what_cannot_be_compared_is_one_sentence(run, tmp_path):
    first = answers(tmp_path / "first", {"vt/0": " C"})
    other = answers(tmp_path / "other", {"vt/0": " C"}, prompt="q")
    none = answers(tmp_path / "none", {"vt/9": " C"})
    both = answers(tmp_path / "both", {"vt/0": " C"})
    (both / "results.jsonl.gz").write_bytes(b"")
    cut = answers(tmp_path / "cut", {"vt/0": " C"}, packed=True)
    (cut / "results.jsonl.gz").write_bytes((cut / "results.jsonl.gz").read_bytes()[:-9])
    twice = answers(tmp_path / "twice", {"vt/0": " C"})
    (twice / "results.jsonl").write_bytes((twice / "results.jsonl").read_bytes() * 2)
    lacking = answers(tmp_path / "lacking", {"vt/0": " C"})
    (lacking / "results.jsonl").write_text('{"method": "snapkv"}\n')
    (tmp_path / "empty").mkdir()
    expected = {
        other: "asked vt/0 otherwise",
        none: "in common",
        both: "must hold either",
        cut: "is not a whole gzip file",
        twice: "Line 2 of",
        lacking: "Line 1 of",
        tmp_path / "empty": "must hold either",
    }
    for second, why in expected.items():
        result = run(first, second)
        assert result.exit_code == 2, result.output
        assert why in " ".join(result.output.split()), result.output


def test_scores_are_compared_pair_by_pair(run, tmp_path):
    first = answers(tmp_path / "first", {f"vt/{i}": "" for i in range(200)}, score=0.5)
    second = answers(tmp_path / "second", {f"vt/{i}": "" for i in range(200)})
    file = second / "results.jsonl"
    lines = [json.loads(line) | {"score": 0.5 + 0.1 * (i % 2)} for i, line in enumerate(file.read_text().splitlines())]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(first, second, "--differences")
    assert result.exit_code == 0, result.output
    for text in ("[vt]", "every task", "200", "+0.0500", "+0.0430 to +0.0570", "of 200 pairs"):
        assert text in " ".join(result.output.split()), result.output


def test_the_interval_covers_the_true_mean():
    interval, rng = script("compare_results.py").interval, np.random.default_rng(1)
    covers = 0
    for _ in range(40):
        low, high = interval(rng.normal(0.3, 1, 60))
        covers += low < 0.3 < high
    assert 34 <= covers <= 40
