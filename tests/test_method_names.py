"""Methods by name: strings in Python, classes in files, entry points, and what "auto" is without a calibration."""

import json
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import cli
from clusterkv_jax.methods import outside
from clusterkv_jax.presets import as_method, find_preset, preset, read_preset
from tests.support.byte_model import byte_folder
from tests.support.tiny import prompt, taught, tiny

HALF = ckv.Budget(ratio=0.5)
OWN = '''
from dataclasses import dataclass
import jax.numpy as jnp
from clusterkv_jax.methods import Eviction, Protected

@dataclass(frozen=True)
class LargeValues(Eviction):
    """Keep the longest values."""

    protected: Protected = Protected(recent=8)

    def score(self, rows):
        return jnp.linalg.norm(rows.cache.values.astype(jnp.float32), axis=-1)

class Other: ...

class Undecorated(LargeValues): ...
'''


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model whose tokens are bytes; nobody has calibrated it."""
    return byte_folder(tmp_path_factory.mktemp("tiny"))


def test_a_name_and_a_ratio_are_the_method_of_both():
    asked = {"max_new_tokens": 3}
    expected = ckv.generate(tiny(), [prompt(1, 40)], method=ckv.Knorm(HALF), **asked)
    by_name = ckv.generate(tiny(), [prompt(1, 40)], method="knorm", ratio=0.5, **asked)
    assert by_name.tokens == expected.tokens
    assert by_name.stats.kept_rows == expected.stats.kept_rows
    by_rows = ckv.generate(tiny(), [prompt(1, 40)], method="knorm", tokens=20, **asked)
    assert by_rows.stats.kept_rows == expected.stats.kept_rows
    engine = ckv.Engine(tiny(), method="knorm", budget=HALF, slots=1, max_tokens=64)
    assert engine.method == ckv.Knorm(HALF)
    keys = jax.random.normal(jax.random.key(0), (1, 2, 30, 8))
    layer = ckv.compress("knorm", None, keys, keys, ratio=0.5)
    np.testing.assert_array_equal(layer.positions, ckv.compress(ckv.Knorm(HALF), None, keys, keys).positions)


def test_one_text_and_one_question_need_no_lists(model):
    loaded = ckv.load(str(model))
    one = ckv.generate(loaded, "a text of a few words", question="and?", max_new_tokens=2)
    many = ckv.generate(loaded, ["a text of a few words"] * 2, question="and?", max_new_tokens=2)
    listed = ckv.generate(loaded, ["a text of a few words"], questions=["and?"], max_new_tokens=2)
    assert one.texts == listed.texts
    assert many.texts == listed.texts * 2
    with pytest.raises(ValueError, match="Give question or questions, not both"):
        ckv.generate(loaded, "a text", question="and?", questions=["and?"])


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"method": "snapvk", "ratio": 0.5}, r"Unknown method or preset 'snapvk'; .* \(did you mean 'snapkv'\?\)"),
        ({"method": "SnapKV", "ratio": 0.5}, r"did you mean 'snapkv'\?"),
        ({"method": "snapkv"}, "needs a budget"),
        ({"method": "snapkv", "ratio": 0.5, "tokens": 3}, "Give one of budget, ratio and tokens, got ratio and tokens"),
        ({"method": "snapkv", "budget": 3}, r"budget must be an object such as Budget\(ratio=0.25\), got 3"),
        ({"method": ckv.Full(), "ratio": 0.5}, r"ratio goes with a method's name such as 'snapkv', got Full\(\)"),
        ({"method": None, "tokens": 5}, "tokens goes with a method's name"),
    ],
)
def test_mistakes_in_names_are_told(asked, said):
    with pytest.raises(ValueError, match=said):
        as_method(**asked)


def test_auto_without_a_calibration_is_the_best_that_needs_none():
    with pytest.warns(UserWarning, match="tiny has no calibration, so auto takes compactor, .*calibrate tiny"):
        without = ckv.generate(tiny(), [prompt(1, 40)], method="auto", ratio=0.5, max_new_tokens=2)
    expected = ckv.generate(tiny(), [prompt(1, 40)], method=ckv.Compactor(HALF), max_new_tokens=2)
    assert without.tokens == expected.tokens
    assert ckv.Engine(taught(), method="auto", ratio=0.5, slots=1, max_tokens=64).method == ckv.Auto(HALF)
    keys = jax.random.normal(jax.random.key(0), (1, 2, 40, 8))
    scored = ckv.compress("auto", None, keys, keys, scores=keys[..., 0], ratio=0.5)
    assert scored.degree.sum() == 2 * 40  # merged, not dropped


def test_a_class_in_a_file(own):
    method = preset(f"{own}:LargeValues", HALF)
    assert method == preset(f"{own}:LargeValues", HALF)  # one class, and so one program
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 40, 8)), jnp.float32)
    assert ckv.compress(f"{own}:LargeValues", None, keys, keys, ratio=0.5).length.tolist() == [[20, 20]]
    first = outside.origin(method)
    own.write_text(OWN.replace("recent=8", "recent=4"))
    changed = preset(f"{own}:LargeValues", HALF)
    assert changed != method
    assert first is not None
    assert outside.origin(changed) not in (None, first)
    (own.parent / "mine.yaml").write_text("method: own.py:LargeValues\ndescription: mine\nsource: mine\n")
    assert read_preset(own.parent / "mine.yaml").method is type(changed)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.py:X", "There is no file .*nowhere.py, where --method .* looks for a class"),
        ("own.py:Nope", "must be a class derived from clusterkv_jax.methods.Method"),
        ("own.py:Other", "must be a class derived from clusterkv_jax.methods.Method"),
        ("own.py:Undecorated", "must be decorated with @dataclass"),
        ("broken.py:X", "broken.py fails when it is imported: SyntaxError"),
    ],
)
def test_mistakes_in_files_are_told(own, name, said):
    (own.parent / "broken.py").write_text("class X(")
    with pytest.raises(ValueError, match=said):
        find_preset(f"{own.parent}/{name}")


def test_a_package_brings_methods_by_entry_points(monkeypatch):
    points = [
        EntryPoint("longest", "clusterkv_jax.methods:Knorm", outside.GROUP),
        EntryPoint("missing", "clusterkv_jax.methods:Nope", outside.GROUP),
    ]
    monkeypatch.setattr(outside, "entry_points", lambda group: points if group == outside.GROUP else [])
    assert preset("longest", HALF) == ckv.Knorm(HALF)
    listed = run("methods").output.splitlines()[-2:]
    assert [line.split()[:2] for line in listed] == [
        ["longest", "clusterkv_jax.methods:Knorm,"],
        ["missing", "clusterkv_jax.methods:Nope,"],  # listed without being imported
    ]
    with pytest.raises(ValueError, match="Method 'missing' of an installed package fails when it is imported"):
        preset("missing", HALF)
    with pytest.raises(ValueError, match=r"known: .*, longest, missing, .*did you mean 'longest'"):
        preset("longset", HALF)


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize("names", ["", ",", " , "])
def test_no_name_at_all_is_told(names, own):
    result = run("generate", "--model", "nowhere/at-all", "--prompt-file", own, "--method", names)
    assert result.exit_code == 2
    assert "--method must name at least one method" in result.output


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_learned_scores_are_missed_before_weights_are_read(command, model, own, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((model / "config.json").read_text())
    asked = {"generate": ["--prompt-file", own], "evaluate": ["--suite", "ruler", "--output", tmp_path / "out"]}[
        command
    ]
    result = run(command, "--model", bare, *asked, "--methods", "full,kvzap", "--budgets", "0.5")
    assert result.exit_code == 2
    said = result.output.replace("\n", "")
    assert "kvzap keeps rows by learned scores, and" in said
    assert f"clusterkv calibrate {bare}" in said


def test_every_method_is_checked_before_one_answers(model, own, monkeypatch):
    monkeypatch.setattr("clusterkv_jax.generate", lambda *_, **__: pytest.fail("a method has answered"))
    result = run("generate", "--model", model, "--prompt-file", own, "--methods", "full,snapkv", "--budget", "5")
    assert result.exit_code == 2
    assert "a budget of 5 rows, which must be more than window = 32." in result.output


def test_an_own_method_is_evaluated_under_its_name_and_goes_on_as_it_was(model, own, tmp_path):
    asked = ["--suite", "ruler", "--tasks", "vt", "--lengths", "400", "--limit", "1", "--model", model]
    asked += ["--methods", f"{own}:LargeValues,auto", "--budgets", "0.5", "--output", tmp_path / "out"]
    result = run("evaluate", *asked)
    assert result.exit_code == 0, result.output
    assert "has no calibration, so auto takes compactor" in result.output
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == ["full", "LargeValues", "auto"]
    assert [line["rows"] for line in lines[1:]] == [line["tokens"] // 2 for line in lines[1:]]
    methods = json.loads((tmp_path / "out" / "run.json").read_text())["config"]["methods"]
    assert " of own_" in methods["LargeValues@0.5"]
    assert methods["auto@0.5"].startswith("Compactor(")
    own.write_text(OWN.replace("recent=8", "recent=4"))
    changed = run("evaluate", *asked)
    assert changed.exit_code == 2
    assert "holds a run with methods LargeValues@0.5" in changed.output.replace("\n", " ")
