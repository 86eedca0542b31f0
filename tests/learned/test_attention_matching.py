"""Attention Matching as functions: rows chosen and refitted as the authors' code does, and what it may not change."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax import learned
from tests.support.golden_files import golden
from tests.support.learned_model import arrays, close


def answers(queries, keys, values, log_bias=0.0):
    score = queries.astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(keys.shape[1]) + log_bias
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    return weight @ values / weight.sum(axis=1, keepdims=True)


def output_error(file, queries, rows, log_bias, values):
    full = answers(queries, file["keys"], file["values"])
    return np.linalg.norm(answers(queries, file["keys"][rows], values, log_bias) - full) / np.linalg.norm(full)


@pytest.mark.parametrize("case", [0, 2, 4, 6])
def test_rows_match_as_the_authors_do(case):
    file, meta = golden(f"attention_matching_case{case}")
    inputs = arrays(file["queries"], file["keys"], file["values"])
    match = jax.jit(learned.match, static_argnames=("t", "select"))
    fit = [np.asarray(x) for x in match(*inputs, None, meta["t"], select=meta["select"])]
    np.testing.assert_array_equal(fit[0], file["rows"])
    spread = 2e-3  # of cond 3e3 in float32
    assert (fit[1] > np.minimum(file["log_bias_low"], file["log_bias64"]) - spread).all()
    assert (fit[1] < np.maximum(file["log_bias_high"], file["log_bias64"]) + spread).all()
    for queries, reference in (("queries", "reference"), ("queries_unseen", "reference_unseen_queries")):
        assert output_error(file, file[queries], *fit) < 1.005 * meta["error"][reference] + 1e-6
    # Without values that are fitted to them, biases are worse than none.
    plain = file["values"][fit[0]]
    assert output_error(file, file["queries"], fit[0], fit[1], plain) > meta["error"]["chosen_rows_alone"]
    order = np.random.default_rng(0).permutation(meta["t"])
    result = learned.match(*inputs, jnp.asarray(file["rows"][order]), meta["t"], select=meta["select"])
    np.testing.assert_array_equal(result[0], file["rows"][order])
    close(result[1], fit[1][order], 5e-3)


def test_matching_does_not_depend_on_blocks_of_queries():
    file, meta = golden("attention_matching_case0")
    inputs = arrays(file["queries"], file["keys"], file["values"])
    whole = learned.match(*inputs, None, meta["t"])
    with mock.patch("clusterkv_jax.learned.attention_matching.MASS_AT_ONCE", 7 * 61):
        blocks = learned.match(*inputs, None, meta["t"])
    np.testing.assert_array_equal(blocks[0], whole[0])
    close(blocks[1], whole[1], 1e-3)


@pytest.mark.parametrize("select", ["rms", "omp"])
def test_a_row_for_two_equal_ones_weighs_two(select):
    rng = np.random.default_rng(0)
    queries, keys, values = (jnp.asarray(rng.normal(size=(n, 8)), jnp.float32) for n in (64, 10, 10))
    double = [jnp.concatenate([x, x]) for x in (keys, values)]
    rows, log_bias, fitted = learned.match(queries, *double, jnp.arange(10), 10, select=select)
    close(log_bias, np.full(10, np.log(2)), 1e-3)
    close(fitted, values[rows], 1e-3)
    # Of 20 rows only 10 differ: pursuit throws the others out, and says so.
    rows, log_bias, _ = learned.match(queries, *double, None, 14, select="omp")
    result = np.asarray(rows)[np.asarray(rows) >= 0] % 10
    assert sorted(result) == list(range(10))
    close(log_bias[np.asarray(rows) >= 0], np.full(10, np.log(2)), 1e-3)
    assert (np.asarray(log_bias)[np.asarray(rows) < 0] == -np.inf).all()


@functools.cache
def refits(**settings):
    return jax.jit(functools.partial(learned.refit, **settings))


@pytest.mark.parametrize("case", [0, 2, 4, 6])
def test_rows_that_are_there_are_refitted_as_well(case):
    """By Gram matrices in float32: as near as singular values come where queries are many, and nearer elsewhere."""
    file, meta = golden(f"attention_matching_case{case}")
    queries, keys, values = arrays(file["queries"], file["keys"], file["values"])
    rows, errors = file["rows"], meta["error"]

    def error(asked, **settings):
        fitted = refits(**settings)(queries, keys, values, keys[rows], values[rows], jnp.zeros(len(rows)))
        return output_error(file, file[asked], rows, *map(np.asarray, fitted))

    assert error("queries_unseen") < 1.005 * errors["reference_unseen_queries"]
    assert error("queries") < 0.4 * errors["chosen_rows_alone"]
    if meta["n"] >= meta["t"]:
        assert error("queries", ridge=1e-6, block=32) < 1.01 * errors["reference"]
    close(error("queries", ridge=1e9), errors["chosen_rows_alone"], 1e-3)


def test_refitted_centroids_answer_better_and_empty_slots_stay_empty():
    rng = np.random.default_rng(2)
    queries, keys, values = (jnp.asarray(rng.normal(size=(n, 8)), jnp.float32) for n in (200, 40, 40))
    centroids = [jnp.mean(x.reshape(20, 2, 8), axis=1) for x in (keys, values)]
    log_bias = jnp.full(20, np.log(2), jnp.float32)
    fitted = refits(block=64)(queries, keys, values, *centroids, log_bias)
    full = answers(*map(np.asarray, (queries, keys, values)))
    before, after = (
        np.linalg.norm(answers(*map(np.asarray, (queries, centroids[0], v)), np.asarray(b)) - full)
        for b, v in ((log_bias, centroids[1]), fitted)
    )
    assert after < 0.7 * before
    assert np.abs(np.asarray(fitted[0]) - np.log(2)).max() <= 3 + 1e-5

    def padded(x, rows):
        return jnp.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1), constant_values=jnp.nan)

    masks = {"real": jnp.arange(45) < 40, "used": jnp.arange(211) < 200}
    slots = [padded(x, 3) for x in centroids]
    empty = jnp.pad(log_bias, (0, 3), constant_values=-jnp.inf)
    again = jax.jit(functools.partial(learned.refit, block=64))(
        *(padded(queries, 11), padded(keys, 5), padded(values, 5), *slots, empty), **masks
    )
    for one, other in zip(again, fitted, strict=True):
        close(one[:20], other, 1e-3)
    assert (np.asarray(again[0][20:]) == -np.inf).all()
    assert (np.asarray(again[1][20:]) == 0).all()
