"""What is observed in keys and caches, on keys whose answers are known, and the page that shows it."""

import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.evaluation import inspection, inspection_page
from clusterkv_jax.evaluation.inspection import Observed
from tests.tiny import prompt, tiny

METHOD = ckv.CentroidKV(ckv.Budget(tokens=60), sinks=4, recent=8, chunk=32, interval=8)


@pytest.fixture(scope="module")
def layers():
    return inspection.observe(tiny(), prompt(0, 160))


def circling(turn, tokens=80):
    """Keys that turn by the same angle from token to token: the cosine at distance s is cos(turn * s)."""
    angles = turn * np.arange(tokens)
    keys = np.stack([np.cos(angles), np.sin(angles)], -1)[None, None].astype(np.float32)
    return Observed(keys, keys, keys)


def test_similarity_is_that_of_known_keys():
    slow = inspection.similarity_over_distance(circling(0.01))
    np.testing.assert_allclose(slow[0], np.cos(0.01 * np.arange(1, 65)), atol=1e-5)
    assert inspection.convex_share(slow) < 0.2  # a cosine falls ever faster at first
    assert inspection.convex_share(np.exp(-np.arange(20))[None]) == 1
    found = inspection.cosine_maps(circling(0.1))
    np.testing.assert_allclose(found[0, 0], np.cos(0.1 * np.arange(80)), atol=1e-5)


def test_outlier_heads_are_those_without_similar_keys():
    similar, far = circling(0.01), circling(2.0)
    np.testing.assert_array_equal(inspection.outlier_map([similar, far], chunk=2), [[0], [1]])


def test_kept_positions_and_their_likeness(layers):
    kept = inspection.kept_positions(layers, METHOD)
    assert [[len(head) for head in layer] for layer in kept] == [[60, 60], [60, 60]]
    assert all({0, 1, 2, 3, *range(152, 160)} <= head for layer in kept for head in layer)
    (likeness,) = inspection.neighbour_similarity(kept)
    assert 12 / 108 < likeness < 1
    np.testing.assert_allclose(inspection.neighbour_similarity([[{1, 2, 3}], [{2, 3, 4}], [{2, 3, 4}]]), [0.5, 1])


def test_the_full_cache_has_no_error_and_a_small_one_has(layers):
    np.testing.assert_allclose(inspection.output_errors(layers, ckv.Full()), [[1, 0], [1, 0]], atol=1e-6)
    errors = inspection.output_errors(layers, METHOD)
    assert (errors[:, 0] < 0.999).all()
    assert (errors[:, 1] > 0.01).all()


def test_the_page_holds_every_picture():
    pytest.importorskip("matplotlib")
    found = inspection_page.page_of(tiny(), prompt(0, 160), {"full": ckv.Full(), "centroidkv": METHOD})
    assert found.count("<svg") == 6
    assert "160 tokens" in found
    assert "<script" not in found
