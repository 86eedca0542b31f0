"""Two runs are compared answer by answer."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from clusterkv_jax import cli
from clusterkv_jax.evaluation.comparison import interval


def run(*arguments):
    command = ["compare", *map(str, arguments)]
    return CliRunner().invoke(cli.app, command, env={"COLUMNS": "80"})


def answers(
    folder: Path, texts: dict[str, str], *, prompt: str = "p", score: float = 1.0, packed: bool = False
) -> Path:
    folder.mkdir()
    common = {"method": "snapkv", "budget": "0.5", "task": "[vt]", "prompt": prompt, "metric": "nll", "score": score}
    common |= {"rows": 8.0, "tokens": 8, "cut": 0, "compressed": True, "seconds": 0.1, "facts": {"position": 8}}
    text = "".join(json.dumps({**common, "id": name, "output": text}) + "\n" for name, text in texts.items()).encode()
    (folder / f"results.jsonl{'.gz' if packed else ''}").write_bytes(gzip.compress(text) if packed else text)
    return folder


def test_a_slice_is_found_in_its_table(tmp_path):
    slice_ = answers(tmp_path / "slice", {"vt/1": " A B"})
    table = answers(tmp_path / "table", {"vt/0": " C", "vt/1": " A B"}, packed=True)
    result = run(slice_, table, "--exact")
    assert result.exit_code == 0, result.output
    alone = "Without a partner are 0 answers of the first, and 1 of the second."
    for text in ("snapkv@0.5", "[vt]", "1 pairs of answers, 1 the same", alone):
        assert text in result.output
    assert json.loads(run(table, slice_, "--json").stdout)["alone"] == [1, 0]
    assert "Without a partner" not in run(slice_, slice_).output


def test_another_answer_is_shown_and_fails(tmp_path):
    first = answers(tmp_path / "first", {"vt/0": " C", "vt/1": " [A] B"})
    second = answers(tmp_path / "second", {"vt/0": " C", "vt/1": " B [A]"})
    result = run(first, second, "--exact")
    assert result.exit_code == 1
    for text in ("2 pairs of answers, 1 the same", "different: snapkv@0.5, vt/1", " [A] B", " B [A]"):
        assert text in result.output
    assert run(first, second).exit_code == 0


@pytest.mark.parametrize(("score", "status"), [(2.000001, 0), (2.1, 1)])
def test_perplexities_are_compared_by_their_scores(tmp_path, score, status):
    first = answers(tmp_path / "first", {"book": ""}, score=2.0)
    second = answers(tmp_path / "second", {"book": ""}, score=score)
    result = run(first, second, "--exact")
    assert result.exit_code == status, result.output
    assert ("2.1" in result.output) == bool(status)


def test_a_torn_last_line_is_left_out(tmp_path):
    first = answers(tmp_path / "first", {"vt/0": " C", "vt/1": " A"})
    second = answers(tmp_path / "second", {"vt/0": " C", "vt/1": " B"})
    file = second / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    result = run(first, second, "--exact")
    assert result.exit_code == 0
    assert "1 pairs of answers, 1 the same" in result.output


def test_what_cannot_be_compared_is_one_sentence(tmp_path):
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


def scored(folder, method, scores, **fields):
    """A folder whose answers to the same questions have these scores."""
    folder.mkdir(exist_ok=True)
    common = {"method": method, "budget": "0.5", "prompt": "p", "metric": "f1", "rows": 8.0, "tokens": 8, "cut": 0}
    common |= {"compressed": True, "seconds": 0.1, "facts": {}, "expected": ["[7]"], **fields}
    with (folder / "results.jsonl").open("a") as file:
        for i, score in enumerate(scores):
            about = {
                "id": f"t/{i}",
                "task": f"t{i % 2}",
                "question": f"What is {i}?",
                "output": f"{method} says {score}",
            }
            file.write(json.dumps({**common, **about, "score": score}) + "\n")
    return folder


def test_scores_are_compared_pair_by_pair(tmp_path):
    first = scored(tmp_path / "first", "snapkv", [0.5] * 200)
    second = scored(tmp_path / "second", "snapkv", [0.5 + 0.1 * (i % 4 > 1) for i in range(200)])
    result = run(first, second)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["all", "200", "50.0", "55.0", "+5.0", "(+4.3", "to", "+5.7)", "100", "0", "100"] in lines
    assert ["t0", "100", "50.0", "55.0", "+5.0", "(+4.0", "to", "+6.0)", "50", "0", "50"] in lines
    assert max(map(len, result.output.splitlines())) <= 80


def test_won_and_lost_examples_stand_side_by_side(tmp_path):
    both = scored(scored(tmp_path / "both", "snapkv", [1, 0, 1, 1]), "auto", [1, 1, 0.5, 1])
    result = run(f"{both}:snapkv@0.5", f"{both}:auto@0.5")
    assert result.exit_code == 0, result.output
    for text in ("won: snapkv@0.5 and auto@0.5, t/1", "lost: snapkv@0.5 and auto@0.5, t/2", "expected: [7]"):
        assert text in result.output
    assert any("snapkv says 0" in line and "auto says 1" in line for line in result.output.splitlines())
    found = json.loads(run(f"{both}:snapkv@0.5", f"{both}:auto@0.5", "--json").stdout)
    assert [pair["second"]["output"] for pair in found["won"] + found["lost"]] == ["auto says 1", "auto says 0.5"]
    total = found["rows"][-1]
    assert (total["task"], total["pairs"], total["won"], total["lost"], total["same"]) == ("all", 4, 1, 1, 0)
    for sides, said in (
        ((f"{both}:snapkv@0.5", both), "is named on both sides or on none"),
        ((f"{both}:quest@0.5", f"{both}:auto@0.5"), "has no quest@0.5; it has snapkv@0.5, auto@0.5."),
    ):
        refused = run(*sides)
        assert refused.exit_code == 2
        assert said in " ".join(refused.output.split())


def test_less_is_better_of_perplexities(tmp_path):
    first, second = (answers(tmp_path / name, {"book": ""}, score=score) for name, score in (("a", 2.0), ("b", 1.5)))
    found = json.loads(run(first, second, "--json").stdout)
    assert (found["rows"][0]["difference"], len(found["won"]), len(found["lost"])) == (-0.5, 1, 0)


def test_the_interval_covers_the_true_mean():
    rng = np.random.default_rng(1)
    covers = 0
    for _ in range(40):
        low, high = interval(rng.normal(0.3, 1, 60))
        covers += low < 0.3 < high
    assert 34 <= covers <= 40
