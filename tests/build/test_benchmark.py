"""`clusterkv benchmark`: the order of timings, what follows from them, and runs that go on where they were killed."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from clusterkv_jax import cli
from clusterkv_jax.benchmark import records, runners, serving, summary, table
from clusterkv_jax.benchmark import run as runs
from clusterkv_jax.benchmark.grid import OURS, Cell, GridRequest, cells, parse_tokens, turns
from clusterkv_jax.benchmark.own_runner import clustering_seconds
from clusterkv_jax.benchmark.worker import answer, opened
from clusterkv_jax.cli.benchmark import the_question
from tests.support.byte_model import byte_folder

ENTRIES = (("full", None), ("centroidkv", 0.25), ("snapkv", 64))
ASKED = GridRequest("demo", ENTRIES, (512, 256), (1, 2), (), 2, 8, None)
HELLO = {"device": "1 x abacus", "platform": "cpu", "versions": {"beads": "3"}}
FULL, CENTROID, SNAP = (Cell(OURS, *entry, 256, 1) for entry in ENTRIES)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model whose tokens are bytes."""
    return byte_folder(tmp_path_factory.mktemp("tiny"))


def abacus(timings, most=10**6, hello=HELLO):
    """How a side runs that answers from a table of its own, and is killed after `most` timings."""

    def measure(cell, repeat):
        if len(timings) == most:
            raise KeyboardInterrupt
        timings.append((cell, repeat))
        if cell.method == "snapkv":
            return {"failed": "No beads are left."}
        once = {"compile_s": 3.0, "cache_bytes": 10, "read_bytes": 100, "peak_bytes": None, "clustering_s": 0.5}
        return {"ttft_s": 1.0 + repeat, "tpot_s": 2.0, **({"bandwidth": 100.0} if repeat else once)}

    @contextmanager
    def running(name, asked):
        yield runners.Runner({**hello, "versions": dict(hello["versions"])}, measure)

    return running


def benchmark(*arguments):
    return CliRunner().invoke(cli.app, ["benchmark", *map(str, arguments)])


# --- what is asked, and in which order ---


def test_cells_take_turns_and_the_smaller_caches_come_first():
    groups = cells(ASKED, [OURS])
    assert [(group[0].length, group[0].batch) for group in groups] == [(256, 1), (512, 1), (256, 2), (512, 2)]
    assert groups[0] == [CENTROID, SNAP, FULL]
    order = turns(groups[:1], 2, done=())
    assert order == [(cell, n) for n in range(3) for cell in (CENTROID, SNAP, FULL)]


def test_peers_stand_in_the_same_turns():
    asked = replace(ASKED, lengths=(256,), batches=(1,))
    (group,) = cells(asked, [OURS, "transformers", "kvpress"])
    assert [(cell.side, cell.method, cell.budget) for cell in group if cell.side != OURS] == [
        ("kvpress", "SnapKV", 0.25),
        ("kvpress", "SnapKV", 64),
        ("transformers", "full", None),
    ]


def test_each_type_of_stored_rows_is_a_cell_of_this_library_alone():
    asked = replace(ASKED, entries=ENTRIES[:1], lengths=(256,), batches=(1,), cache_dtypes=(None, "int8"))
    (group,) = cells(asked, [OURS, "transformers"])
    assert group == [replace(FULL, cache_dtype="int8"), FULL, Cell("transformers", "full", None, 256, 1)]
    assert table.name(group[0]) == "full, all kept in int8, 1 x 256 tokens"


def test_what_is_done_is_left_out_and_its_cell_compiled_again():
    done = {(CENTROID, 0), (CENTROID, 1), (FULL, 0), (FULL, 1), (FULL, 2)}
    assert turns([[CENTROID, FULL]], 2, done) == [(CENTROID, 0), (CENTROID, 2)]


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("16k", 16384), ("1K", 1024)])
def test_lengths_are_tokens_or_thousands_of_them(text, tokens):
    assert parse_tokens(text) == tokens


# --- what is derived ---


def test_the_floor_is_weights_and_cache_read_once():
    facts = {"cell": vars(FULL), "repeat": 0, "read_bytes": 600, "peak_bytes": 7, "earlier_peak_bytes": 7}
    timing = {"ttft_s": 1.0, "tpot_s": 4.0, "bandwidth": 100.0}
    times = [{"cell": vars(FULL), "repeat": n, **{name: n * x for name, x in timing.items()}} for n in (1, 2, 3)]
    (row,) = summary.rows([CENTROID, FULL], [{**facts, "clustering_s": 0.8}, *times])
    assert row.floor_s == 600 / 200
    assert row.over_floor == 8 / 3
    assert row.clustering == 0.1
    assert row.ttft == summary.Spread(2, 1, 3)
    assert not row.peak_is_own
    assert table.cells_of(row)[table.HEAD.index("peak GiB")] == "≤ 0.0"


def test_prompts_of_a_batch_are_read_one_after_the_other():
    times = summary.Spread(0.5, 0.4, 0.6)
    row = summary.SummaryRow(replace(FULL, batch=4), ttft=summary.Spread(10, 9, 11), tpot=times)
    assert row.tokens_per_s == 8
    assert row.end_to_end_s == 4 * 10 + 999 * 0.5
    assert summary.as_json(row)["end_to_end_s"] == row.end_to_end_s


def test_clustering_is_what_its_steps_take_longer():
    rows, times = [10, 11, 12, 9, 10, 11, 12, 9], [1.0, 1.0, 1.2, 5.0, 1.0, 1.0, 0.9, 3.0]
    assert clustering_seconds(times, rows) == pytest.approx((4.0 + 2.0) / 8)
    assert clustering_seconds(times[:3], rows[:3]) is None


# --- a run that goes on ---


def test_a_killed_run_goes_on(tmp_path):
    timings, asked = [], replace(ASKED, entries=ENTRIES[:2], lengths=(256,), batches=(1,))
    with pytest.raises(KeyboardInterrupt):
        runs.run(asked, tmp_path / "out", lambda step: None, abacus(timings, most=3))
    with (tmp_path / "out" / records.RESULTS).open("a") as file:
        file.write('{"cell": ')  # half a line, as a kill may leave
    steps = []
    results = runs.run(asked, tmp_path / "out", steps.append, abacus(timings))
    assert timings[3:] == [(CENTROID, 0), (FULL, 0), (FULL, 1), (CENTROID, 2), (FULL, 2)]
    assert [(step.number, step.total) for step in steps] == [(n, 5) for n in range(1, 6)]
    assert [(row.repeats, row.ttft.median) for row in results.rows] == [(2, 2.5), (2, 2.5)]
    assert len(records.read(tmp_path / "out")) == 6
    assert len(results.about["sessions"]) == 2
    again = runs.run(asked, tmp_path / "out", steps.append, lambda *_: pytest.fail("nothing is left to be timed"))
    assert again.rows == results.rows


def test_a_cell_that_fails_is_told_and_not_tried_again(tmp_path):
    timings, asked = [], replace(ASKED, lengths=(256,), batches=(1,))
    for _ in range(2):
        results = runs.run(asked, tmp_path / "out", lambda step: None, abacus(timings))
    assert timings.count((SNAP, 0)) == 1
    assert len(timings) == 7
    text = table.markdown(results.rows, results.about)
    assert "snapkv, 64 rows kept, 1 x 256 tokens: No beads are left." in text
    assert "| 256 | 1 | centroidkv | 25 % | 2.500 (2.000 to 3.000) |" in text
    assert "not measured" in text
    assert "demo on 1 x abacus; beads 3. It reads 0.0 GB/s. Median of 2 (least to most)." in text
    many = results.about | {"versions": {f"package{i}": "1.2.3" for i in range(12)}}
    lines = table.footnote(results.rows, many).splitlines()
    assert max(map(len, lines)) <= 120 < len(" ".join(lines))


def test_another_question_or_device_is_refused(tmp_path):
    asked = replace(ASKED, lengths=(256,), batches=(1,))
    runs.run(asked, tmp_path / "out", lambda step: None, abacus([]))
    with pytest.raises(ValueError, match=r"out holds a benchmark with lengths 256, this one asks for 512; choose"):
        runs.run(replace(asked, lengths=(512,)), tmp_path / "out", lambda step: None, abacus([]))
    (tmp_path / "out" / records.RESULTS).unlink()
    other = abacus([], hello={**HELLO, "device": "2 x abacus"})
    with pytest.raises(ValueError, match=r"out holds timings of 1 x abacus, this is 2 x abacus; choose another"):
        runs.run(asked, tmp_path / "out", lambda step: None, other)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(ValueError, match="other is not empty and holds no benchmark"):
        runs.run(asked, tmp_path / "other", lambda step: None, abacus([]))


def test_a_peer_that_cannot_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(runners.PEERS, "transformers", ("no_such_package",))
    asked = replace(ASKED, lengths=(256,), batches=(1,), peers=("transformers",))
    results = runs.run(asked, None, lambda step: None, abacus([]))
    assert results.notes == ["transformers is left out: the package 'no_such_package' is not installed."]
    assert {row.cell.side for row in results.rows} == {OURS}


def test_a_page_gets_its_table(tmp_path):
    page = tmp_path / "speed.md"
    text = "Before.\n\n<!-- benchmark h200 -->\n{}<!-- end -->\n\n<!-- benchmark tpu -->\nold\n<!-- end -->\n"
    page.write_text(text.format("old\n"))
    table.put_into(page, "h200", "| new |")
    assert page.read_text() == text.format("\n| new |\n\n")
    with pytest.raises(ValueError, match="has no lines <!-- benchmark cpu --> and <!-- end -->"):
        table.put_into(page, "cpu", "| new |")


# --- what is really timed ---


def test_a_cpu_without_room_for_the_weights_says_so():
    hello, measure = opened(OURS, GridRequest("llama-3.1-70b", (), (64,), (1,), (), 1, 2, None))
    assert measure is None
    assert re.match(r"llama-3.1-70b has 263 GiB of weights in float32, more than the \d+ GiB of", hello["failed"])


def test_a_request_is_timed(model):
    asked = GridRequest(str(model), (), (64,), (2,), (), 1, 140, None)
    hello, measure = opened(OURS, asked)
    assert hello["platform"] == "cpu"
    cell = Cell(OURS, "streamingllm", 32, 64, 2, "int8")
    first, second = (answer(measure, cell, repeat) for repeat in (0, 1))
    assert first["ttft_s"] > 0 < second["tpot_s"]
    assert second["bandwidth"] > 1e6
    assert first["read_bytes"] > first["cache_bytes"] > 0
    assert answer(measure, replace(cell, length=10**6), 0)["failed"].endswith("positions.")
    assert "Unknown method" in answer(measure, replace(cell, method="no"), 0)["failed"]


def test_requests_that_come_and_go_are_timed(model, monkeypatch):
    monkeypatch.setattr(serving, "QUESTIONS", 4)
    asked = GridRequest(str(model), (("streamingllm", 32),), (40, 100), (2,), (), 1, 20, None, requests=6)
    ((cell,),) = cells(asked, [OURS])
    assert cell == Cell(OURS, "streamingllm", 32, 100, 2)
    work = serving.requests(asked, 100)
    assert [request.at for request in work] == sorted(request.at for request in work)
    assert all(40 <= len(request.prompt) <= 100 and 16 <= request.new_tokens <= 20 for request in work)
    assert work == serving.requests(asked, 100)
    _, measure = opened(OURS, asked)
    lines = [{"cell": vars(cell), "repeat": n, **answer(measure, cell, n)} for n in (0, 1)]
    (row,) = summary.rows([cell], lines)
    assert row.failed is None
    assert row.programs == 0 < row.of_ideal.median
    assert row.tokens_per_s == lines[1]["served_tokens_per_s"] > 0 < row.occupancy.median <= 1
    assert 0 < row.question_gain.median <= 4
    text = table.markdown([row], {"model": "m", "device": "d", "versions": {}, "bandwidth": None})
    assert "of full batches | slots in use | compiled later | questions × |" in text


def test_the_command_prints_one_object(model, tmp_path):
    small = ("--model", model, "--lengths", 64, "--repeats", 1, "--new-tokens", 2, "--peers", "")
    asked = (*small, "--methods", "full", "--output", tmp_path / "out")
    said = benchmark(*asked, "--json")
    assert said.exit_code == 0, said.stderr
    (row,) = json.loads(said.stdout)["rows"]
    assert row["cell"] == vars(Cell(OURS, "full", None, 64, 1))
    assert row["tpot"]["median"] > 0 < row["over_floor"]
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files >= {"run.json", "results.jsonl", "results.json", "table.md", "ttft-batch-1.svg"}
    assert (tmp_path / "out" / "tpot-batch-1.svg").read_text().startswith("<svg")
    again = benchmark(*asked)
    assert again.stdout == (tmp_path / "out" / "table.md").read_text()
    assert "Error" not in again.stderr


def test_a_preset_file_that_changed_is_another_benchmark(model, tmp_path):
    mine = tmp_path / "mine.yaml"
    text = "method: GravityKV\ndescription: mine\nsource: here\nsettings: {merge_ratio: %s}\n"

    def run():
        asked = the_question(str(model), [str(mine)], None, "64", "1", "", 1, 2, None, ("model",))
        return runs.run(asked, tmp_path / "out", lambda step: None, abacus([]))

    mine.write_text(text % 0.3)
    assert len(run().rows) == len(run().rows) == 1
    mine.write_text(text % 0.5)
    with pytest.raises(ValueError, match=r"merge_ratio=0\.3, .* this one asks for .*merge_ratio=0\.5, "):
        run()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--lengths", "4q"), "--lengths takes numbers of tokens such as 4096 or 16k up to 16384k, got '4q'."),
        (("--lengths", "64,64"), "--lengths takes one or more different numbers, got '64,64'."),
        (("--lengths", "100k"), "--lengths 102400 and 289 new tokens exceed the model's"),
        (("--batches", "0"), "--batches takes whole numbers from 1 to 99999, got '0'."),
        (("--peers", "vllm"), "--peers takes each of transformers, transformers-static, kvpress once, got vllm."),
        (("--cache-dtype", "int9"), "--cache-dtype takes each of model, int8, float8_e4m3, int4 once, got int9."),
        (("--cache-dtype", ""), "--cache-dtype takes one or more of model, int8, float8_e4m3, int4, got none."),
        (("--methods", "clusterkv", "--cache-dtype", "int8"), "rows that are recalled one by one are not quantised"),
        (("--methods", "best"), "Unknown method or preset 'best'"),
        (("--methods", "full", "--budgets", "0.5"), "--budgets 0.5 needs a method that takes a budget; full keeps"),
        (("--mesh", "model=two"), "A mesh is such as data=2,model=4"),
        (("--markdown", "speed.md"), "--markdown speed.md needs --output"),
    ],
)
def test_mistakes_are_one_sentence(model, options, sentence):
    said = benchmark("--model", model, *options)
    assert said.exit_code == 2
    assert sentence in " ".join(said.stderr.split())
    assert said.stdout == ""
