"""The report and the terminal show what was found, whatever it is called and however much it is."""

import io
import time
from dataclasses import replace

import pytest

from clusterkv_jax.cli import evaluate
from clusterkv_jax.cli.terminal import plain_console
from clusterkv_jax.evaluation.report import examples, pictures, report, table
from clusterkv_jax.evaluation.report.table import TableCell, TableRow
from tests.test_evaluation_runner import BARE, CONFIG, go

RUN = {"config": CONFIG, "sessions": [{"command": "a <b> & c"}]}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return go(tmp_path_factory.mktemp("run"))


def test_the_report_shows_everything_and_loads_nothing(lines):
    summary = table.summarize(lines)
    page = report.report(summary, lines, RUN)
    assert page.count("<svg") == 1
    assert "a &lt;b&gt; &amp; c" in page
    for loads in ("<script src", '<link rel="style', "<img", "@import", "url(", 'src="', "http"):
        assert loads not in page
    for row in summary.rows:
        assert table.cell_text(row.average, False) in page
    assert page == report.report(summary, lines, RUN)


def test_the_full_cache_is_dashed_in_the_picture(lines):
    picture = pictures.score_over_share(table.summarize(lines))
    full, *others = picture.lines
    assert (full.name, full.colour, {point.y for point in full.points}) == ("full cache", None, {100.0})
    assert [[point.x for point in line.points] for line in others] == [[0.25, 0.5]]
    assert picture.svg.count('class="full"') == 1


def test_examples_show_the_question_what_was_expected_and_every_answer(lines):
    page = report.report(table.summarize(lines), [line | {"question": "Who <is> it?"} for line in lines], RUN)
    assert "Who &lt;is&gt; it?" in page
    differ = next(each for each in examples.examples(lines) if len({score for *_, score in each.answers}) > 1)
    assert [answer[:2] for answer in differ.answers] == [("full", "100%"), ("centroidkv", "50%"), ("centroidkv", "25%")]
    assert differ.expected in differ.answers[0][2]


def test_names_in_the_report_are_texts(lines):
    hostile = "<script>alert('x')</script>$\\badcmd$"
    named = [line | {"method": hostile if line["method"] != "full" else "full", "task": hostile} for line in lines]
    page = report.report(table.summarize(named), named, {"config": CONFIG | {"model": hostile}, "sessions": []})
    assert page.count("<script>") == 1  # the page's own
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)") >= 4  # title, heading, column, rows


@pytest.mark.parametrize(
    ("methods", "budgets", "lengths", "tasks"), [(300, 1, 1, 2), (1, 500, 1, 2), (1, 1, 2000, 1), (1, 1, 1, 3000)]
)
def test_reports_of_many_rows_and_columns_are_quick(methods, budgets, lengths, tasks):
    asked = [("full", "1.0")] + [(f"m{i}", str(8 + j)) for i in range(methods) for j in range(budgets)]
    more = {"metric": "f1", "tokens": 4096, "question": "?", "expected": ["x"], "output": "x"}
    lines = [
        {**BARE, **more, "method": method, "budget": budget, "task": f"t{t}", "id": f"{t}/{n}", "score": 0.5}
        | {"facts": {"length": 1000 + n, "depth": 0.5}}
        for method, budget in asked
        for t in range(tasks)
        for n in range(lengths)
    ]
    begin = time.monotonic()
    page = report.report(table.summarize(lines), lines, RUN)
    assert time.monotonic() - begin < 10
    assert len(page) < 2e6


@pytest.mark.parametrize("tasks", [1, 40])
def test_the_terminals_table_breaks_no_words(tasks, monkeypatch):
    line = {**BARE, "metric": "f1", "score": 1.0, "facts": {}}
    names = [f"niah_multikey_{i}" for i in range(tasks)]
    summary = table.summarize([{**line, "method": "gravitykv-gentle", "task": name} for name in names])
    paper = TableRow("centroidkv", "0.25", {}, TableCell(50.0), "CentroidKV, Table 2, Llama-3.1-8B-Instruct")
    console = plain_console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr(evaluate, "plain_console", lambda: console)
    evaluate._show(replace(summary, rows=(*summary.rows, paper)), "results")
    printed = console.file.getvalue()
    assert {"gravitykv-gentle", "Llama-3.1-8B-Instruct", "average", "100.0"} <= set(printed.split())
    assert ("niah_multikey_0" in printed.split()) == (tasks == 1)
    assert (f"The scores of {tasks} tasks are in table.md and report.html." in printed) == (tasks > 1)


def test_rows_that_differ_in_their_examples_or_versions_are_named(lines):
    sessions = [{"versions": {"jax": version}, "answers": n} for version, n in (("1.0", 3), ("1.1", 4), ("1.2", 0))]
    summary = table.summarize(lines[1:], sessions)
    assert "Not all examples are answered by full; averages are of what is." in table.notes(summary)
    assert "Answers are of different versions: jax 1.0 and 1.1." in table.markdown(summary)
    assert table.summarize(lines, sessions[:1]).remarks == ()


def test_needles_stand_at_the_nearest_tenth_of_the_depth():
    depths = [i / 10 for i in range(11)]
    lines = [
        {**BARE, "score": float(i == 10), "facts": {"length": 64, "depth": depth}} for i, depth in enumerate(depths)
    ]
    found = pictures.needles(lines)
    assert found.tenths == tuple(range(11))
    assert found.rows == (("full", "100%", 64, (0.0,) * 10 + (100.0,)),)
    assert pictures.needles(lines[4:5]).tenths == (4,)
