"""Fitted rows of every method that may have them."""

import numpy as np

from tests.learned.test_matched import QUARTER, pair, tensors
from tests.support.methods import every_method


def test_every_method_that_holds_rows_of_its_heads_can_be_fitted():
    kinds = {
        type(m) for m in every_method(QUARTER) if m.storage in ("tokens", "centroids") and not hasattr(m, "prefill")
    }
    assert len(kinds) > 8
    q, k, v = tensors(0)
    for method in every_method(QUARTER):
        if type(method) in kinds and method.storage != "pages":
            before, after = pair(method, q, k, v, num_layers=2, scores=v[..., 0])
            np.testing.assert_array_equal(after.positions, before.positions)
