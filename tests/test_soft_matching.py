"""Chunked soft matching against the golden files, its invariants, and the theorem its partition rests on."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import from_tokens
from clusterkv_jax.calibration import outlier_share
from clusterkv_jax.kernels.top_rows import top_rows
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.soft_matching import cluster, edge_counts, merge_round, merge_schedule, rows_by_round
from tests.support.golden_files import golden, names

# Few shapes: every one of them compiles.
ROUND = jax.jit(merge_round, static_argnames=("merges", "chunk"))
CASES = {"seed": st.integers(0, 10**6), "rows": st.sampled_from([3, 33, 80]), "chunk": st.sampled_from([4, 16])}


def random_rows(seed, rows, heads=2, dim=8):
    """Correlated keys (so that similarity decays with distance), values, and degrees of 1 to 5."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(1, heads, rows, dim))
    for n in range(1, rows):
        keys[:, :, n] = 0.8 * keys[:, :, n - 1] + 0.6 * keys[:, :, n]
    values = rng.normal(size=keys.shape)
    degree = rng.integers(1, 6, size=keys.shape[:3])
    return tuple(jnp.asarray(x, jnp.float32) for x in (keys, values, degree))


def in_float64(arrays):
    """Numpy copies: what is computed with them compiles nothing, whatever the shape."""
    return [np.asarray(x, np.float64) for x in arrays]


@pytest.mark.parametrize("name", names("csm_ref_round*"))
def test_one_round_equals_the_reference(name):
    data, meta = golden(name)
    keys, values, degree, positions = merge_round(
        *(jnp.asarray(data[x])[None, None] for x in ("k", "v", "degree")), merges=meta["t"], chunk=meta["c"]
    )
    np.testing.assert_array_equal(positions[0, 0], data["position_out"])
    np.testing.assert_array_equal(degree[0, 0], data["degree_out"])
    np.testing.assert_allclose(keys[0, 0], data["k_out"], atol=1e-5)
    np.testing.assert_allclose(values[0, 0], data["v_out"], atol=1e-5)


@pytest.mark.parametrize("name", names("tome*"))
def test_one_chunk_over_everything_is_tome(name):
    data, meta = golden(name)
    keys, values, degree, positions = merge_round(
        *(jnp.asarray(data[x])[None] for x in ("k", "v", "degree")), merges=meta["r"], chunk=meta["n"]
    )
    for head in range(meta["h"]):
        # The reference lists unmerged A rows by similarity, then all B rows.
        order = np.concatenate([2 * data["unm_a"][head], 2 * np.arange(meta["n"] // 2) + 1])
        back = np.argsort(order)
        np.testing.assert_array_equal(positions[0, head], order[back])
        np.testing.assert_array_equal(degree[0, head], data["degree_out"][head][back])
        np.testing.assert_allclose(keys[0, head], data["k_out"][head][back], atol=1e-5)
        np.testing.assert_allclose(values[0, head], data["v_out"][head][back], atol=1e-5)


def golden_method(meta):
    budget = ckv.Budget(tokens=meta["B"])
    shape = {"sinks": meta["n1"], "recent": meta["n2"], "chunk": meta["c"]}
    if meta["mode"] == "edges":
        return ckv.CentroidKV(budget, merge_ratio=meta["r0"], **shape)
    steps = {"r_init": meta["r0"], "r_decay": meta["al"], "r_steps": meta["mm"], "r_min": meta["rmin"]}
    return ckv.Chelsea(budget, **steps, **shape)


@pytest.mark.parametrize("name", names("csm_ref_full*"))
def test_rounds_to_a_budget_equal_the_reference(name):
    data, meta = golden(name)
    layer = ckv.compress(golden_method(meta), None, jnp.asarray(data["k"])[None], jnp.asarray(data["v"])[None])
    assert isinstance(layer, ckv.LayerCache)
    assert layer.keys.shape[2] == meta["B"]
    np.testing.assert_array_equal(layer.positions[0], data["position_out"])
    np.testing.assert_array_equal(layer.degree[0], data["degree_out"])
    np.testing.assert_allclose(layer.keys[0], data["k_out"], atol=1e-5)
    np.testing.assert_allclose(layer.values[0], data["v_out"], atol=1e-5)
    np.testing.assert_allclose(ckv.attend(layer, jnp.asarray(data["q"])[None])[0], data["attn_out"], atol=1e-5)


def test_a_wrong_ratio_would_not_pass():
    data, meta = golden("csm_ref_full_case2")
    method = golden_method(meta | {"r0": 0.7})
    layer = ckv.compress(method, None, jnp.asarray(data["k"])[None], jnp.asarray(data["v"])[None])
    assert not np.array_equal(layer.degree[0], data["degree_out"])


@pytest.mark.parametrize("name", names("csm_ref_outlier*"))
def test_outlier_share_equals_the_reference(name):
    data, meta = golden(name)
    share = outlier_share(jnp.asarray(data["k"])[None], chunk=meta["c"], threshold=meta["thr"])
    np.testing.assert_allclose(share[0], data["stat"], atol=1e-6)


@given(**CASES, fraction=st.sampled_from([0.4, 1.0]))
def test_a_round_conserves_what_it_merges(seed, rows, chunk, fraction):
    keys, values, degree = random_rows(seed, rows)
    merges = int(fraction * edge_counts(rows, chunk)[rows])
    k, v, n, positions = in_float64(ROUND(keys, values, degree, merges=merges, chunk=chunk))
    keys, values, degree = in_float64((keys, values, degree))
    assert k.shape[2] == rows - merges
    np.testing.assert_array_equal(n.sum(-1), degree.sum(-1))
    for before, after in ((keys, k), (values, v)):
        total = (degree[..., None] * before).sum(2)
        scale = np.linalg.norm(degree[..., None] * before)
        assert np.linalg.norm((n[..., None] * after).sum(2) - total) <= 1e-6 * scale
    assert (np.diff(positions, axis=-1) > 0).all()


@given(**CASES)
def test_no_merge_changes_nothing(seed, rows, chunk):
    keys, values, degree = random_rows(seed, rows)
    k, v, n, positions = ROUND(keys, values, degree, merges=0, chunk=chunk)
    for before, after in ((keys, k), (values, v), (degree, n)):
        np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(positions[0, 0], np.arange(rows))


@given(seed=CASES["seed"], shape=st.sampled_from([(5, 3), (40, 2)]))
def test_duplicated_rows_merge_without_error(seed, shape):
    """Attention over n copies of a token equals attention over one centroid of degree n, and keys stay bit-equal."""
    rows, copies = shape
    keys, values, _ = random_rows(seed, rows)
    keys, values = (jnp.asarray(np.repeat(x, copies, axis=2)) for x in (keys, values))
    full = ckv.compress(ckv.Full(), None, keys, values)
    method = ckv.CentroidKV(ckv.Budget(tokens=rows * copies - (copies - 1)), sinks=0, recent=0, chunk=8)
    clustered = ckv.compress(method, None, keys, values)
    centroids = np.asarray(clustered.degree) > 1
    assert centroids.any()
    given_rows = np.asarray(keys).reshape(-1, keys.shape[-1])
    for row in np.asarray(clustered.keys)[centroids]:
        assert (given_rows == row).all(-1).any()
    query = jnp.asarray(np.random.default_rng(seed).normal(size=(1, 4, keys.shape[-1])), jnp.float32)
    np.testing.assert_allclose(ckv.attend(clustered, query), ckv.attend(full, query), atol=2e-6)


@given(seed=CASES["seed"], rows=st.sampled_from([1, 7, 40]), count=st.integers(0, 40), levels=st.integers(1, 6))
def test_best_edges_are_those_of_a_stable_sort(seed, rows, count, levels):
    rng = np.random.default_rng(seed)
    score = rng.choice(rng.normal(size=levels), size=(2, 3, rows)).astype(np.float32)
    score[rng.random(score.shape) < 0.2] = -np.inf
    mask = top_rows(jnp.asarray(score), jnp.asarray([count, count // 2]))
    for b, limit in ((0, count), (1, count // 2)):
        for head in range(3):
            first = np.argsort(-score[b, head], kind="stable")[:limit]
            expected = {i for i in first.tolist() if score[b, head, i] > -np.inf}
            assert set(np.flatnonzero(mask[b, head]).tolist()) == expected


@pytest.mark.parametrize(("merges", "chunk", "said"), [(9, 4, "between 0 and the 8"), (-1, 4, "-1"), (1, 3, "even")])
def test_impossible_rounds_are_named(merges, chunk, said):
    keys, values, degree = random_rows(0, 16)
    with pytest.raises(ValueError, match=said):
        merge_round(keys, values, degree, merges=merges, chunk=chunk)


@given(n=st.integers(1, 5), slopes=st.lists(st.floats(0, 1), min_size=9, max_size=9))
def test_theorem_6_1_alternating_partition_is_optimal(n, slopes):
    """For every convex decreasing f: no partition into halves has a larger sum over pairs than odds against evens."""
    drops = np.sort(slopes)[::-1]  # f(1) - f(2) >= f(2) - f(3) >= ... >= 0
    f = np.concatenate([[0.0], 1.0 - np.concatenate([[0.0], np.cumsum(drops)])])

    def total(a):
        return sum(f[abs(x - y)] for x in a for y in set(range(2 * n)) - set(a))

    best = max(total(a) for a in combinations(range(2 * n), n))
    assert total(tuple(range(0, 2 * n, 2))) >= best - 1e-9


def test_clustering_is_the_same_under_jit_with_traced_lengths():
    keys, values, _ = random_rows(7, 80)
    method = ckv.CentroidKV(ckv.Budget(ratio=0.5), sinks=2, recent=4, chunk=16)
    eager = ckv.compress(method, None, keys, values, jnp.asarray([70]))
    traced = jax.jit(lambda n: ckv.compress(method, None, keys, values, n))(jnp.asarray([70]))
    rows = int(eager.length[0, 0])
    assert rows == 35 == int(traced.length[0, 0])
    for name in ("keys", "values", "degree", "positions"):
        np.testing.assert_array_equal(getattr(eager, name)[:, :, :rows], getattr(traced, name)[:, :, :rows])


@pytest.mark.parametrize(
    "method",
    [
        ckv.CentroidKV(ckv.Budget(ratio=0.2), sinks=2, recent=4, chunk=16),
        ckv.Chelsea(ckv.Budget(ratio=0.3), sinks=2, recent=4, chunk=16, interval=16),
    ],
    ids=["CentroidKV", "Chelsea"],
)
def test_rounds_are_known_on_the_host(method):
    """As many as a loop that looks for itself does, and the same rows after so many, from lists that become shorter."""
    lengths = np.asarray([90, 7, 64, 33])
    keys, values, _ = random_rows(5, 90)
    keys, values = (jnp.tile(x[:1], (4, 1, 1, 1)) for x in (keys, values))
    request = RequestShape(lengths, 1, keys.shape[1])
    rows = method.budget_rows(lengths, 0, request)[:, 0]
    target = np.where(lengths >= rows + method.schedule.slack, rows, lengths)
    schedule = merge_schedule(90, 16, method.ratios, method.merge_of)
    apart = {"sinks": 2, "recent": 4, "chunk": 16}
    args = (from_tokens(keys, values, jnp.asarray(lengths)), jnp.asarray(target), jnp.zeros(4, jnp.int32), schedule)
    expected, rounds = cluster(*args, **apart)
    largest = 90, int(target.max())
    heads = zip(lengths.tolist(), target.tolist(), strict=True)
    each = [rows_by_round(one, largest, schedule, **apart) for one in heads]
    forecast = max(each, key=len)
    assert len(forecast) == int(rounds.max()) > 2
    assert 2 * forecast[-1] < 90
    for enough in (False, True):
        result = cluster(*args, **apart, expected=forecast, enough=enough)[0]
        jax.tree.map(np.testing.assert_array_equal, result, expected)


@given(
    rows=st.tuples(st.integers(1, 400), st.integers(0, 200)),
    budget=st.tuples(st.integers(1, 200), st.integers(0, 100)),
    ratios=st.sampled_from([(0.3,), (0.5,), (0.5, 0.25, 0.125, 0.0625)]),
    merge_of=st.sampled_from(["edges", "middle"]),
    apart=st.sampled_from([{"sinks": 0, "recent": 0}, {"sinks": 3, "recent": 7}]),
)
def test_no_head_holds_more_rows_than_the_largest(rows, budget, ratios, merge_of, apart):
    """So lists that are as long as its own lose no row of any other."""
    schedule = merge_schedule(sum(rows), 16, ratios, merge_of)
    one, largest = (rows[0], budget[0]), (sum(rows), sum(budget))
    own = rows_by_round(one, one, schedule, **apart, chunk=16)
    bound = rows_by_round(one, largest, schedule, **apart, chunk=16)
    assert len(own) == len(bound)
    assert all(mine <= most for mine, most in zip(own, bound, strict=True))


def test_edges_is_the_plain_name_of_a():
    for rows, chunk in ((90, 16), (7, 4)):
        schedules = [merge_schedule(rows, chunk, (0.8,), name) for name in ("edges", "A", "middle")]
        np.testing.assert_array_equal(schedules[0], schedules[1])
        assert (schedules[2] >= schedules[1]).all()
        assert (schedules[2] > schedules[1]).any()
    assert ckv.CentroidKV(ckv.Budget(ratio=0.5), merge_of="edges").ratios == (0.8,)
