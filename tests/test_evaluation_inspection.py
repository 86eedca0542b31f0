"""What is observed in keys and caches, on keys whose answers are known, and the page that shows it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.evaluation.inspection import observations, recall_rates
from clusterkv_jax.evaluation.inspection import page as inspection_page
from clusterkv_jax.evaluation.inspection.observations import Observed
from tests.support.tiny import prompt, tiny

METHOD = ckv.CentroidKV(ckv.Budget(tokens=60), sinks=4, recent=8, chunk=32, interval=8)


@pytest.fixture(scope="module")
def layers():
    return observations.observe(tiny(), prompt(0, 160))


def circling(turn, tokens=80):
    """Keys that turn by the same angle from token to token: the cosine at distance s is cos(turn * s)."""
    angles = turn * np.arange(tokens)
    keys = np.stack([np.cos(angles), np.sin(angles)], -1)[None, None].astype(np.float32)
    return Observed(*[jnp.asarray(keys)] * 3, hidden=jnp.zeros((1, 1, 1)))


def test_similarity_is_that_of_known_keys():
    slow = observations.similarity_over_distance(circling(0.01))
    np.testing.assert_allclose(slow[0], np.cos(0.01 * np.arange(1, 65)), atol=1e-5)
    assert observations.convex_share(slow) < 0.2  # a cosine falls ever faster at first
    assert observations.convex_share(np.exp(-np.arange(20))[None]) == 1
    maps = observations.cosine_maps(circling(0.1))
    np.testing.assert_allclose(maps[0, 0], np.cos(0.1 * np.arange(80)), atol=1e-5)


def test_outlier_heads_are_those_without_similar_keys():
    similar, far = circling(0.01), circling(2.0)
    np.testing.assert_array_equal(observations.outlier_map([similar, far], chunk=2), [[0], [1]])


def test_kept_positions_and_their_likeness(layers):
    positions = observations.kept_positions(layers, METHOD)
    assert [[len(head) for head in layer] for layer in positions] == [[60, 60], [60, 60]]
    assert all({0, 1, 2, 3, *range(152, 160)} <= head for layer in positions for head in layer)
    (likeness,) = observations.neighbour_similarity(positions)
    assert 12 / 108 < likeness < 1
    np.testing.assert_allclose(observations.neighbour_similarity([[{1, 2, 3}], [{2, 3, 4}], [{2, 3, 4}]]), [0.5, 1])


def test_the_full_cache_has_no_error_and_a_small_one_has(layers):
    np.testing.assert_allclose(observations.output_errors(layers, ckv.Full()), [[1, 0], [1, 0]], atol=1e-6)
    errors = observations.output_errors(layers, METHOD)
    assert (errors[:, 0] < 0.999).all()
    assert (errors[:, 1] > 0.01).all()


@pytest.mark.parametrize("method", [ckv.ClusterKV, ckv.Quest, ckv.InfiniGen])
def test_recall_has_the_error_of_the_rows_that_it_selects(layers, method):
    few, all_rows = (method(ckv.Budget(tokens=n), dense_layers=1) for n in (48, 96))
    errors = observations.output_errors(layers, few)
    np.testing.assert_allclose(errors[0], [1, 0], atol=1e-6)  # a dense layer
    assert errors[1, 0] < 0.999
    assert errors[1, 1] > 0.01
    # 160 tokens less the 64 that ask.
    np.testing.assert_allclose(observations.output_errors(layers, all_rows), [[1, 0], [1, 0]], atol=1e-5)


def test_the_page_compares_kept_positions_of_methods_that_forget(layers, monkeypatch):
    monkeypatch.setattr(observations, "observe", lambda *_: layers)
    pictures = {}
    for name, method in (("recalls", ckv.Quest(ckv.Budget(tokens=48), dense_layers=1)), ("forgets", METHOD)):
        pictures[name] = inspection_page.page_of(tiny(), [0] * 160, {name: method})
    assert "Positions kept" in pictures["forgets"]
    assert "Positions kept" not in pictures["recalls"]
    assert all("relative L1 error" in text for text in pictures.values())


def test_the_recall_rate_counts_the_best_rows(layers):
    method = ckv.ClusterKV(ckv.Budget(tokens=40), sinks=2, tokens_per_cluster=8, dense_layers=1)
    rates = recall_rates.recall_rates(layers, method, 20)
    assert rates.shape == (2, 4, 20)
    assert np.isnan(rates[0]).all()
    # By hand, for one head and step.
    layer, step, head = layers[1], 3, 2
    cut = 160 - 20
    index = ckv.build_index(method, *(x[:, :, :cut] for x in (layer.keys, layer.values)))
    query = np.asarray(layer.queries[0, :, cut + step])
    selection = set(np.asarray(ckv.select(method, index, query[None]))[0, head].tolist())
    best = np.argsort(-(np.asarray(layer.keys[0, head // 2, :cut]) @ query[head]))[:40]
    assert rates[1, head, step] == pytest.approx(len(selection & set(best.tolist())) / 40)
    # Every row of its own cluster: what scores best is what attends best.
    single = recall_rates.recall_rates(layers, dataclasses.replace(method, sinks=0, tokens_per_cluster=1), 20)
    assert np.nanmin(single) > 0.95 > recall_rates.mean_rate(rates) > 40 / cut
    with pytest.raises(ValueError, match="got 140 tokens and 150 rows"):
        recall_rates.recall_rates(layers, dataclasses.replace(method, budget=ckv.Budget(tokens=150)), 20)


def test_the_page_of_recall_holds_every_picture(layers):
    pytest.importorskip("matplotlib")
    rates = np.full((2, 4, 20), 0.5)
    rates[0] = np.nan
    curves = {("clusterkv", 40): rates, ("quest", 40): rates / 2, ("quest", 80): rates}
    page = recall_rates.recall_page(tiny(), 160, 20, curves)
    assert page.count("<svg") == 4
    assert "140 tokens" in page


def test_names_in_the_pages_are_texts(layers, monkeypatch):
    pytest.importorskip("matplotlib")
    hostile = "<script>alert('x')</script>"
    monkeypatch.setattr(observations, "observe", lambda *_: layers)
    model = dataclasses.replace(tiny(), name=hostile)
    rates = np.full((2, 4, 20), 0.5)
    for html in (
        inspection_page.page_of(model, [0] * 160, {hostile: METHOD}),
        recall_rates.recall_page(model, 160, 20, {(hostile, 40): rates}),
    ):
        assert "<script" not in html
        assert "<h1>&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in html


def test_the_page_holds_every_picture():
    pytest.importorskip("matplotlib")
    page = inspection_page.page_of(tiny(), prompt(0, 160), {"full": ckv.Full(), "centroidkv": METHOD})
    assert page.count("<svg") == 6
    assert "160 tokens" in page
    assert "<script" not in page
