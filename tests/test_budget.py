"""Budgets: in rows and bytes, spread over layers and heads; memory really saved."""

import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.budget import MOST_ROWS, rows_for, share_table
from clusterkv_jax.cache.layers import groups
from clusterkv_jax.methods.plan import plan_layer
from clusterkv_jax.methods.request import RequestShape
from tests.support.methods import SHAPE, LargeValues


def test_rows_are_those_of_exact_arithmetic():
    lengths = np.asarray([10, 29, 100])
    assert rows_for(ckv.Budget(ratio=0.1), lengths, 0).tolist() == [1, 2, 10]
    assert rows_for(ckv.Budget(ratio=0.29), lengths, 0).tolist() == [int(0.29 * n) for n in (10, 29, 100)]
    assert rows_for(ckv.Budget(ratio=0.5, base="prompt+new"), lengths, 10).tolist() == [10, 19, 55]
    assert rows_for(ckv.Budget(ratio=1.0), lengths, 0).tolist() == [MOST_ROWS] * 3
    assert rows_for(ckv.Budget(bytes=1000), lengths, 0, bytes_per_row=100).tolist() == [10] * 3


def test_bytes_are_those_of_all_layers_and_heads():
    """Two layers, two heads, rows of two f32 vectors of 8 and a degree: 68 bytes."""
    keys = jnp.zeros((1, 2, 50, 8))
    method = ckv.StreamingLLM(ckv.Budget(bytes=4 * 68 * 20 + 4 * 67))
    assert ckv.compress(method, None, keys, keys, num_layers=2).length.tolist() == [[20, 20]]


def table(shares, **budget):
    return share_table(ckv.Budget(shares=shares, **(budget or {"tokens": 100})), 2, 2)


def test_no_head_has_more_than_the_whole():
    """What the largest shares cannot use goes to the others, so that the mean stays."""
    cut = table(((8.0, 4.0), (2.0, 2.0)), ratio=0.5)
    np.testing.assert_allclose(cut, [[2.0, 1.0], [0.5, 0.5]])
    np.testing.assert_allclose(table(((8.0, 4.0), (2.0, 1.0)), ratio=0.7).mean(), 1.0)
    whole = ckv.Budget(ratio=0.7, shares=((9.0, 9.0), (1.0, 1.0)))
    lengths = np.arange(1, 3000)
    rows = [[rows_for(whole, lengths, 0, layer=i, head=j, num_layers=2, num_heads=2) for j in (0, 1)] for i in (0, 1)]
    assert (np.asarray(rows[0]) == lengths).all()
    unused = 4 * rows_for(ckv.Budget(ratio=0.7), lengths, 0) - np.sum(rows, axis=(0, 1))
    assert set(np.unique(unused)) <= {0, 1}


def test_shares_are_relative_to_their_mean():
    np.testing.assert_allclose(table((1.0, 3.0)), [[0.5, 0.5], [1.5, 1.5]])
    np.testing.assert_allclose(table(((1.0, 3.0), (2.0, 2.0))), [[0.5, 1.5], [1.0, 1.0]])
    np.testing.assert_allclose(share_table(ckv.Budget(tokens=9, shares="pyramid"), 3, 1)[:, 0], [1.95, 1.0, 0.05])
    tenths = ckv.Budget(tokens=100, shares=(0.1, 0.2, 0.3))
    assert [int(rows_for(tenths, 1, 0, layer=i, num_layers=3)) for i in range(3)] == [50, 100, 150]
    with pytest.raises(ValueError, match="2 numbers, one per layer, or 2 tuples of 2"):
        table((1.0, 2.0, 3.0))


@pytest.mark.parametrize("method", [ckv.SnapKV, ckv.CentroidKV, LargeValues], ids=["evicts", "merges", "page"])
def test_heads_with_smaller_shares_take_less_memory(method):
    rng = np.random.default_rng(0)
    queries, keys, values = (jnp.asarray(rng.normal(size=(1, h, 96, 8)), jnp.float32) for h in (4, 2, 2))
    sizes = {ckv.SnapKV: {"window": 4}, ckv.CentroidKV: SHAPE}.get(method, {})
    uneven = method(ckv.Budget(ratio=0.25, shares=((1.0, 2.0), (1.5, 1.5))), **sizes)
    layer = ckv.compress(uneven, queries, keys, values, layer=0, num_layers=2)
    assert layer.heads == ((1,), (0,))
    assert [group.capacity for group in groups(layer)] == [32, 16]
    assert [group.length.tolist() for group in groups(layer)] == [[[32]], [[16]]]
    even = ckv.compress(uneven, queries, keys, values, layer=1, num_layers=2)
    assert isinstance(even, ckv.LayerCache)
    assert even.capacity == 24
    # The larger head keeps what it would keep with that budget of its own.
    plan = plan_layer(uneven, 0, RequestShape(np.asarray([96]), 2, 2))
    assert plan.capacities == (32, 16)
    alone = ckv.compress(method(ckv.Budget(tokens=32), **sizes), queries[:, 2:], keys[:, 1:], values[:, 1:])
    np.testing.assert_array_equal(groups(layer)[0].positions, alone.positions)
