"""Caches in 8 and 4 bits: what they hold and cost, how near they stay, and that no row is quantised twice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.cache import LayerCache, groups, in_numbers, nbytes
from clusterkv_jax.kernels.quantised import CODES, Quantised, dequantised, row_bytes
from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.request import GroupPlan
from tests.support.methods import every_method, fitted_method, named, page_method
from tests.support.tiny import prompt, tiny

BUDGET = ckv.Budget(tokens=24)
# Between them they do all that methods do with rows; the others are combinations of it.
DIFFERENT = ("CentroidKV", "AdaKV", "KeyDiff", "H2O", "CaM")
METHODS = [x for x in every_method(BUDGET) if named(x) in DIFFERENT]
METHODS += [ckv.Full(), fitted_method(BUDGET), ckv.StreamingLLM(BUDGET, rerotate=True)]


def stored(method, name):
    return dataclasses.replace(method, cache_dtype=name)


def answer(method, tokens=6):
    return ckv.generate(tiny(), [prompt(1, 60), prompt(2, 45)], method=method, max_new_tokens=tokens)


def tensors(seed=0, rows=80, dim=16):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(2, heads, rows, dim)), jnp.float32) for heads in (4, 2, 2)]


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_every_method_keeps_as_many_rows_in_fewer_bytes(method):
    plain, coded = answer(method), answer(stored(method, "int8"))
    assert coded.stats.kept_rows == plain.stats.kept_rows
    assert coded.stats.full_cache_bytes == plain.stats.full_cache_bytes
    assert coded.stats.cache_bytes < 0.6 * plain.stats.cache_bytes
    # 127 steps of a row's largest number each way: the same words, but where two are equally likely.
    same = [a == b for x, y in zip(plain.tokens, coded.tokens, strict=True) for a, b in zip(x, y, strict=True)]
    assert np.mean(same) >= 0.4


@pytest.mark.parametrize("name", CODES)
def test_bytes_are_those_of_codes_scales_and_degrees(name):
    method = stored(ckv.SnapKV(BUDGET, window=4), name)
    model = tiny()
    tokens = jnp.asarray([prompt(1, 60)])
    cache, _ = ckv.prefill(model.params, model.config, method, tokens, jnp.asarray([60]), max_new_tokens=8)
    slots = groups(cache.layers[0])[0].capacity
    config = model.config
    rows = config.num_layers * config.num_kv_heads * slots
    assert nbytes(cache) == rows * (2 * row_bytes(name, config.head_dim) + 4)
    assert row_bytes(name, config.head_dim) == config.head_dim * (0.5 if name == "int4" else 1) + 4


def test_a_budget_of_bytes_buys_more_rows():
    whole = 24 * (2 * 4 * 16 + 4) * 4
    method = ckv.SnapKV(ckv.Budget(bytes=whole), window=4)
    queries, keys, values = tensors()
    plain, coded = (ckv.compress(x, queries, keys, values, num_layers=2) for x in (method, stored(method, "int8")))
    assert int(plain.length[0, 0]) == 24
    assert int(coded.length[0, 0]) == whole // ((2 * (16 + 4) + 4) * 4)


@pytest.mark.parametrize("name", CODES)
def test_attention_is_that_over_the_numbers(name):
    queries, keys, values = tensors()
    layer = ckv.compress(stored(ckv.CentroidKV(BUDGET, sinks=2, recent=4, chunk=16), name), None, keys, values)
    assert isinstance(layer.keys, Quantised)
    out = ckv.attend(layer, queries[:, :, -1])
    np.testing.assert_allclose(out, ckv.attend(in_numbers(layer), queries[:, :, -1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["int8"])
def test_rows_that_stay_do_not_change(name):
    """A recompression quantises the rows that it merges; all others keep their codes, to the bit."""
    _, keys, values = tensors()
    method = stored(ckv.CentroidKV(ckv.Budget(tokens=40), sinks=2, recent=4, chunk=16), name)
    before = ckv.compress(method, None, keys, values)
    budget, position = jnp.asarray([30, 30]), jnp.asarray([80, 80])
    rows = Rows(before, budget, position, {"rounds": jnp.ones(2, jnp.int32)}, plan=GroupPlan((), 40))
    after = jax.jit(method.recompress)(rows).cache
    assert after.length.tolist() == [[30, 30]] * 2
    merged = 0
    for row, head, slot in np.ndindex(2, 2, 30):
        was = int(np.argmax(before.positions[row, head] == after.positions[row, head, slot]))
        if after.degree[row, head, slot] == before.degree[row, head, was]:
            for x, y in zip(
                *map(jax.tree.leaves, ((before.keys, before.values), (after.keys, after.values))), strict=True
            ):
                np.testing.assert_array_equal(np.asarray(x[row, head, was]), np.asarray(y[row, head, slot]))
        else:
            merged += 1
    assert 0 < merged <= 2 * 2 * 10
    mean = lambda x, layer: jnp.sum(dequantised(x) * layer.degree[..., None], axis=2) / 80  # noqa: E731
    np.testing.assert_allclose(mean(after.keys, after), mean(before.keys, before), atol=0.05)


@pytest.mark.parametrize("name", ["int4", "float8_e4m3"])
def test_evictions_never_touch_codes(name):
    """Again and again: what a row was when it was written, it is at the end."""
    _, keys, values = tensors()
    layer = ckv.compress(stored(ckv.Full(), name), None, keys, values)
    method = stored(page_method(ckv.Budget(tokens=40), 4), name)
    first = layer
    for budget in (60, 40, 20):
        rows = Rows(layer, jnp.full(2, budget), jnp.full(2, 80), {}, plan=GroupPlan((), layer.capacity))
        layer = jax.jit(method.recompress)(rows).cache
    at = np.asarray(layer.positions)[:, :, :20]
    for x, y in zip(*map(jax.tree.leaves, ((first.keys, first.values), (layer.keys, layer.values))), strict=True):
        x, y = np.asarray(x), np.asarray(y)[:, :, :20]
        np.testing.assert_array_equal(np.take_along_axis(x, at[..., None] if x.ndim == 4 else at, axis=2), y)


@pytest.mark.parametrize("name", CODES)
def test_a_quantised_cache_comes_back_from_disk(tmp_path, name):
    model, method = tiny(), stored(ckv.Full() if name != "int4" else ckv.AdaKV(BUDGET, window=4, kernel=3), name)
    tokens, lengths = jnp.asarray([prompt(1, 60)]), jnp.asarray([60])
    cache, _ = ckv.prefill(model.params, model.config, method, tokens, lengths, max_new_tokens=8)
    ckv.save_cache(tmp_path / "book", cache, model.config, method)
    copy = ckv.load_cache(tmp_path / "book", model.config, method)
    assert jax.tree.structure(copy) == jax.tree.structure(cache)
    for result, expected in zip(jax.tree.leaves(copy), jax.tree.leaves(cache), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(result).view(np.uint8), np.asarray(expected).view(np.uint8))
    with pytest.raises(ValueError, match=r"was made by .*, not by "):
        ckv.load_cache(tmp_path / "book", model.config, stored(method, None))


def test_without_the_option_a_method_is_named_as_before():
    assert repr(ckv.Full()) == "Full()"
    assert repr(ckv.Full(cache_dtype="int8")) == "Full(cache_dtype='int8')"
    assert repr(ckv.H2O(BUDGET)) == f"H2O(budget={BUDGET!r}, recent=None, normalize=False)"
    assert ckv.Full() != ckv.Full(cache_dtype="int8")
    assert LayerCache(*(jnp.ones((1, 1, 2, 4)),) * 2, jnp.ones((1, 1, 2)), jnp.ones((1, 1), jnp.int32)).capacity == 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ckv.Full(cache_dtype="int3"), "Full cache_dtype must be one of 'int8', 'float8_e4m3', 'int4' or None"),
        (lambda: ckv.Quest(BUDGET, cache_dtype="int8"), "Quest cache_dtype must be None: rows that are recalled"),
        (
            lambda: ckv.Composed(ckv.SnapKV(BUDGET, cache_dtype="int8"), ckv.H2O(BUDGET)),
            "Composed prefill must be a method without a cache_dtype of its own",
        ),
        (
            lambda: ckv.Matched(ckv.SnapKV(BUDGET, cache_dtype="int8")),
            "Matched method must be one without a cache_dtype",
        ),
        (
            lambda: ckv.compress(ckv.Full(cache_dtype="int4"), None, *(jnp.ones((1, 1, 4, 24)),) * 2),
            "head dim that is a power of two, got 24",
        ),
    ],
)
def test_what_cannot_be_stored_so_is_said_in_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
