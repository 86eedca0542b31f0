"""The demo model answers from a part of its cache, with fitted rows and by its own calibration."""

import clusterkv_jax as ckv

# A fifth of the chapter, with the number in it.
TEXT = ckv.demo_text()[7000:10000]
QUESTION = "What is the special magic number for amber-lantern mentioned in the provided text?"


def test_fitted_rows_still_answer():
    method = ckv.Matched(ckv.CentroidKV(ckv.Budget(ratio=0.25)))
    result = ckv.generate(ckv.load("demo"), [TEXT], questions=[QUESTION], method=method, max_new_tokens=32)
    assert result.texts[0].endswith("4821057.")


def test_the_demo_model_brings_its_own_calibration():
    model = ckv.load("demo")
    assert model.calibration is not None
    assert model.calibration.settings["tokens"] == 4096
    method = ckv.OrbitKV(ckv.Budget(ratio=0.125))
    result = ckv.generate(model, [TEXT], questions=[QUESTION], method=method, max_new_tokens=32)
    assert result.texts[0].strip().endswith("4821057.")
    rows = [heads for layer in result.stats.kept_rows for heads in layer[0]]
    tokens = result.stats.prompt_tokens[0]
    assert len(set(rows)) > 2
    assert 0.12 < sum(rows) / 12 / tokens <= 0.125
