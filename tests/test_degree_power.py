"""The exponent of a row's degree in its weight: 1 is the papers' bias, 0 none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.cache.attention import attend_cache
from clusterkv_jax.cache.layers import StepInputs, dequantised_rows
from clusterkv_jax.methods import driver
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.runtime.sharding import auto_mesh
from tests.support.layers import compress

LENGTHS, HEADS, DIM = np.asarray([96, 40]), 4, 8
QUARTER = ckv.Budget(ratio=0.25)


@functools.cache
def clustered(degree_power, cache_dtype=None):
    """A layer of centroids, what its method remembers, and the method."""
    options = {"sinks": 2, "recent": 4, "degree_power": degree_power, "cache_dtype": cache_dtype}
    method = ckv.CentroidKV(QUARTER, chunk=16, **options)
    rng = np.random.default_rng(0)
    tensors = [jnp.asarray(rng.standard_normal((2, HEADS, LENGTHS.max(), DIM)), jnp.float32) for _ in range(3)]
    request = RequestShape(LENGTHS, 1, HEADS, reserve=8)
    layer, state, _ = compress(method, tensors, LENGTHS, request)
    return method, layer, state


def defined(layer, q, power):
    """softmax(q k / sqrt(D) + power log degree) v in float64, q [B,H,D]."""
    keys, values, degree = (np.asarray(x, np.float64) for x in (layer.keys, layer.values, layer.degree))
    with np.errstate(divide="ignore", invalid="ignore"):
        bias = np.where(degree > 0, power * np.log(degree), -np.inf)
    scores = np.einsum("bhd,bhcd->bhc", np.asarray(q, np.float64), keys) / np.sqrt(DIM) + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhc,bhcd->bhd", weights / weights.sum(-1, keepdims=True), values)


def queries():
    return jnp.asarray(np.random.default_rng(1).standard_normal((2, HEADS, DIM)), jnp.float32)


@pytest.mark.parametrize("power", [0, 0.5, 1])
def test_a_row_of_degree_n_has_the_weight_of_its_power(power):
    _, layer, _ = clustered(power)
    assert float(layer.degree.max()) > 2
    np.testing.assert_allclose(layer.degree.sum(-1), np.repeat(LENGTHS[:, None], HEADS, 1))
    out = np.asarray(ckv.attend(layer, queries(), degree_power=power))
    np.testing.assert_allclose(out, defined(layer, queries(), power), atol=1e-5)
    same = np.array_equal(out, np.asarray(ckv.attend(layer, queries())))
    assert same == (power == 1)  # bit for bit


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_steps_attend_by_the_power_of_their_method(cache_dtype):
    method, layer, state = clustered(0.5, cache_dtype)
    q, token = queries()[:, None], jnp.zeros((2, 1, HEADS, DIM))
    new = StepInputs(q, token, token, jnp.asarray(LENGTHS, jnp.int32)[:, None], jnp.ones((2, 1), bool))
    step = jax.jit(lambda layer, state: driver.step_layer(method, layer, state, new))
    out, longer, _ = step(layer, state)
    out = np.asarray(out)[:, 0]
    rows = longer if cache_dtype is None else dequantised_rows(longer)
    tolerance = 1e-5 if cache_dtype is None else 0.01
    np.testing.assert_allclose(out, defined(rows, queries(), 0.5), atol=tolerance)
    assert np.abs(out - defined(rows, queries(), 1)).max() > 5 * tolerance


def test_devices_that_share_heads_or_slots_find_the_same():
    _, layer, _ = clustered(0.5)
    alone, _ = jax.jit(lambda layer, q: attend_cache(layer, q, degree_power=0.5))(layer, queries()[:, None])
    for shape in ((2, 4), (1, 8)):
        with jax.set_mesh(auto_mesh(jax.make_mesh(shape, ("data", "model")))):
            out, _ = jax.jit(lambda layer, q: attend_cache(layer, q, degree_power=0.5))(layer, queries()[:, None])
        np.testing.assert_allclose(out, alone, atol=1e-6)


def test_a_pair_has_one_power():
    half = ckv.OrbitKV(QUARTER, degree_power=0.5)
    assert ckv.Composed(half, ckv.Full()).degree_power == 0.5
    assert "degree_power=0.5" in repr(half)
    assert "degree_power" not in repr(ckv.OrbitKV(QUARTER))  # saved caches of the papers' bias are still found
    with pytest.raises(ValueError, match="one with the degree_power of prefill"):
        ckv.Composed(half, ckv.GravityKV(QUARTER))
    with pytest.raises(ValueError, match="one with degree_power 1: degrees are fitted"):
        ckv.Matched(half)


@pytest.mark.parametrize("power", [-0.1, 1.5, float("nan")])
def test_powers_outside_0_to_1_are_refused(power):
    with pytest.raises(ValueError, match=r"OrbitKV degree_power must be between 0 and 1, got"):
        ckv.OrbitKV(QUARTER, degree_power=power)
    _, layer, _ = clustered(1)
    with pytest.raises(ValueError, match=r"^degree_power must be between 0 and 1, got"):
        ckv.attend(layer, queries(), degree_power=power)
