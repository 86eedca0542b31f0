"""The plan of the tables of pretrained models names what there is, and pieces go on from the full cache's answers."""

import pytest
import typer

from clusterkv_jax.cli.options import parse_budget, split
from clusterkv_jax.evaluation.tasks.suites import SUITES
from clusterkv_jax.presets import find_preset
from tests.support.scripts import script

study = script("studies/pretrained.py")


def test_the_plan_names_suites_tasks_methods_and_budgets_that_there_are():
    plan = study.read(study.PLAN)
    for each in plan.studies.values():
        suite = SUITES[each.suite]
        assert set(suite.chosen(split([each.tasks]))) <= set(suite.tasks)
        assert all(parse_budget(text) for text in split([each.budgets or plan.budgets]))
        for name in each.methods or plan.methods:
            find_preset(name)
    listed = list(study.pieces(plan))
    assert len({piece.folder(study.Path("all")) for piece in listed}) == len(listed)
    assert {piece.table for piece in listed if piece.method == "full"} == {piece.table for piece in listed}


def test_a_method_begins_with_the_answers_of_the_full_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "CLUSTERKV", ("true",))
    full, other = list(study.pieces(study.read(study.PLAN)))[:2]
    study.start(full, tmp_path, 1).wait()
    for name in ("results.jsonl", "run.json"):
        (full.folder(tmp_path) / name).write_text(name)
    study.start(other, tmp_path, 1).wait()
    assert (other.folder(tmp_path) / "run.json").read_text() == "run.json"
    (other.folder(tmp_path) / "run.json").write_text("more")
    study.start(other, tmp_path, 1).wait()
    assert (other.folder(tmp_path) / "run.json").read_text() == "more"
    assert not other.done(tmp_path)


def test_tables_and_fields_that_are_not_there_are_named(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"No table of .*pretrained.yaml begins with nothing."):
        study.chosen(study.PLAN, ["nothing"])
    (tmp_path / "plan.yaml").write_text("models: {a: b}\nstudies: {c: {tasks: d}}\nmethods: []\nbudgets: '1.0'\n")
    with pytest.raises(ValueError, match=r"plan.yaml, field 'studies.*': Object missing required field suite"):
        study.read(tmp_path / "plan.yaml")
