"""Fitted rows of every method that may have them; and of the demo model, whose answer stays."""

from pathlib import Path

import numpy as np

import clusterkv_jax as ckv
from tests.support.methods import every_method
from tests.test_matched import QUARTER, pair, tensors

DEMO_TEXT = Path(__file__).parents[2] / "configs" / "demo" / "mast_head.txt"


def test_the_demo_model_still_answers():
    text = DEMO_TEXT.read_text(encoding="utf-8")
    question = "What is the special magic number for amber-lantern mentioned in the provided text?"
    method = ckv.Matched(ckv.CentroidKV(QUARTER))
    result = ckv.generate(ckv.load("demo"), [text], questions=[question], method=method, max_new_tokens=32)
    assert result.texts[0].endswith("4821057.")


def test_every_method_that_holds_rows_of_its_heads_can_be_fitted():
    kinds = {type(m) for m in every_method(QUARTER) if m.holds in ("tokens", "centroids") and not hasattr(m, "prefill")}
    assert len(kinds) > 8
    q, k, v = tensors(0)
    for method in every_method(QUARTER):
        if type(method) in kinds and method.holds != "pages":
            before, after = pair(method, q, k, v, num_layers=2, scores=v[..., 0])
            np.testing.assert_array_equal(after.positions, before.positions)
