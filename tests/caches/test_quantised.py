"""Caches in 8 and 4 bits: what they hold and cost, how near they stay, and that no row is quantised twice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.cache.attention import attend_cache
from clusterkv_jax.cache.layers import LayerCache, StepInputs, dequantised_rows, groups, nbytes
from clusterkv_jax.kernels.quantised import CODES, Quantised, dequantised, row_bytes
from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.driver import step_layer
from clusterkv_jax.methods.request import GroupPlan
from tests.support.methods import every_method, fitted_method, named, page_method
from tests.support.tiny import prefill, prompt, tiny

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
    cache, _ = prefill(method, prompt(1, 60), max_new_tokens=8)
    slots = groups(cache.layers[0])[0].capacity
    config = model.config
    rows = config.num_layers * config.num_kv_heads * slots
    mean = config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert nbytes(cache) == rows * (2 * row_bytes(name, config.head_dim) + 4) + mean
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
    np.testing.assert_allclose(out, ckv.attend(dequantised_rows(layer), queries[:, :, -1]), rtol=1e-4, atol=1e-5)


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

    def mean(x, layer):
        return jnp.sum(dequantised(x) * layer.degree[..., None], axis=2) / 80

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
    cache, _ = prefill(method, prompt(1, 60), max_new_tokens=8)
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


# --- what keys of a head have in common ---

TOKENS = (3, 1)  # that enter one after the other
OFFSETS = st.tuples(st.sampled_from([0.0, 40.0, 600.0]), st.integers(0, 3))
STORES = [ckv.Full(), ckv.CentroidKV(BUDGET, sinks=2, recent=4, chunk=16), page_method(BUDGET, 4)]
STORES += [ckv.StreamingLLM(BUDGET), ckv.CentroidKV(ckv.Budget(tokens=24, shares=((0.5, 1.5),)), 2, 4, chunk=16)]


def with_offset(keys, size, seed):
    """Keys with a common offset of this norm in the slowest quarter of the channels, one for each head."""
    direction = np.random.default_rng(seed).normal(size=(1, keys.shape[1], 1, keys.shape[3] // 4))
    direction *= size / np.linalg.norm(direction, axis=-1, keepdims=True)
    return keys.at[..., -direction.shape[-1] :].add(direction)


def error(layer, exact, queries):
    out, expected = (attend_cache(x, queries)[0] for x in (layer, exact))
    return float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))


@settings(max_examples=8)
@given(offset=OFFSETS, name=st.sampled_from([*CODES]), which=st.sampled_from([0, 3]))
def test_an_offset_of_all_keys_costs_nothing(offset, name, which):
    """Rows of these methods are those of any keys; a merge would weigh other angles."""
    queries, keys, values = tensors()
    queries = jnp.swapaxes(queries[:, :, -2:], 1, 2)
    errors = []
    for moved in (keys, with_offset(keys, *offset)):
        exact, layer = (ckv.compress(stored(STORES[which], x), None, moved, values) for x in (None, name))
        errors.append(error(layer, exact, queries))
    assert errors[1] <= 1.1 * errors[0] + 1e-3


@pytest.mark.parametrize(("method", "name"), [*((method, "int8") for method in STORES), (STORES[0], "int4")])
def test_steps_over_keys_with_an_offset_are_those_over_their_numbers(method, name):
    """Tokens enter one or several at a time, and sinks take their share: all parts of a softmax are shifted alike."""
    queries, keys, values = tensors()
    keys = with_offset(keys, 60.0, 1)
    args, one_step = (queries, keys, values), jax.jit(step_layer, static_argnums=0)
    exact, layer = (ckv.compress(stored(method, x), *args, max_new_tokens=20) for x in (None, name))
    memory = {"budget": jnp.full(2, 24)} if isinstance(method, ckv.StreamingLLM) else None
    state = (memory,) * len(groups(layer))
    for place, count in enumerate(TOKENS):
        q, k, v = (jnp.swapaxes(x[:, :, 20 * place : 20 * place + count], 1, 2) for x in (queries, keys, values))
        positions = 80 + place + jnp.arange(count)[None].repeat(2, 0)
        real, sinks = jnp.ones((2, count), bool), jnp.arange(4.0)
        new = StepInputs(q, k, v, positions, real, sink_logits=sinks)
        (out, layer, _), (expected, exact, _) = (one_step(method, x, state, new) for x in (layer, exact))
        np.testing.assert_allclose(out, expected, atol={"int8": 0.1, "int4": 0.9}[name])


@pytest.mark.parametrize("kind", [ckv.CentroidKV, ckv.GravityKV])
def test_rows_are_merged_by_their_own_angles_and_lengths(kind):
    """Not by those of what is left of keys without their mean."""
    _, keys, values = tensors()
    layer = ckv.compress(ckv.Full(cache_dtype="int8"), None, with_offset(keys, 4.0, 1), values)
    method = kind(ckv.Budget(tokens=40), sinks=2, recent=4, chunk=16)
    after = []
    for cache in (layer, dequantised_rows(layer)):
        plan = GroupPlan((), cache.capacity)
        rows = Rows(cache, jnp.full(2, 60), jnp.full(2, 80), {"rounds": jnp.zeros(2, jnp.int32)}, plan=plan)
        after.append(jax.jit(method.recompress)(rows).cache)
    np.testing.assert_array_equal(after[0].positions, after[1].positions)
    np.testing.assert_array_equal(after[0].degree, after[1].degree)
    assert after[0].length.tolist() == [[60, 60]] * 2
    np.testing.assert_allclose(dequantised_rows(after[0]).keys, after[1].keys, atol=0.03)


def test_scores_that_are_capped_are_stored_whole():
    """tanh of a score less a constant is another one."""
    model = dataclasses.replace(tiny(), config=dataclasses.replace(tiny().config, soft_cap=20.0))
    caches = (
        prefill(ckv.Full(cache_dtype="int8"), prompt(1, 60), model=one, max_new_tokens=8)[0] for one in (None, model)
    )
    means = [groups(cache.layers[0])[0].key_mean for cache in caches]
    assert means[0].shape == (1, 2, 1, tiny().config.head_dim)
    assert means[1] is None
