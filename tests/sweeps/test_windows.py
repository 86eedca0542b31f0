"""Sliding layers beside every method: no method touches them, and budgets count the other layers."""

import pytest

import clusterkv_jax as ckv
from tests.caches.test_windows import check_method
from tests.support.methods import every_method, fitted_method, named
from tests.support.tiny import sliding

ROWS = ckv.Budget(tokens=16)
EVERY = [
    *every_method(ROWS),
    fitted_method(ROWS),
    ckv.Compactor(ROWS, sinks=2, recent=2, chunk=16),
    ckv.KVzip(ROWS, chunk=16, instruction=((3, 5), (7, 1, 4), (2,))),
    ckv.Quest(ROWS, page=4, min_pages=2, dense_layers=0),
    ckv.ClusterKV(ROWS, sinks=2, tokens_per_cluster=4, interval=4, interval_clusters=2, dense_layers=0),
    ckv.InfiniGen(ROWS, partial_ratio=0.5, dense_layers=0),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("method", EVERY, ids=named)
def test_every_method_leaves_windows_alone(method, soft_cap):
    check_method(sliding(soft_cap=soft_cap), method)
