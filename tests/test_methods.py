"""Methods on bare tensors: budgets, padding, batches, outlier heads, and what is impossible."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.cache.kinds import with_groups
from clusterkv_jax.cache.layers import append, group_heads, groups
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.plan import plan_layer
from clusterkv_jax.methods.request import RequestShape
from tests.support.methods import SHAPE, every_method, fitted_method, named


def append_layer(layer, keys, values, positions, real):
    """The same tokens to every head of what `compress` returns."""
    parts = []
    for group, heads in zip(groups(layer), group_heads(layer), strict=True):
        index = jnp.asarray(heads)
        parts.append(append(group, keys[:, index], values[:, index], positions, real))
    return with_groups(layer, parts)


def centroid(**budget):
    return ckv.CentroidKV(ckv.Budget(**budget), **SHAPE)


def chelsea(interval=8, outlier_heads=(), **budget):
    return ckv.Chelsea(ckv.Budget(**budget), interval=interval, outlier_heads=outlier_heads, **SHAPE)


def tensors(seed=0, batch=2, heads=2, tokens=96, dim=8, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(batch, heads, tokens, dim)), dtype) for _ in range(2))


def scores_of(values):
    """Something that each row of a head is worth."""
    return jnp.sum(jnp.sin(3 * values.astype(jnp.float32)), axis=-1) + ordinals(values.shape[1], 2)[..., None] / 2


def rows(layer, b, head):
    """Keys, values, degrees and positions that batch row b holds for a KV head of any kind of layer."""
    for group, heads in zip(groups(layer), group_heads(layer), strict=True):
        if head in heads:
            k, n = heads.index(head), int(group.length[b, heads.index(head)])
            return tuple(np.asarray(x)[b, k, :n] for x in (group.keys, group.values, group.degree, group.positions))
    raise AssertionError(f"no head {head}")


@given(
    seed=st.integers(0, 10**6),
    ratio=st.sampled_from([0.25, 0.6]),
    lengths=st.lists(st.integers(60, 96), min_size=2, max_size=2),
    kind=st.sampled_from([centroid, chelsea]),
)
def test_the_budget_is_met_exactly_and_every_token_is_counted(seed, ratio, lengths, kind):
    keys, values = tensors(seed)
    layer = ckv.compress(kind(ratio=ratio), None, keys, values, jnp.asarray(lengths))
    for b, n in enumerate(lengths):
        budget = int(ratio * n)
        clustered = n >= budget + (8 if kind is chelsea else 0)
        for head in range(2):
            k, v, degree, positions = rows(layer, b, head)
            assert len(degree) == (budget if clustered else n)
            assert degree.sum() == n
            assert (degree >= 1).all()
            assert (np.diff(positions) > 0).all()
            # Sinks and recent rows are the prompt's own.
            prompt_k, prompt_v = (np.asarray(x, np.float64)[b, head, :n] for x in (keys, values))
            for row in (0, 1, -4, -1):
                np.testing.assert_array_equal(k[row], prompt_k[row])
            for after, before in ((k, prompt_k), (v, prompt_v)):
                total, scale = before.sum(0), np.abs(before).sum()
                assert np.abs((degree[:, None] * after.astype(np.float64)).sum(0) - total).max() < 1e-6 * scale


@pytest.mark.parametrize(
    "method",
    [
        centroid(ratio=1.0),
        centroid(tokens=96),
        centroid(tokens=2**40),
        chelsea(ratio=1.5),
        dataclasses.replace(centroid(ratio=0.5), merge_ratio=0),
        ckv.Full(),
        *every_method(ckv.Budget(ratio=1.0)),
        *every_method(ckv.Budget(tokens=96)),
        fitted_method(ckv.Budget(ratio=1.0)),
    ],
    ids=named,
)
def test_no_compression_is_the_full_cache_bit_for_bit(method):
    keys, values = tensors(3, dtype=jnp.bfloat16)
    queries = tensors(4, heads=4, dtype=jnp.bfloat16)[0]
    layer = ckv.compress(method, queries, keys, values, jnp.asarray([96, 50]), scores=scores_of(values))
    for b, n in enumerate((96, 50)):
        k, v, degree, positions = rows(layer, b, 1)
        np.testing.assert_array_equal(k, np.asarray(keys)[b, 1, :n])
        np.testing.assert_array_equal(v, np.asarray(values)[b, 1, :n])
        np.testing.assert_array_equal(degree, np.ones(n))
        np.testing.assert_array_equal(positions, np.arange(n))


@pytest.mark.parametrize(
    "method",
    [
        ckv.Full(),
        chelsea(ratio=0.4, outlier_heads=((0, 1),)),
        ckv.KVzap(ckv.Budget(ratio=0.3), sinks=2, recent=4, scope="layer"),
        *every_method(ckv.Budget(ratio=0.3)),
    ],
    ids=named,
)
def test_padding_never_matters_and_a_row_does_not_depend_on_its_batch(method):
    keys, values = tensors(5)
    queries = tensors(6, heads=4)[0]
    lengths = jnp.asarray([96, 70])
    padding = (ordinals(96, 2) >= lengths[:, None])[:, None, :, None]
    poisoned = (jnp.where(padding, jnp.nan, x) for x in (queries, keys, values))
    scores = scores_of(values)
    dirty_scores = jnp.where(padding[..., 0], jnp.nan, scores)
    dirty = ckv.compress(method, *poisoned, lengths, num_layers=4, scores=dirty_scores)
    for b, n in enumerate((96, 70)):
        own = (x[b : b + 1, :, :n] for x in (queries, keys, values))
        alone = ckv.compress(method, *own, num_layers=4, scores=scores[b : b + 1, :, :n])
        for head in range(2):
            for result, expected in zip(rows(dirty, b, head), rows(alone, 0, head), strict=True):
                np.testing.assert_allclose(result, expected, atol=1e-6)
            assert (np.diff(rows(dirty, b, head)[3]) > 0).all()
    for leaf in jax.tree.leaves(dirty):
        assert bool(jnp.isfinite(leaf).all())


@pytest.mark.parametrize(
    "method", [*every_method(ckv.Budget(ratio=0.25)), fitted_method(ckv.Budget(ratio=0.25))], ids=named
)
def test_every_budget_is_met_and_attention_ignores_the_order_of_slots(method):
    keys, values = tensors(11)
    queries = tensors(12, heads=4)[0]
    layer = ckv.compress(method, queries, keys, values, jnp.asarray([96, 80]), num_layers=2, scores=scores_of(values))
    first = 5 / 3 if isinstance(method, ckv.PyramidKV) else 1
    if method.storage == "pages":
        assert layer.length.sum(-1).tolist() == [48, 40]
        assert layer.length[0].tolist() != [24, 24]
        assert layer.capacity == 96  # of tensors alone there are no pages
    else:
        assert layer.length.tolist() == [[round(first * n / 4)] * 2 for n in (96, 80)]
        assert layer.capacity == int(layer.length.max())
    if method.storage != "centroids":
        np.testing.assert_array_equal(layer.degree > 0, ordinals(layer.capacity, 3) < layer.length[..., None])
    order = np.random.default_rng(0).permutation(layer.capacity)
    shuffled = jax.tree.map(lambda x: x[:, :, order] if x.ndim > 2 else x, layer)
    shuffled = dataclasses.replace(shuffled, length=jnp.full_like(layer.length, layer.capacity))
    query = queries[:, :, -1]
    np.testing.assert_allclose(ckv.attend(shuffled, query), ckv.attend(layer, query), atol=1e-5)


def test_outlier_heads_keep_everything_and_the_others_pay_for_it():
    keys, values = tensors(6, batch=1, heads=4)
    method = chelsea(ratio=0.5, outlier_heads=((1, 2),))
    layer = ckv.compress(method, None, keys, values, layer=1, num_layers=2)
    assert isinstance(layer, ckv.HeadGroups)
    np.testing.assert_array_equal(rows(layer, 0, 2)[0], keys[0, 2])
    # B' = (B - p n) / (1 - p) with B = 48, p = 1/8, n = 96.
    rest = int((48 - 96 / 8) / (1 - 1 / 8))
    assert [len(rows(layer, 0, head)[2]) for head in range(4)] == [rest, rest, 96, rest]
    # Memory is saved for real: the groups have their own capacities, and the whole model keeps its half.
    assert [group.capacity for group in layer.groups] == [96, rest]
    other = ckv.compress(method, None, keys, values, layer=0, num_layers=2)
    slots = sum(group.capacity * group.keys.shape[1] for cache in (layer, other) for group in groups(cache))
    assert 0.49 * 8 * 96 < slots <= 0.5 * 8 * 96
    query = jnp.asarray(np.random.default_rng(1).normal(size=(1, 8, 8)), jnp.float32)
    out = ckv.attend(layer, query)
    full = ckv.attend(ckv.compress(ckv.Full(), None, keys, values), query)
    np.testing.assert_allclose(out[:, 4:6], full[:, 4:6], atol=1e-6)
    for head in (0, 1, 3):
        k, v, degree, _ = rows(layer, 0, head)
        for g in (0, 1):
            score = k @ np.asarray(query[0, 2 * head + g]) / np.sqrt(8) + np.log(degree)
            weight = np.exp(score - score.max())
            np.testing.assert_allclose(out[0, 2 * head + g], weight @ v / weight.sum(), atol=1e-5)


def test_a_layer_may_be_all_outliers():
    keys, values = tensors(7)
    method = chelsea(ratio=0.6, outlier_heads=((0, 0), (0, 1)))
    layer = ckv.compress(method, None, keys, values, num_layers=8)
    assert isinstance(layer, ckv.LayerCache)
    assert layer.capacity == 96


def test_capacity_is_the_most_rows_there_can_be():
    request = RequestShape(np.arange(1, 101), 4, 2, max_new_tokens=50, reserve=50)
    assert plan_layer(centroid(ratio=0.4), 0, request).capacities == (100 + 50,)  # never more than there are tokens
    assert plan_layer(dataclasses.replace(centroid(ratio=0.4), interval=8), 0, request).capacities == (40 + 8,)
    long = dataclasses.replace(request, reserve=500, max_new_tokens=500)
    assert plan_layer(centroid(ratio=0.4), 0, long).capacities == (40 + 128,)
    assert plan_layer(ckv.Full(), 0, request).capacities == (150,)
    # Chelsea's budget counts the new tokens, and a prompt just below B + g stays whole.
    assert plan_layer(chelsea(ratio=0.5), 0, request).capacities == (75 + 8,)


@given(seed=st.integers(0, 10**6), new=st.integers(1, 20))
def test_appended_tokens_stand_behind_the_rows(seed, new):
    keys, values = tensors(seed)
    layer = ckv.compress(centroid(ratio=0.4), None, keys, values, jnp.asarray([96, 64]), max_new_tokens=20)
    more_k, more_v = (x[:, :, :20] for x in tensors(seed + 1))
    positions = jnp.asarray([[96], [64]]) + ordinals(20, 2)
    real = ordinals(20, 2) < jnp.asarray([new, 3])[:, None]
    longer = jax.jit(append_layer)(layer, more_k, more_v, positions, real)
    for b, count in ((0, new), (1, 3)):
        before, after = rows(layer, b, 0), rows(longer, b, 0)
        assert len(after[2]) == len(before[2]) + count
        for old, now in zip(before, after, strict=True):
            np.testing.assert_array_equal(now[: len(old)], old)
        np.testing.assert_array_equal(after[0][-count:], np.asarray(more_k)[b, 0, :count])
        assert after[3][-1] == (96, 64)[b] + count - 1


def test_lengths_that_are_traced_lose_no_token():
    """Where a budget is impossible and cannot be checked, sinks, recent rows and one centroid remain."""
    keys, values = tensors(9)
    compressed = jax.jit(lambda n: ckv.compress(centroid(tokens=3), None, keys, values, n))(jnp.asarray([96, 60]))
    np.testing.assert_array_equal(compressed.degree.sum(-1), [[96, 96], [60, 60]])
    assert compressed.capacity == int(compressed.length.max()) == 2 + 4 + 1


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_prompts_shorter_than_the_sinks(tokens):
    keys, values = tensors(10, tokens=tokens)
    np.testing.assert_array_equal(ckv.compress(centroid(ratio=1.0), None, keys, values).keys, keys)


def test_a_full_cache_says_so():
    keys, values = tensors(8)
    layer = ckv.compress(ckv.Full(), None, keys, values, max_new_tokens=1)
    real = jnp.ones((2, 2), bool)
    longer = append_layer(layer, keys[:, :, :2], values[:, :, :2], jnp.zeros((2, 2), jnp.int32), real)
    assert int(longer.length[0, 0]) == 98 > longer.capacity == 97


def refused(said, run, *args, **options):
    """In one sentence."""
    with pytest.raises(ValueError, match=said) as error:
        run(*args, **options)
    assert str(error.value).count(". ") == 0


HALF, FEW, NINETY = ckv.Budget(ratio=0.5), ckv.Budget(tokens=9), ckv.Budget(tokens=90)


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (ckv.Budget, {}, "exactly one of ratio and tokens"),
        (ckv.Budget, {"ratio": 0.5, "tokens": 10}, "exactly one of ratio and tokens"),
        (ckv.Budget, {"bytes": 10, "tokens": 3}, "exactly one of ratio and tokens"),
        (ckv.Budget, {"ratio": 2, "tokens": 3}, "got ratio=2, tokens=3 and bytes=None"),
        (ckv.Budget, {"ratio": 0}, "ratio must be a number above 0, got 0"),
        (ckv.Budget, {"ratio": float("nan")}, "ratio must be a number above 0, got nan"),
        (ckv.Budget, {"ratio": 128}, r"1 is everything, since rows are tokens= \(--cache-tokens\), got 128"),
        (ckv.Budget, {"ratio": 25.0}, "rows are tokens="),
        (ckv.Budget, {"tokens": 2.5}, "tokens must be a whole number of at least 1, got 2.5"),
        (ckv.Budget, {"ratio": 0.5, "base": "context"}, "'context'"),
        (ckv.Budget, {"ratio": 0.5, "shares": (1, 0)}, "shares must be"),
        (ckv.CentroidKV, {"budget": 0.2}, "budget must be a Budget, got 0.2"),
        (ckv.CentroidKV, {"budget": HALF, "chunk": 7}, "chunk must be an even number"),
        (ckv.CentroidKV, {"budget": HALF, "merge_ratio": -0.1}, "merge_ratio must be between 0 and 1"),
        (ckv.CentroidKV, {"budget": HALF, "merge_of": "B"}, "merge_of must be"),
        (ckv.CentroidKV, {"budget": HALF, "interval": 0}, "interval must be a whole number"),
        (ckv.Chelsea, {"budget": HALF, "outlier_heads": ((0,),)}, "outlier_heads must be a tuple of pairs"),
        (ckv.Chelsea, {"budget": HALF, "outlier_heads": ((0, 1), (0, 1))}, "without repeats"),
        (ckv.SnapKV, {"budget": FEW, "kernel": 4}, "kernel must be an odd number of rows, got 4"),
        (ckv.SnapKV, {"budget": FEW, "decode_interval": 0}, "decode_interval must be a whole number"),
        (ckv.AdaKV, {"budget": NINETY, "safeguard": 1.5}, "safeguard must be between 0 and 1, got 1.5"),
        (ckv.AdaKV, {"budget": ckv.Budget(tokens=90, shares=((1, 2),))}, "without shares per head"),
        (ckv.H2O, {"budget": FEW, "recent": -1}, "recent must be a whole number of at least 0 or None"),
        (ckv.Composed, {"prefill": ckv.AdaKV(NINETY), "decode": ckv.H2O(NINETY)}, "unequal lengths"),
        (ckv.Composed, {"prefill": ckv.Full(), "decode": ckv.SnapKV(FEW)}, "compresses while decoding"),
    ],
)
def test_settings_that_are_impossible_are_named(kind, settings, said):
    refused(said, kind, **settings)


WINDOW = "a prompt of 96 tokens has a budget of 32 rows, which must be more than window = 32"


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (ckv.Full, {}, "method must be an object such as"),
        (ckv.Full(), {"layer": 1}, "layer must be between 0 and 0, got 1"),
        (ckv.Full(), {"layer": -1}, "layer must be a whole number of at least 0"),
        (ckv.Full(), {"max_new_tokens": -5}, "at least 0, got -5"),
        (ckv.Full(), {"lengths": np.asarray([5, 97])}, "between 1 and 96"),
        (ckv.Full(), {"lengths": np.asarray([9.0, 9.5], np.float32)}, "got float32"),
        (ckv.Full(), {"lengths": np.asarray([9])}, "lengths must be 2 numbers"),
        (
            ckv.Full(),
            {"hidden": np.ones((2, 95, 4), np.float32)},
            r"hidden must have the shape \[2,96,M\], got \(2, 95, 4\)",
        ),
        (
            ckv.Full(),
            {"scores": np.ones((2, 2, 95), np.float32)},
            r"scores must have the shape \[2,2,96\], got \(2, 2, 95\)",
        ),
        (ckv.KVzap(ckv.Budget(tokens=20)), {}, r"must be \[B,K,N\], got None"),
        (ckv.SnapKV(ckv.Budget(tokens=50)), {}, "queries must be"),
        (ckv.SnapKV(ckv.Budget(tokens=32)), {}, WINDOW),
        (ckv.PyramidKV(ckv.Budget(tokens=32)), {}, WINDOW),
        (ckv.Chelsea(ckv.Budget(tokens=90, shares=(1.0, 1.0))), {}, "shares must be 1 numbers, one per layer"),
        (chelsea(ratio=0.5, outlier_heads=((3, 0),)), {}, "does not exist"),
        (
            chelsea(ratio=0.3, outlier_heads=((0, 0),)),
            {},
            "a prompt of 96 tokens has a budget below what its 1 outlier heads keep",
        ),
        (
            centroid(tokens=6),
            {},
            r"a prompt of 96 tokens has a budget of 6 rows, which must be more than sinks \+ recent = 2 \+ 4",
        ),
        (
            centroid(tokens=6),
            {"lengths": np.asarray([5, 5]), "max_new_tokens": 200},
            "a prompt of 5 tokens has a budget of 6 rows",
        ),
    ],
)
def test_requests_that_are_impossible_are_named(method, options, said):
    refused(said, ckv.compress, method, None, *tensors(), **options)


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("keys", "values", "said"),
    [
        (np.ones((2, 2, 96, 8)), np.ones((2, 2, 95, 8)), "same shape"),
        (np.ones((2, 2, 96, 8), np.int32), np.ones((2, 2, 96, 8), np.int32), "floating-point numbers, got int32"),
        (np.ones((2, 96, 8)), np.ones((2, 96, 8)), r"\[B,K,N,D\], got shape \(2, 96, 8\)"),
        ([[1.0]], None, r"keys must be an array \[B,K,N,D\], got list"),
    ],
)
def test_rows_that_are_none_are_named(keys, values, said):
    refused(said, ckv.compress, ckv.Full(), None, keys, values)


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(("query", "said"), [((2, 3, 8), "multiple of the 2 KV"), ((2, 4, 7), r"shape \[2,H,8\]")])
def test_queries_that_fit_no_layer_are_named(query, said):
    refused(said, ckv.attend, ckv.compress(ckv.Full(), None, *tensors()), jnp.ones(query))


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    "sizes", [{"batch": 1}, {"heads": 3}, {"tokens": 95}, {"dim": 4}], ids=lambda sizes: next(iter(sizes))
)
def test_queries_fit_their_keys(sizes):
    queries = tensors(**({"heads": 4} | sizes))[0]
    with pytest.raises(ValueError, match=r"queries must .* \[2,H,96,8\] with H a multiple of the 2 KV heads"):
        ckv.compress(ckv.SnapKV(ckv.Budget(tokens=40), window=4), queries, *tensors())


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e25])
@pytest.mark.parametrize("name", ["queries", "keys", "values"])
def test_numbers_that_are_none_are_named_with_their_place(name, wrong):
    arrays = dict(zip(("keys", "values", "queries"), (*tensors(), tensors(heads=4)[0]), strict=True))
    arrays[name] = arrays[name].at[1, 0, 5, 3].set(wrong)
    lengths, method = jnp.asarray([96, 60]), ckv.SnapKV(ckv.Budget(tokens=40), window=4)
    with pytest.raises(ValueError, match=rf"{name} must be finite numbers of at most 1e\+14 in size, .* at \[1, 0, 5"):
        ckv.compress(method, **arrays, lengths=lengths)


def test_numbers_that_are_traced_are_not_looked_at():
    method, (keys, values) = centroid(ratio=0.5), tensors()
    bad = keys.at[0, 0, 5, 3].set(np.nan)

    def compressed(keys):
        return ckv.compress(method, None, keys[None], keys[None]).degree

    assert jax.jit(jax.vmap(compressed))(bad).shape == (2, 1, 2, 48)
    streaming = ckv.StreamingLLM(ckv.Budget(tokens=20))
    slope = jax.grad(lambda values: ckv.compress(streaming, None, keys, values).values.sum())(values)
    assert slope.sum() == 2 * 2 * 20 * 8


@pytest.mark.parametrize("kind", [centroid, chelsea])
def test_more_rows_than_can_be_counted_are_everything(kind):
    assert ckv.compress(kind(tokens=10**23), None, *tensors()).length.tolist() == [[96, 96]] * 2
