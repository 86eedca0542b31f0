"""What a run left is believed only where it fits: its lines are held against their cases, its files against types."""

import gzip
import json
import math
import os
import shutil
from pathlib import Path

import pytest

from clusterkv_jax.evaluation import records, runner
from clusterkv_jax.evaluation.batching import Job
from clusterkv_jax.evaluation.report import table
from clusterkv_jax.evaluation.responses import Response
from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from tests.support import runs
from tests.test_evaluation_runner import ENTRIES, jobs, part

DOCS = Path(__file__).parent.parent / "docs" / "results"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that has ended: three methods, six examples."""
    folder = tmp_path_factory.mktemp("ended")
    part(folder, ENTRIES, work=jobs(6))
    return folder


@pytest.fixture
def again(ended, tmp_path):
    """Two ways to read a copy of the run: to go on with it, and to join it."""
    shutil.copytree(ended, tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink(missing_ok=True)
    return tmp_path / "run", lambda folder: part(folder, ENTRIES, work=jobs(6)), lambda folder: runner.join([folder])


def changed(file, number, **fields):
    """The lines of a file, of which one has other fields."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lines[number - 1].update(fields)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "going_on", "joining"),
    [
        ({"method": "snapkv"}, "answers snapkv with budget 1.0 of .*, which this run does not ask", "does not name"),
        ({"budget": "0.125"}, "answers full with budget 0.125 of .*, which this run does not ask", "does not name"),
        ({"budget": "0.00"}, "field 'budget': .*'0.00'", "field 'budget': .*'0.00'"),
        ({"id": "t0/99"}, "of example t0/99, which this run does not ask", None),
        ({"prompt": "0" * 16}, "has the prompt '0{16}', and it must be '", "and an earlier answer to"),
        ({"task": "other"}, "has the task 'other', and it must be 't", "and an earlier answer to"),
        (
            {"metric": "f1"},
            "has the metric 'f1', and it must be 'string_match_all'",
            "and an earlier answer to .* .f1.",
        ),
        ({"metric": "none"}, "field 'metric': 'none' is unknown; allowed: nll, f1", "is unknown"),
        ({"tokens": 41}, "has the tokens 41, and it must be ", "and an earlier answer to .* 41"),
        ({"compressed": False}, "has the compressed False, and it must be True", None),
        ({"facts": {"length": 9}}, "has the facts {'length': 9}, and it must be ", "has the facts"),
        ({"facts": {"depth": 9.5}}, "field 'facts.depth': Expected float <= 1.0", "Expected float <= 1.0"),
        ({"score": 0.25}, "has the score 0.25, and it must be 1.0; remove it and run again", None),
        ({"output": "another"}, "has the score 1.0, and it must be 0.0; remove it and run again", None),
        ({"score": 1.5}, "field 'score': A score by string_match_all is between 0 and 1, got 1.5", "got 1.5"),
        ({"score": math.nan}, "NaN is not a finite number", "NaN is not a finite number"),
        ({"score": "high"}, r"field 'score': Expected float, got str \('high'\)", "Expected float, got str"),
        ({"rows": -1}, "field 'rows': Expected float >= 0.0", "Expected float >= 0.0"),
        ({"note": 1}, "Unknown key 'note' in Line 5 of .*; allowed: method, budget", "Unknown key 'note'"),
    ],
)
def test_a_line_that_claims_what_is_not_so_is_refused_with_its_number(again, fields, going_on, joining):
    folder, go_on, join = again
    changed(folder / runner.RESULTS, 5, **fields)
    with pytest.raises(ValueError, match=f"Line 5 of .*{going_on}" if "Line 5" not in going_on else going_on):
        go_on(folder)
    if joining is None:
        join(folder)  # nothing in the file speaks against it
    else:
        with pytest.raises(ValueError, match=rf"Line \d of .*{joining}|{joining}"):
            join(folder)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"5", "Expected keys and values in Line 2 of .*, got 5"),
        (b"[]", "Expected keys and values in Line 2 of .*, got \\[\\]"),
        (b"null", "Expected keys and values in Line 2 of .*, got None"),
        (b"", "Line 2 of .* is not valid JSON"),
        (b'{"method": "full"}', "Line 2 of .*: Object missing required field budget"),
        (b'{"method": "full", "method": "full"}', "Line 2 of .*: The key 'method' stands twice"),
        (b"\xff", "Line 2 of .*results.jsonl is not UTF-8 text: byte 0 is 0xff"),
        (b"[" * 100_000, "Line 2 of .* is nested deeper than 32 levels"),
        (b"x" * 2**20, "Line 2 of .* is larger than 1 MiB"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_line_that_is_no_answer_is_refused_with_its_number(again, line, said):
    folder, *ways = again
    whole = (folder / runner.RESULTS).read_bytes().split(b"\n")
    (folder / runner.RESULTS).write_bytes(b"\n".join([whole[0], line, *whole[2:]]))
    for way in ways:
        with pytest.raises(ValueError, match=said):
            way(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "run.json: Expected object, got array"),
        ("{}", "run.json: Object missing required field config"),
        ('{"config": {"suite": "s", "model": "m", "methods": {}, "cases": ""}}', "missing required field sessions"),
        ('{"config": {"suite": "s", "model": "m", "cases": ""}, "sessions": []}', "field 'config': .* field methods"),
        ('{"config": ', "run.json is not valid JSON"),
        ("\ufeff", "run.json is not valid JSON"),
    ],
)
def test_a_run_that_is_none_is_named(again, text, said):
    folder, *ways = again
    (folder / runner.RUN).write_text(text, encoding="utf-8")
    for way in ways:
        with pytest.raises(ValueError, match=said):
            way(folder)


def test_a_line_torn_inside_of_a_letter_is_answered_again(tmp_path):
    def respond(method, prompts, *rest):
        return [Response("später", rows=1.0) for _ in prompts]

    job = Job(0, Case("a", "a", answers=("x",)), EncodedPrompt((1, 2)))

    def run():
        return runs.run(tmp_path, {"suite": "s", "model": "m"}, {}, [job], ENTRIES[:1], respond)

    run()
    whole = (tmp_path / runner.RESULTS).read_bytes()
    (tmp_path / runner.RESULTS).write_bytes(whole[: whole.index("ä".encode()) + 1])
    run()
    assert (tmp_path / runner.RESULTS).read_bytes() == whole


def test_joining_leaves_a_torn_line_where_it_is(again):
    folder, _, join = again
    torn = (folder / runner.RESULTS).read_bytes()[:-5]
    (folder / runner.RESULTS).write_bytes(torn)
    assert len(join(folder)[1]) == 17
    assert (folder / runner.RESULTS).read_bytes() == torn


def test_a_score_that_is_no_number_is_not_written(tmp_path):
    def respond(method, prompts, *rest):
        return [Response(logprobs=(math.nan,), rows=1.0) for _ in prompts]

    case = Case("book/1", "book", metric="nll", facts={"position": 2})
    job = Job(0, case, EncodedPrompt((1, 2), (), (3,)))
    with pytest.raises(
        ValueError, match=r"example book/1, field 'score': A score by nll is between 0 and 300, got nan"
    ):
        runs.run(tmp_path, {"suite": "s", "model": "m"}, {}, [job], ENTRIES[:1], respond)
    assert not (tmp_path / runner.RESULTS).exists()


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_holds_one_example_at_least(tmp_path, size):
    with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {size}"):
        runs.run(tmp_path, {}, {}, jobs(1), ENTRIES, lambda *_: [], batch_size=size)


def test_perplexities_and_scores_do_not_make_one_table(again, tmp_path):
    folder, _, join = again
    changed(folder / runner.RESULTS, 1, metric="nll", facts={"position": 1}, id="new")
    with pytest.raises(ValueError, match="Perplexities and other scores do not make one table"):
        join(folder)


PUBLISHED = [file.parent for file in sorted(DOCS.glob("*/results.jsonl.gz")) if (file.parent / runner.RUN).exists()]


@pytest.mark.parametrize("name", [folder.name for folder in PUBLISHED])
def test_published_runs_are_read(name):
    """Some thousand lines of each."""
    lines = []
    for _, line in records.read_answers(DOCS / name / "results.jsonl.gz"):
        lines.append(line)
        if len(lines) == 2000:
            break
    assert {f"{line['method']}@{line['budget']}" for line in lines} <= records.read_run(DOCS / name)["config"][
        "methods"
    ].keys()
    assert table.summarize(lines).rows


def test_all_published_answers_together_are_small():
    assert sum(file.stat().st_size for file in DOCS.rglob("*.gz")) <= 3e6


def test_packed_results_are_read_line_by_line(tmp_path):
    (file := tmp_path / "results.jsonl.gz").write_bytes(gzip.compress(b"0" * 2**26, 1))
    with pytest.raises(ValueError, match=r"Line 1 of .* is larger than 1 MiB"):
        list(records.read_answers(file))


@pytest.mark.parametrize("name", [runner.RUN, runner.RESULTS])
def test_a_pipe_is_refused_at_once(again, name):
    folder, *ways = again
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for way in ways:
        with pytest.raises(ValueError, match=f"{name} is a pipe or a device, and a file is needed"):
            way(folder)
