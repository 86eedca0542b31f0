"""What `Auto` becomes: the choice of a calibration, which plain text decides."""

from dataclasses import replace

import pytest

import clusterkv_jax as ckv
from clusterkv_jax import calibration, presets
from clusterkv_jax.evaluation.choice import with_choice

BUDGET = ckv.Budget(tokens=64)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("orbitkv", ckv.OrbitKV(BUDGET, sinks=2, interval=32)),
        ("kvzap", ckv.KVzap(BUDGET, sinks=2, recent=32, decode_interval=32)),
        (None, ckv.KVzap(BUDGET, sinks=2, recent=32, decode_interval=32)),
    ],
)
def test_auto_becomes_what_the_calibration_chose(choice, expected):
    model = ckv.load("demo")
    model = replace(model, calibration=replace(model.calibration, auto=choice))
    method = presets.completed(model, ckv.Auto(BUDGET, sinks=2, interval=32))
    assert method == presets.completed(model, expected)
    assert method.budget.shares is not None


def test_what_is_asked_of_auto_stays():
    model = ckv.load("demo")
    model = replace(model, calibration=replace(model.calibration, auto="kvzap"))
    assert presets.completed(model, ckv.Auto(BUDGET, recent=20)).recent == 20
    assert presets.completed(model, ckv.Auto(ckv.Budget(tokens=20))).recent == 15
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


def test_the_smaller_loss_of_the_next_tokens_is_chosen():
    model = ckv.load("demo")
    ids = model.tokenizer.encode(ckv.demo_text())[:704]
    chosen = with_choice(model, replace(model.calibration, auto=None), [ids])
    losses = chosen.settings["auto_losses"]
    assert chosen.auto == min(("orbitkv", "kvzap"), key=losses.get)
    assert 0 < losses["full"] < max(losses.values())
    short = with_choice(model, model.calibration, [ids[:200]])
    assert short == model.calibration  # an eighth of it holds no 32 recent rows
