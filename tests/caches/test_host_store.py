"""ClusterKV with its rows in host memory does what it does with them on the device."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.cache import host_store
from clusterkv_jax.cache.layers import take_sequences
from clusterkv_jax.evaluation import batching, responses, runner
from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from clusterkv_jax.methods.families.recall import recalled_rows
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.runtime import host_memory
from clusterkv_jax.runtime.sharding import auto_mesh, param_shardings
from tests.support import runs
from tests.support.layers import compress as compress_layer
from tests.support.tiny import extend, prompt, tiny
from tests.support.tiny import prefill as tiny_prefill

INTERVAL, SINKS, STEPS = 8, 2, 20
DEVICE = ckv.ClusterKV(
    ckv.Budget(ratio=0.5), sinks=SINKS, tokens_per_cluster=4, interval=INTERVAL, interval_clusters=2, dense_layers=1
)
HOST = dataclasses.replace(DEVICE, store="host")
PROMPTS, QUESTIONS = [prompt(1, 48), prompt(2, 33), prompt(3, 40)], [prompt(5, 7), prompt(6, 3), prompt(7, 5)]


def generate(method, rows=slice(None), **options):
    return ckv.generate(
        tiny(), PROMPTS[rows], method=method, questions=QUESTIONS[rows], max_new_tokens=STEPS, **options
    )


def prefill(*args, **options):
    return tiny_prefill(*args, width=48, **options)[0]


@pytest.fixture(scope="module")
def by_steps():
    """What is generated with R = 0, 1, 2."""
    return [generate(dataclasses.replace(HOST, cached_steps=steps)) for steps in range(3)]


def test_tokens_are_those_of_the_device_store_whatever_is_cached(by_steps):
    expected = generate(DEVICE)
    assert expected.stats.host_bytes == expected.stats.moved_bytes == expected.stats.row_hit_rate == 0
    for result in by_steps:
        assert result.tokens == expected.tokens
        assert result.stats.recalled_rows == expected.stats.recalled_rows
        assert result.stats.kept_rows == expected.stats.kept_rows


def test_the_more_is_cached_the_less_is_moved(by_steps):
    none, one, two = (result.stats for result in by_steps)
    assert none.cluster_hit_rate == none.row_hit_rate == 0
    assert 0 < one.cluster_hit_rate < two.cluster_hit_rate < 1
    assert 0 < one.row_hit_rate < two.row_hit_rate < 1
    # Each of four query heads recalls its budget less the sinks, 2 x 8 floats a row, at every token but the last.
    recalled = sum((n // 2 - SINKS) * (STEPS - 1 + q) for n, q in ((48, 7), (33, 3), (40, 5)))
    assert none.moved_bytes == 4 * recalled * 2 * 8 * 4
    for stats in (one, two):
        assert stats.moved_bytes == pytest.approx(none.moved_bytes * (1 - stats.row_hit_rate))


def test_a_row_in_a_batch_is_the_row_alone(by_steps):
    assert generate(HOST, slice(1, 2)).tokens[0] == by_steps[1].tokens[1]


def test_stats_count_what_lies_on_the_host(by_steps):
    stats = by_steps[1].stats
    # One of two layers, with all its slots.
    assert stats.host_bytes == stats.full_cache_bytes / 2
    assert stats.host_bytes < stats.cache_bytes


def test_clustered_rows_enter_the_store_in_place_and_leave_the_device():
    caches = {method: prefill(method, PROMPTS[0], PROMPTS[1]) for method in (DEVICE, HOST)}
    shapes = [x.shape for x in jax.tree.leaves(caches[HOST])]
    for i, token in enumerate(prompt(9, INTERVAL + 3)):
        for method, cache in caches.items():
            caches[method] = extend(method, cache, [[token], [token]])[0]
        layer, state = caches[HOST].layers[1], caches[HOST].state[1][0]
        indexed = np.asarray([48, 33]) + (INTERVAL if i >= INTERVAL - 1 else 0)
        np.testing.assert_array_equal(state["indexed"], indexed)
        np.testing.assert_array_equal(np.asarray(layer.degree).sum(-1), np.stack([indexed] * 2, axis=1))
    assert [x.shape for x in jax.tree.leaves(caches[HOST])] == shapes
    every = caches[DEVICE].layers[1]
    for b, count in enumerate(indexed):
        for name in ("keys", "values"):
            rows = np.asarray(getattr(every, name))[b]
            np.testing.assert_allclose(np.asarray(getattr(layer, name))[b, :, :count], rows[:, :count], atol=1e-5)
            resident = np.asarray(state[f"resident_{name}"])[b]
            np.testing.assert_allclose(resident[:, :SINKS], rows[:, :SINKS], atol=1e-5)
            np.testing.assert_allclose(resident[:, SINKS:][:, :3], rows[:, count : count + 3], atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 17])
def test_prompts_shorter_than_the_sinks_grow_as_on_the_device(tokens):
    method = dataclasses.replace(DEVICE, budget=ckv.Budget(tokens=40), sinks=16, per_query_head=False)
    on_host = dataclasses.replace(method, store="host")
    device, host = (prefill(m, prompt(1, tokens), prompt(2, 30), reserve=400) for m in (method, on_host))
    for token in prompt(9, 28):
        device, expected = extend(method, device, [[token], [token]])
        host, logits = extend(on_host, host, [[token], [token]])
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        rows, union = recalled_rows(device)
        assert (rows, union) == recalled_rows(host)
        # Sinks that nothing fills yet are not counted.
        assert max(n for layer in rows if layer for n in layer[0]) <= int(device.position[0])


def test_more_tokens_than_the_device_has_room_for_are_not_dropped_without_a_sign():
    cache = prefill(HOST, PROMPTS[0], max_new_tokens=64, step_tokens=4)
    good, logits = extend(HOST, cache, [prompt(4, 4)])
    assert bool(jnp.isfinite(logits).all())
    assert bool(jnp.isnan(extend(HOST, good, [prompt(4, 12)])[1]).all())
    full, _ = extend(HOST, prefill(HOST, PROMPTS[0], max_new_tokens=4), [prompt(4, 4)])
    padded, _ = extend(HOST, full, jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32))
    np.testing.assert_array_equal(padded.layers[1].length, 52)
    assert bool(jnp.isnan(extend(HOST, full, [[1]])[1]).all())


def test_padding_never_reaches_the_store():
    rng = np.random.default_rng(0)
    queries, keys, values = (jnp.asarray(rng.normal(size=(2, h, 64, 8)), jnp.float32) for h in (4, 2, 2))
    real = (np.arange(64) < np.asarray([64, 37])[:, None])[:, None, :, None]
    request = RequestShape(np.arange(1, 65), 2, 2, max_new_tokens=16, reserve=16)
    lengths = np.asarray([64, 37])

    def compressed(fill):
        arrays = [jnp.where(real, x, fill) for x in (queries, keys, values)]
        return compress_layer(HOST, arrays, lengths, request, layer=1)[:2]

    for result, expected in zip(*(jax.tree.leaves(compressed(fill)) for fill in (jnp.nan, 0.0)), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_store_comes_back_from_disk(tmp_path):
    cache = prefill(HOST, PROMPTS[0], PROMPTS[1])
    cache, _ = extend(HOST, cache, [[1], [2]])
    ckv.save_cache(tmp_path / "book", cache, tiny().config, HOST)
    copy = ckv.load_cache(tmp_path / "book", tiny().config, HOST)
    assert jax.tree.structure(copy) == jax.tree.structure(cache)
    np.testing.assert_array_equal(extend(HOST, copy, [[3], [4]])[1], extend(HOST, cache, [[3], [4]])[1])
    with pytest.raises(ValueError, match="was made by"):
        ckv.load_cache(tmp_path / "book", tiny().config, DEVICE)


def test_a_decode_loop_is_compiled_once(tmp_path):
    """What comes out of a program with host memory is bound to its device; bound later, it would compile anew."""
    cache, logits = tiny_prefill(HOST, PROMPTS[0], max_new_tokens=8)
    ckv.save_cache(tmp_path / "book", cache, tiny().config, HOST)
    copy = ckv.load_cache(tmp_path / "book", tiny().config, HOST)
    assert all(x.committed for x in jax.tree.leaves((cache, logits, copy)))


def test_batch_rows_are_taken_where_the_store_lies():
    cache = prefill(HOST, PROMPTS[0], PROMPTS[1])
    on_host = dataclasses.replace(cache, layers=jax.device_put(cache.layers, jax.memory.Space.Host))
    rows = jnp.asarray([1, 0, 1])
    part = take_sequences(on_host, rows)
    assert part.layers[1].keys.sharding.memory_kind == "pinned_host"
    assert part.position.sharding.memory_kind == "device"
    for result, expected in zip(jax.tree.leaves(part), jax.tree.leaves(take_sequences(cache, rows)), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_budget_that_covers_the_prompt_needs_no_host():
    cache = prefill(dataclasses.replace(HOST, budget=ckv.Budget(ratio=1.0)), PROMPTS[0])
    assert cache.state == ((None,), (None,))
    assert host_store.host_bytes(cache) == 0


def test_tokens_on_a_mesh_are_those_of_one_device():
    model = tiny(kv_heads=4)
    alone = ckv.generate(model, PROMPTS[:2], method=HOST, max_new_tokens=INTERVAL + 2)
    mesh = auto_mesh(jax.make_mesh((2, 4), ("data", "model")))
    params = jax.device_put(model.params, param_shardings(abstract(model.config), mesh))
    model = dataclasses.replace(model, params=params, mesh=mesh)
    many = ckv.generate(model, PROMPTS[:2], method=HOST, max_new_tokens=INTERVAL + 2)
    assert many.tokens == alone.tokens
    assert many.stats.moved_bytes == alone.stats.moved_bytes


@given(st.data())
def test_find_is_where_a_number_stands(data):
    slots = 9
    numbers = st.integers(-1, slots - 1)
    among = data.draw(st.lists(numbers, max_size=8))
    rows = data.draw(st.lists(numbers, min_size=1, max_size=8))
    result = host_store.find(*(jnp.asarray(x, jnp.int32).reshape(1, 1, -1) for x in (rows, among)), slots)
    for row, place in zip(rows, np.asarray(result)[0, 0].tolist(), strict=True):
        assert among[place] == row if place >= 0 else row == -1 or row not in among


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"store": "disk"}, r'store must be "device" or "host", got .disk.'),
        ({"cached_steps": -1}, "cached_steps must be a whole number of at least 0, got -1"),
        ({"cached_steps": 1.5}, "cached_steps must be a whole number of at least 0, got 1.5"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HOST, **change)


def test_a_budget_smaller_than_the_sinks_is_refused():
    method = dataclasses.replace(HOST, budget=ckv.Budget(tokens=SINKS))
    with pytest.raises(ValueError, match="sinks"):
        prefill(method, PROMPTS[0])


def test_an_evaluation_that_was_cut_off_ends_as_an_unbroken_one(tmp_path):
    """Interrupted and out of memory, torn in a line too; and with the scores of the device store."""
    contexts = [tuple(prompt(i, n)) for i, n in enumerate((60, 48, 52))]
    jobs = [
        batching.Job(i, Case(f"nll/{i}", "nll", metric="nll"), EncodedPrompt(context, (), tuple(prompt(9 + i, 6))))
        for i, context in enumerate(contexts)
    ]
    calls = []

    def answer(method, prompts, *rest):
        return responses.likelihoods(tiny(), method, prompts)

    def broken(*operands):
        calls.append(operands)
        if len(calls) in (2, 3):
            raise (KeyboardInterrupt, MemoryError)[len(calls) - 2]
        return answer(*operands)

    def go(name, respond, method=HOST):
        entries, possible = [batching.MethodEntry("clusterkv", "0.5", method)], partial(responses.possible, tiny())
        folder, config = tmp_path / name, {"methods": {"clusterkv@0.5": repr(method)}}
        return runs.run(folder, config, {}, jobs, entries, respond, batch_size=1, possible=possible)

    for error in (KeyboardInterrupt, MemoryError):
        with pytest.raises(error):
            go("cut off", broken)
    with (tmp_path / "cut off" / runner.RESULTS).open("ab") as file:
        file.write(b'{"method": "clust')
    continuation, unbroken = go("cut off", broken), go("unbroken", answer)
    assert len(calls) == 2 + len(jobs)
    numbers = [[(line["id"], line["score"], line["rows"]) for line in lines] for lines in (continuation, unbroken)]
    assert numbers[0] == numbers[1]
    assert [line["score"] for line in go("device", answer, DEVICE)] == pytest.approx([x[1] for x in numbers[0]])
    with pytest.raises(ValueError, match="holds a run with methods"):
        go("cut off", answer, DEVICE)
    small = dataclasses.replace(HOST, budget=ckv.Budget(tokens=SINKS))
    with pytest.raises(ValueError, match="is impossible for every prompt"):
        go("small", answer, small)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(("platform", "mesh"), [("tpu", 1), ("gpu", 2)])
def test_where_there_is_no_host_store_one_sentence_says_so(monkeypatch, platform, mesh):
    monkeypatch.setattr(host_memory, "platform", lambda: platform)
    with (
        jax.set_mesh(auto_mesh(jax.make_mesh((mesh,), ("model",), devices=jax.devices()[:mesh]))),
        pytest.raises(ValueError, match=r'^store="host" must run on .*; take store="device" there\.$'),
    ):
        HOST.check(np.asarray([48]), RequestShape(np.asarray([48]), 2, 2, reserve=8))
