"""A run writes each example once, whatever happens to it, and refuses to mix two configurations."""

import gzip
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.evaluation import batching, runner
from clusterkv_jax.evaluation.batching import Job, MethodEntry
from clusterkv_jax.evaluation.report import table
from clusterkv_jax.evaluation.responses import Response
from clusterkv_jax.evaluation.tasks import longbench
from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from tests.support import runs

ROOT = Path(__file__).parent.parent
BARE = {"method": "full", "budget": "1.0", "metric": "nll", "compressed": True, "cut": 0}
CONFIG = {"suite": "ruler", "model": "stub", "batch_size": 4}


def jobs(count=30):
    """Cases of two tasks and several lengths, every third of which shares its context with the one before."""
    work = []
    for i in range(count):
        context = tuple(range(40 + 70 * ((i - i % 3 // 2) % 4)))
        facts = {"length": len(context), "depth": i / count}
        case = Case(f"t{i % 2}/{i}", f"t{i % 2}", answers=(f"answer {i % 5}",), max_new_tokens=8, facts=facts)
        work.append(Job(i, case, EncodedPrompt(context, (i,))))
    return work


ENTRIES = [MethodEntry("full", "1.0", ckv.Full())] + [
    MethodEntry("centroidkv", budget, ckv.CentroidKV(ckv.Budget(ratio=float(budget)))) for budget in ("0.5", "0.25")
]


def respond(method, prompts, max_new_tokens, stop):
    """Right answers as often as a method's budget is large; depends on the prompt alone."""
    share = 1.0 if isinstance(method, ckv.Full) else method.budget.ratio
    return [
        Response(f"answer {(p.question[0] if p.question[0] % 10 < 10 * share else 7) % 5}", rows=len(p.context) * share)
        for p in prompts
    ]


def slowly(method, prompts, max_new_tokens, stop):
    time.sleep(0.02)
    return respond(method, prompts, max_new_tokens, stop)


def go(folder, respond=respond, config=CONFIG, work=None, **options):
    return runs.run(folder, config, {}, work or jobs(), ENTRIES, respond, batch_size=4, **options)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    go(folder)
    return (folder / runner.RESULTS).read_bytes()


def test_a_run_killed_three_times_ends_with_the_same_file(unbroken, tmp_path):
    program = "from tests.test_evaluation_runner import go, slowly; from pathlib import Path; import sys; "
    command = [sys.executable, "-c", program + "go(Path(sys.argv[1]), slowly)", str(tmp_path)]
    chance, file = random.Random(0), tmp_path / runner.RESULTS
    for third in range(1, 4):
        process = subprocess.Popen(command, cwd=ROOT)
        goal = len(unbroken) * (third - chance.random()) / 3.2
        while not (file.exists() and file.stat().st_size >= goal) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(0.04 * chance.random())
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert file.stat().st_size < len(unbroken)
    calls = []

    def counting(method, prompts, *rest):
        calls.extend(prompts)
        return respond(method, prompts, *rest)

    lines = go(tmp_path, counting)
    assert file.read_bytes() == unbroken
    assert 0 < len(calls) < len(lines) == 90
    assert len(json.loads((tmp_path / runner.RUN).read_text())["sessions"]) == 4


@settings(max_examples=30)
@given(place=st.floats(0, 1))
def test_a_file_cut_at_any_byte_is_completed(unbroken, tmp_path_factory, place):
    folder = tmp_path_factory.mktemp("cut")
    go(folder)
    file = folder / runner.RESULTS
    file.write_bytes(unbroken[: int(place * len(unbroken))])
    go(folder)
    assert file.read_bytes() == unbroken


def test_lines_do_not_depend_on_how_many_are_answered_together(unbroken, tmp_path):
    def by_id(lines):
        return sorted((line["method"], line["budget"], line["id"], line["score"]) for line in lines)

    alone = runs.run(tmp_path, CONFIG, {}, jobs(), ENTRIES, respond, batch_size=1)
    assert by_id(alone) == by_id(json.loads(line) for line in unbroken.decode().splitlines())


def test_batches_share_contexts_and_programs():
    groups = list(batching.batches(jobs(), 4))
    assert sorted(job.number for batch in groups for job in batch) == list(range(30))
    assert max(map(len, groups)) == 4
    for batch in groups:
        assert len({batching.bucket(len(job.prompt.context), 64) for job in batch}) == 1
    first = {job.prompt.context: i for i, batch in reversed(list(enumerate(groups))) for job in batch}
    runs = [job.prompt.context for batch in groups for job in batch]
    assert len(first) == sum(a != b for a, b in pairwise(runs)) + 1


def test_prompts_too_short_for_a_budget_are_read_whole_and_said_so(tmp_path):
    def possible(method, prompt, new):
        return isinstance(method, ckv.Full) or len(prompt.context) * method.budget.ratio > 30

    lines = go(tmp_path, possible=possible)
    for line in lines:
        share = float(line["budget"])
        assert line["compressed"] == (share == 1 or line["tokens"] * share > 30)
        assert line["rows"] == line["tokens"] * (share if line["compressed"] else 1)
    assert "26 answers come from the full cache" in table.markdown(table.summarize(lines))
    with pytest.raises(ValueError, match=r"budget 0\.5 is impossible for every prompt; they have 40 to 250 tokens"):
        go(tmp_path / "none", possible=lambda method, prompt, new: isinstance(method, ckv.Full))
    assert not (tmp_path / "none").exists()


def test_two_runs_do_not_go_on_in_one_folder(tmp_path):
    def meanwhile(method, prompts, *rest):
        with pytest.raises(ValueError, match=f"Another run is writing to {tmp_path}"):
            go(tmp_path)
        return respond(method, prompts, *rest)

    assert len(go(tmp_path, meanwhile)) == 90
    assert len(go(tmp_path)) == 90


def test_another_configuration_is_refused(tmp_path):
    go(tmp_path)
    with pytest.raises(ValueError, match="holds a run with model = 'stub', not 'other'; choose another folder"):
        go(tmp_path, config={**CONFIG, "model": "other"})
    with pytest.raises(ValueError, match="holds a run with cases = "):
        go(tmp_path, work=jobs(29))
    with pytest.raises(ValueError, match="holds a run with seed = None, not 1"):
        go(tmp_path, config={**CONFIG, "seed": 1})


def test_a_folder_takes_methods_and_tasks_later(unbroken, tmp_path):
    asked = []

    def noting(method, prompts, *rest):
        asked.extend((method, prompt.question) for prompt in prompts)
        return respond(method, prompts, *rest)

    def add(entries, work):
        asked.clear()
        return runs.run(tmp_path, CONFIG, {}, work, entries, noting, batch_size=4)

    one_task = [job for job in jobs() if job.case.task == "t0"]
    assert len(add(ENTRIES[1:], one_task)) == len(asked) == 2 * len(one_task)
    assert len(add(ENTRIES[:1], one_task)) == 3 * len(one_task)
    assert {method for method, _ in asked} == {ckv.Full()}
    assert len(add(ENTRIES, jobs())) == 90
    assert len(asked) == 3 * 15

    def order(line):
        return (line["method"], line["budget"], line["id"])

    whole = [json.loads(line) for line in unbroken.decode().splitlines()]
    assert sorted(add(ENTRIES[:1], one_task), key=order) == sorted(whole, key=order)
    assert not asked
    run = json.loads((tmp_path / runner.RUN).read_text())
    assert set(run["config"]["methods"]) == {"full@1.0", "centroidkv@0.5", "centroidkv@0.25"}
    assert [session["answers"] for session in run["sessions"]] == [30, 15, 45, 0]
    with pytest.raises(ValueError, match=r"holds a run with methods full@1\.0 = 'Full\(\)', not .*int8"):
        add([MethodEntry("full", "1.0", ckv.Full(cache_dtype="int8"))], one_task)


def test_lines_say_what_was_asked_and_expected(tmp_path):
    case = Case("a/0", "a", question="Who?", answers=("answer 0", "nobody"))
    line = go(tmp_path, work=[Job(0, case, EncodedPrompt(tuple(range(50)), (0,)))])[0]
    assert (line["question"], line["expected"], line["output"]) == ("Who?", ["answer 0", "nobody"], "answer 0")


def test_a_folder_of_an_earlier_version_is_read_but_does_not_go_on(tmp_path):
    go(tmp_path)
    for file, change in ((runner.RUN, _earlier_run), (runner.RESULTS, _earlier_lines)):
        (tmp_path / file).write_text(change((tmp_path / file).read_text()))
    assert len(runner.join([tmp_path])[1]) == 90
    with pytest.raises(ValueError, match="holds a run of an earlier version"):
        go(tmp_path)


def _earlier_run(text):
    run = json.loads(text)
    return json.dumps({**run, "config": {**run["config"], "cases": "5f3a"}})


def _earlier_lines(text):
    lines = map(json.loads, text.splitlines())
    return "".join(json.dumps({k: v for k, v in x.items() if k not in ("question", "expected")}) + "\n" for x in lines)


def test_damaged_results_are_named(tmp_path):
    go(tmp_path)
    file = tmp_path / runner.RESULTS
    good = file.read_bytes()
    file.write_bytes(good[:100] + b"\n" + good[100:])
    with pytest.raises(ValueError, match=r"Line 1 of .* is not valid JSON"):
        go(tmp_path)
    file.write_bytes(good + good.splitlines(keepends=True)[0])
    with pytest.raises(
        ValueError, match=r"Line 91 of .* answers full with budget 1\.0 of example t0/0 a second time; remove it"
    ):
        go(tmp_path)
    file.write_bytes(good)
    (tmp_path / runner.RUN).unlink()
    with pytest.raises(ValueError, match=r"holds results.jsonl without run.json"):
        go(tmp_path)


# --- tables and reports ---


@pytest.fixture(scope="module")
def lines(unbroken):
    return [json.loads(line) for line in unbroken.decode().splitlines()]


def test_the_table_holds_means_and_intervals(lines):
    summary = table.summarize(lines)
    assert [(row.method, row.budget) for row in summary.rows] == [(e.name, e.budget) for e in ENTRIES]
    assert set(summary.columns) == {f"t{i}@{n}" for i in (0, 1) for n in (40, 110, 180, 250)}
    for row in summary.rows:
        mine = [line for line in lines if (line["method"], line["budget"]) == (row.method, row.budget)]
        for name, cell in row.cells.items():
            scores = [x["score"] for x in mine if f"{x['task']}@{x['facts']['length']}" == name]
            assert cell.value == pytest.approx(100 * sum(scores) / len(scores))
            assert cell.count == len(scores)
        assert row.average.value == pytest.approx(sum(c.value for c in row.cells.values()) / 8)
    assert summary.rows[0].average.value == 100 > summary.rows[1].average.value > summary.rows[2].average.value


def test_the_interval_is_wilsons():
    assert table.wilson([1] * 81 + [0] * 182) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, Table I
    assert table.wilson([1.0] * 10)[1] == pytest.approx(1)
    assert table.wilson([1.0] * 10)[0] == pytest.approx(0.7225, abs=1e-4)


def test_perplexities_are_averaged_as_logarithms():
    def line(task, position, score):
        facts = {"position": position}
        return dict(
            method="full", budget="1.0", task=task, metric="nll", score=score, compressed=True, cut=0, facts=facts
        )

    summary = table.summarize([line("a", 64, 1.0), line("a", 64, 3.0), line("b", 64, 4.0), line("b", 128, 0.0)])
    (row,) = summary.rows
    assert summary.columns == ("a@64", "b@64", "b@128")
    assert row.cells["a@64"].value == pytest.approx(2.718281828**2)
    assert row.average.value == pytest.approx(2.718281828**2)


def longbench_lines(tmp_path):
    """Two rows of a task, of which one lost tokens, through a run."""
    work = []
    for i, words in enumerate((458, 1096)):
        row = {"context": "text", "input": "", "answers": ["answer 0"], "all_classes": None, "length": words}
        case = longbench.kvpress_case("lcc", i, row)
        case = replace(case, facts={**case.facts, "cut": 7 * i})
        work.append(Job(i, case, EncodedPrompt(tuple(range(50)), (i,), cut=2 * i)))
    return go(tmp_path, work=work)


def test_longbench_rows_of_any_length_share_a_column_with_the_papers(tmp_path):
    lines = longbench_lines(tmp_path)
    paper = table.published("centroidkv-longbench-llama3.1-8b")
    summary = table.beside(table.summarize(lines), [paper])
    assert summary.columns == ("lcc",)
    assert summary.rows[0].cells["lcc"].count == 2
    names = [row.method for row in summary.rows if row.source != "measured"]
    assert names == [row.method for row in paper.rows if "lcc" in row.cells]
    assert f"{paper.source}: {paper.protocol}." in table.markdown(summary)
    alone = table.beside(table.summarize(lines), [table.published("centroidkv-ruler-llama3.1-8b")])
    assert alone == table.summarize(lines)  # nothing of it is shown, so nothing is said of it


def test_averages_of_papers_stand_beside_their_task_at_any_lengths():
    line = {**BARE, "metric": "substring", "score": 1.0, "task": "niah"}
    lines = [{**line, "facts": {"length": length, "depth": 0.5}} for length in (1024, 2048)]
    paper = table.published("chunkkv-niah-llama3-8b")
    assert table.beside(table.summarize(lines), [paper]).rows[1:] == paper.rows
    other = [{**line, "task": "lines", "facts": {"length": 1024}}]
    assert len(table.beside(table.summarize(other), [paper]).rows) == 1


def test_what_the_authors_of_longbench_cut_is_counted(tmp_path):
    lines = longbench_lines(tmp_path)
    assert {line["id"]: line["cut"] for line in lines} == {"lcc/0": 0, "lcc/1": 9}
    assert "3 prompts lost tokens" in table.markdown(table.summarize(lines))


@pytest.mark.parametrize("name", table.published_names())
def test_published_tables_are_whole(name):
    from clusterkv_jax.evaluation.tasks.suites import SUITES

    paper = table.published(name)
    assert paper.suite in SUITES
    assert paper.source
    assert paper.protocol
    for row in paper.rows:
        assert float(row.budget) > 0
        assert row.average.value > 0
        assert set(row.cells) <= set(SUITES[paper.suite].tasks)
        assert all(0 <= cell.value <= 100 for cell in row.cells.values())


# --- several runs as one ---


def part(folder, entries, work=None, **config):
    return runs.run(folder, {**CONFIG, **config}, {"n": str(folder)}, work or jobs(), entries, respond)


def test_runs_of_different_methods_join_into_what_one_run_finds(unbroken, tmp_path):
    part(tmp_path / "a", ENTRIES[:1])
    part(tmp_path / "b", ENTRIES[1:])
    run, lines = runner.join([tmp_path / "a", tmp_path / "b"])

    def order(line):
        return (line["method"], line["budget"], line["id"])

    whole = [json.loads(line) for line in unbroken.decode().splitlines()]
    assert sorted(lines, key=order) == sorted(whole, key=order)
    assert list(run["config"]["methods"]) == ["full@1.0", "centroidkv@0.5", "centroidkv@0.25"]
    assert [session["n"] for session in run["sessions"]] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_of_the_full_cache_the_first_run_counts(tmp_path):
    for name, entry in zip("ab", ENTRIES[1:], strict=True):
        part(tmp_path / name, [ENTRIES[0], entry])
    assert len(runner.join([tmp_path / "a", tmp_path / "b"])[1]) == 90
    with pytest.raises(ValueError, match=r"answers full with budget 1\.0 of example t0/0 a second time"):
        runner.join([tmp_path / "a", tmp_path / "a"])


def test_packed_results_are_joined_and_grow(unbroken, tmp_path):
    for name, entry in zip("ab", ENTRIES[:2], strict=True):
        part(tmp_path / name, [entry])
        plain = tmp_path / name / runner.RESULTS
        plain.with_name("results.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    assert len(runner.join([tmp_path / "a", tmp_path / "b"])[1]) == 60
    go(tmp_path / "a")
    assert (tmp_path / "a" / runner.RESULTS).read_bytes() == unbroken
    assert not (tmp_path / "a" / "results.jsonl.gz").exists()
    (tmp_path / "b" / "run.json").unlink()
    with pytest.raises(ValueError, match=r"holds results\.jsonl\.gz without run\.json; choose another folder\."):
        go(tmp_path / "b")


def test_runs_that_do_not_belong_together_are_not_joined(tmp_path):
    part(tmp_path / "a", ENTRIES[:1])
    part(tmp_path / "b", ENTRIES[1:], model="another")
    for folders, said in (
        (("a", "b"), "differ in model: 'stub' and 'another'"),
        (("a", "a"), "answers full with budget 1.0 of example t0/0 a second time"),
        (("a", "c"), "c holds no run: run.json and results.jsonl are needed"),
    ):
        with pytest.raises(ValueError, match=said):
            runner.join([tmp_path / name for name in folders])
