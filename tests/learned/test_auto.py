"""What `Auto` becomes: the choice of a calibration, which plain text decides."""

from dataclasses import replace

import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import calibration, observation, presets
from clusterkv_jax.auto_choice import AutoAt
from clusterkv_jax.evaluation.choice import best, with_choice
from tests.support.byte_model import byte_model

BUDGET = ckv.Budget(tokens=64)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("orbitkv", ckv.OrbitKV(BUDGET, sinks=2, interval=32)),
        ("kvzap", ckv.KVzap(BUDGET, sinks=2, recent_share=1 / 16, decode_interval=32)),
        (None, ckv.KVzap(BUDGET, sinks=2, recent_share=1 / 16, decode_interval=32)),
    ],
)
def test_auto_becomes_what_the_calibration_chose(choice, expected):
    model = ckv.load("demo")
    model = replace(model, calibration=replace(model.calibration, auto=choice))
    method = presets.completed(model, ckv.Auto(BUDGET, sinks=2, interval=32))
    assert method == presets.completed(model, expected)
    assert method.budget.shares is not None


@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.125, 0.0625, 0.03125])
def test_auto_of_the_demo_model_is_what_its_tables_say(ratio):
    """OrbitKV with the papers' exponent at every budget, so that no figure of theirs moves with what others choose."""
    model, budget = ckv.load("demo"), ckv.Budget(ratio=ratio)
    method = presets.completed(model, ckv.Auto(budget))
    assert method == presets.completed(model, ckv.OrbitKV(budget))
    assert type(method) is ckv.OrbitKV


def test_what_is_asked_of_auto_stays():
    model = ckv.load("demo")
    model = replace(model, calibration=replace(model.calibration, auto="kvzap"))
    exact = presets.completed(model, ckv.Auto(BUDGET, recent=20))
    assert (exact.recent, exact.recent_share) == (20, 0)
    whole = presets.completed(model, ckv.Composed(ckv.Auto(BUDGET), ckv.Full()))
    assert type(whole.prefill) is ckv.KVzap


def test_a_choice_is_written_and_read(tmp_path):
    measured = ckv.load("demo").calibration
    for choice in ("kvzap", None):
        calibration.write(tmp_path / "mine.safetensors", replace(measured, auto=choice))
        assert calibration.read(tmp_path / "mine.safetensors").auto == choice
    text = calibration.to_yaml(replace(measured, auto="kvzap")).replace("auto: kvzap", "auto: magic")
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.yaml, field 'auto': .*'magic'"):
        calibration.read(tmp_path / "mine.yaml")


def test_a_budget_takes_the_choice_of_the_nearest_share(tmp_path):
    losses = {"orbitkv-half": 0.1, "kvzap": 0.2, "orbitkv": 0.3}
    choices = tuple(
        AutoAt(ratio, choice, losses, losses)
        for ratio, choice in [(0.5, "orbitkv"), (0.25, "orbitkv-half"), (0.125, "kvzap")]
    )
    model = ckv.load("demo")
    model = replace(model, calibration=replace(model.calibration, auto=choices))
    ratios = (0.9, 0.3, 0.18, 0.17, 0.1)
    taken = {ratio: presets.completed(model, ckv.Auto(ckv.Budget(ratio=ratio))) for ratio in ratios}
    assert [type(method) for method in taken.values()] == [ckv.OrbitKV] * 3 + [ckv.KVzap] * 2
    assert [taken[ratio].degree_power for ratio in (0.9, 0.3, 0.18)] == [1.0, 0.5, 0.5]
    assert [taken[ratio].recent for ratio in (0.9, 0.3, 0.1)] == [8, 32, 8]
    assert taken[0.1].recent_share == 1 / 16
    calibration.write(tmp_path / "mine.safetensors", model.calibration)
    assert calibration.read(tmp_path / "mine.safetensors").auto == choices
    with pytest.raises(ValueError, match="bytes"):
        presets.completed(model, ckv.Auto(ckv.Budget(bytes=10**6)))


@pytest.mark.parametrize(
    ("kvzap", "expected"),
    [
        ([0.1, 0.2, 0.1, 0.2], "kvzap"),  # better by more than a standard error
        ([0.1, 0.7, 0.1, 0.5], "orbitkv-half"),  # better on the average of pieces that differ
        ([0.9, 0.9, 0.9, 0.9], "orbitkv-half"),
    ],
)
def test_the_smallest_sum_of_losses_is_chosen_unless_chance_explains_it(kvzap, expected):
    still = np.zeros(4)
    losses = {"orbitkv-half": [0.4] * 4, "kvzap": kvzap, "orbitkv": [0.8] * 4}
    assert best({name: np.stack([still, loss]) for name, loss in losses.items()}) == expected


def test_choices_rest_on_losses_of_continuing_and_repeating():
    model = byte_model(layers=1)
    ids = model.tokenizer.encode(ckv.demo_text())
    measured = observation.calibrate(model, [ids[:440]], ratio=0.25)
    calls = []
    chosen = with_choice(model, measured, [ids[:440]], (1 / 4, 1 / 100), progress=lambda *now: calls.append(now))
    assert isinstance(chosen.auto, tuple)
    (at,) = chosen.auto  # a hundredth of it holds no 8 recent rows
    assert at.ratio == 1 / 4
    assert at.choice == min(at.continuing, key=lambda name: at.continuing[name] + at.repeating[name])
    assert len(set(at.continuing.values())) == len(set(at.repeating.values())) == 3
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert with_choice(model, measured, [ids[:200]]) == measured
