"""Methods on bare tensors beside NumPy: right for any contents, whatever their lengths and sizes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import clusterkv_jax as ckv
from tests.fuzz import reference
from tests.fuzz.rules import one_sentence

B, K, G, D = 2, 2, 2, 8
# Every size is a program: few of them, unless there is time.
LARGE = settings.default.max_examples > 100
TOKENS = st.sampled_from([24, 33, 40, 64]) if LARGE else st.just(40)
SEEDS, SCALES = st.integers(0, 2**32 - 1), st.sampled_from([1e-12, 1e-3, 1.0, 30.0])
COUNTS = st.sampled_from([13, 20, 26, 30] if LARGE else [20])
few = settings(max_examples=max(5, settings.default.max_examples // 4))


def drawn(seed: int, tokens: int, scale: float = 1.0) -> list[np.ndarray]:
    """Queries, keys and values in float32; some keys repeat."""
    rng = np.random.default_rng(seed)
    queries, keys, values = (rng.normal(size=(B, heads, tokens, D)) for heads in (K * G, K, K))
    keys[:, :, rng.integers(tokens, size=4)] = keys[:, :, rng.integers(tokens, size=4)]
    return [(scale * x).astype(np.float32) for x in (queries, keys, values)]


def lengths_for(seed: int, tokens: int, least: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(least, tokens + 1, size=B).astype(np.int32)


def compressed(method, arrays, lengths):
    """Rows [B][K] of (keys, values, degree, positions) that are there."""
    layer = ckv.compress(method, *map(jnp.asarray, arrays), lengths)
    parts = [np.asarray(x) for x in (layer.keys, layer.values, layer.degree, layer.positions)]
    return [[tuple(x[b, k, : layer.length[b, k]] for x in parts) for k in range(K)] for b in range(B)]


def heads(arrays, lengths):
    """b, k, and the head's queries [G, n, D], keys and values in float64."""
    for b, n in enumerate(lengths):
        for k in range(K):
            q, *kv = (x[b, :, :n].astype(np.float64) for x in arrays)
            yield b, k, q[k * G : k * G + G], kv[0][k], kv[1][k]


@given(seed=SEEDS, tokens=TOKENS, scale=SCALES, budget=COUNTS, kind=st.sampled_from(["snapkv", "h2o", "streamingllm"]))
def test_what_is_kept_is_what_is_worth_most(seed, tokens, scale, budget, kind):
    arrays, lengths = drawn(seed, tokens, scale), lengths_for(seed, tokens, 12)
    rows = ckv.Budget(tokens=budget)
    methods = {
        "snapkv": (ckv.SnapKV(rows, window=8, kernel=3), lambda q, k: reference.snapkv(q, k, 8, 3), 0, 8),
        "h2o": (ckv.H2O(rows, recent=6), reference.h2o, 0, 6),
        "streamingllm": (ckv.StreamingLLM(rows, sinks=4), lambda q, k: np.arange(len(k), dtype=float), 4, 0),
    }
    method, score, first, last = methods[kind]
    kept = compressed(method, arrays, lengths)
    for b, k, q, keys, values in heads(arrays, lengths):
        found, n = kept[b][k], len(keys)
        at = found[3]
        assert (np.diff(at) > 0).all()
        np.testing.assert_array_equal(found[0], np.float32(keys[at]))
        np.testing.assert_array_equal(found[1], np.float32(values[at]))
        np.testing.assert_array_equal(found[2], np.ones(min(n, budget)))
        if n > budget:
            assert {*range(first), *range(n - last, n)} <= set(at.tolist())
            free = score(q, keys)[first : n - last]
            assert reference.are_best(at[(at >= first) & (at < n - last)] - first, free)


@given(seed=SEEDS, tokens=TOKENS, scale=SCALES, budget=COUNTS)
def test_centroids_are_those_of_one_merge_after_the_other(seed, tokens, scale, budget):
    arrays, lengths = drawn(seed, tokens, scale), lengths_for(seed, tokens, 12)
    method = ckv.CentroidKV(ckv.Budget(tokens=budget), sinks=2, recent=4, chunk=16)
    kept = compressed(method, arrays, lengths)
    for b, k, _, keys, values in heads(arrays, lengths):
        expected = reference.merged(keys, values, budget, 2, 4, 16, 0.8)
        if expected[-1] < 1e-5:
            continue  # which of two pairs is merged first is a matter of rounding
        for result, wanted in zip(kept[b][k][:3], expected, strict=False):
            np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-4 * scale)


@given(seed=SEEDS, budget=COUNTS, name=st.sampled_from(["full", "centroidkv"]))
def test_attention_is_the_formula(seed, budget, name):
    arrays, lengths = drawn(seed, 40), lengths_for(seed, 40, 12)
    rows = ckv.Budget(tokens=budget)
    method = ckv.Full() if name == "full" else ckv.CentroidKV(rows, sinks=2, recent=4, chunk=16)
    layer = ckv.compress(method, *map(jnp.asarray, arrays), lengths)
    query = drawn(seed + 1, 40)[0][:, :, 0]
    out = np.asarray(ckv.attend(layer, jnp.asarray(query)))
    keys, values, degree = (np.asarray(x) for x in (layer.keys, layer.values, layer.degree))
    for b in range(B):
        for h in range(K * G):
            expected = reference.attend(query[b, h], keys[b, h // G], values[b, h // G], degree[b, h // G])
            np.testing.assert_allclose(out[b, h], expected, rtol=1e-4, atol=1e-4)


PAGES = st.tuples(st.integers(1, 48), st.integers(1, 20), st.integers(1, 60), st.integers(1, 4))
SAME_PAGES = st.sampled_from([(17, 16, 20, 3), (3, 1, 1, 1), (40, 4, 16, 2)])


@few
@given(seed=SEEDS, size=PAGES if LARGE else SAME_PAGES)
@example(seed=0, size=(57, 33, 59, 3))
@example(seed=0, size=(16, 33, 1, 1))
@example(seed=0, size=(23, 4, 9, 2))
@example(seed=0, size=(24, 4, 17, 2))
def test_quest_selects_the_best_pages_and_the_newest(seed, size):
    tokens, page, budget, least = size
    queries, keys, values = map(jnp.asarray, drawn(seed, tokens))
    method = ckv.Quest(ckv.Budget(tokens=budget), page=page, min_pages=least)
    rows = np.asarray(ckv.select(method, ckv.build_index(method, keys, values), queries[:, :, -1]))
    assert rows.shape == (B, K * G, max(budget, least * page))
    queries, keys = (np.asarray(x, np.float64) for x in (queries, keys))
    assert ((rows[..., :-1] >= 0) | (rows[..., 1:] < 0)).all()  # what is unused stands behind
    for b in range(B):
        for h in range(K * G):
            scores = reference.quest(queries[b, h, -1], keys[b, h // G], page)
            if len(scores) > 1 and np.diff(np.sort(scores)).min() < 1e-4:
                continue  # two pages of one score
            (expected,) = reference.chosen_pages(scores, tokens, budget, page, least)
            found = rows[b, h][rows[b, h] >= 0].tolist()
            assert len(found) == len(set(found))
            assert set(found) == expected


HUGE = st.sampled_from([np.nan, np.inf, -np.inf, 1e25, 3e38, 1e15, 1e13, -1e10, 1e-40])


@given(
    seed=SEEDS,
    value=HUGE,
    which=st.integers(0, 2),
    kind=st.sampled_from([ckv.CentroidKV, ckv.GravityKV, ckv.SnapKV, ckv.H2O]),
)
@pytest.mark.wrong_arguments
def test_a_number_that_is_none_is_named_and_any_other_is_counted(seed, value, which, kind):
    arrays, rng = drawn(seed, 40), np.random.default_rng(seed)
    settings_of = {ckv.SnapKV: {"window": 8}, ckv.H2O: {}}.get(kind, {"sinks": 2, "recent": 4, "chunk": 16})
    arrays[which][tuple(rng.integers(size) for size in arrays[which].shape)] = value
    method = kind(ckv.Budget(tokens=20), **settings_of)
    name = ("queries", "keys", "values")[which]
    layer, said = one_sentence(lambda: ckv.compress(method, *map(jnp.asarray, arrays)), says=[name], seconds=60)
    assert (said is None) == (np.isfinite(value) and abs(value) <= 1e14)
    if layer is not None:
        assert (np.asarray(layer.length) == 20).all()
        tokens_of = {ckv.SnapKV: 20, ckv.H2O: 20}
        assert (np.asarray(layer.degree).sum(-1) == tokens_of.get(kind, 40)).all()
        assert np.isfinite(np.asarray(layer.keys)).all()
