"""The benchmark of long-lived processes runs in small, goes on where it was stopped, and draws what it found."""

import json

from tests.support.scripts import script


def samples(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_requests_go_on_where_they_were_stopped(tmp_path, capsys):
    soak = script("benchmarks/soak.py")
    sizes = {"kinds": 2, "model": "demo", "layers": 1, "limit": None, "seed": 0, "output": tmp_path}
    for requests in (2, 4):
        soak.requests(requests=requests, **sizes)
    lines = samples(tmp_path / "requests.jsonl")
    assert [(line["request"], line["process"]) for line in lines] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert all(line["mappings"] > 100 and line["resident"] > 1e8 and line["arrays"] > 10 for line in lines)
    assert (tmp_path / "requests.svg").read_text().startswith("<svg")
    assert "mappings: " in capsys.readouterr().out


def test_an_evaluation_is_watched_while_it_runs(tmp_path):
    soak = script("benchmarks/soak.py")
    sizes = {"methods": "streamingllm", "budgets": "0.5", "lengths": "384", "model": "demo", "layers": 1}
    soak.evaluation(**sizes, every=0.05, folder=tmp_path / "work", output=tmp_path)
    lines = samples(tmp_path / "evaluation.jsonl")
    assert len(lines) > 5
    assert [line["minutes"] for line in lines] == sorted(line["minutes"] for line in lines)
    assert (tmp_path / "evaluation.svg").read_text().startswith("<svg")
    answers = samples(tmp_path / "work" / "run" / "results.jsonl")
    assert [line["method"] for line in answers] == ["full", "streamingllm"]
