"""Scores of outputs are those of the benchmarks' own scorers."""

import json
import sys

import pytest

from clusterkv_jax.evaluation import scoring
from clusterkv_jax.evaluation.tasks.longbench import TASKS
from tests.support.shared_data import shared

CASES = 15


@pytest.fixture(scope="module")
def official():
    return json.loads(shared("golden/metrics_longbench_ruler.json").read_text(encoding="utf-8"))


def scores_of(official, task):
    case = official[task]
    return [
        scoring.score(TASKS[task].metric, output, answers, case["all_classes"] or ())
        for output, answers in zip(case["pred"], case["answers"], strict=True)
    ]


def longbench(official):
    return [name for name in official if name != "ruler"]


def test_every_official_score_is_equal(official):
    assert len(longbench(official)) == CASES
    for task in longbench(official):
        pytest.importorskip("rouge")
        pytest.importorskip("jieba")
        scores = scores_of(official, task)
        assert scores == pytest.approx(official[task]["per_item"], rel=1e-12), task
        assert round(100 * sum(scores) / len(scores), 2) == official[task]["official"] == official[task]["kvpress"], (
            task
        )


def test_ruler_matches_are_equal(official):
    case = official["ruler"]
    for name in ("string_match_all", "string_match_part"):
        scores = [scoring.score(name, *pair) for pair in zip(case["pred"], case["refs"], strict=True)]
        assert round(100 * sum(scores) / len(scores), 2) == case[name]


@pytest.mark.parametrize(
    ("metric", "output", "answers", "classes", "value"),
    [
        ("f1", "The red fox", ["a red fox", "x"], (), 1.0),
        ("f1", "red red fox", ["red fox"], (), 0.8),
        ("f1", "", ["fox"], (), 0.0),
        ("f1_first_line", "\nfox\nwolf", ["fox"], (), 1.0),
        ("classification", "Number of something", ["Number of something"], ("Number", "Number of something"), 1.0),
        ("classification", "a b", ["a"], ("a", "b"), 0.5),
        # "a" is struck out and so "ab" is not looked at: the official scorer's list shrinks while it is walked.
        ("classification", "abc", ["abc"], ("a", "ab", "abc"), 0.5),
        ("number_share", "12 or 7", ["Paragraph 12"], (), 0.5),
        ("code_similarity", "# note\nreturn x", ["return x"], (), 1.0),
        ("code_similarity", "```\n", ["return x"], (), 0.0),
        # difflib's blocks, not an edit distance: "ab" of "abcd" and "cdab" (2 * 2 / 8).
        ("code_similarity", "abcd", ["cdab"], (), 0.5),
        ("string_match_all", " Blue\x07 4821 ", ["4821", "blue", "red", "green"], (), 0.5),
        ("string_match_part", "it is BLUE", ["red", "blue"], (), 1.0),
        ("final_number", "So 2 + 3 = 5. The answer is 1,005.\n\nQ: 7", ["1005"], (), 1.0),
        ("final_number", "The answer is $18.00", ["18"], (), 1.0),
        ("final_number", "it costs 18 dollars, or 20", ["18"], (), 0.0),
        ("final_number", "none", ["18"], (), 0.0),
    ],
)
def test_scores_by_hand(metric, output, answers, classes, value):
    assert scoring.score(metric, output, answers, classes) == pytest.approx(value)


def test_mistakes_are_named(monkeypatch):
    with pytest.raises(ValueError, match="'bleu' is unknown; allowed: f1, "):
        scoring.score("bleu", "x", ["x"])
    with pytest.raises(ValueError, match="without any right answer"):
        scoring.score("f1", "x", [])
    scoring._rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(ValueError, match=r"needs the package 'rouge': pip install 'clusterkv-jax\[eval\]'"):
        scoring.score("rouge_l", "x", ["x"])
