"""Layers whose tokens see a window: what their rings hold, and that no method touches them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import saving
from clusterkv_jax.blocks.causal_attention import causal_attention
from clusterkv_jax.cache.layers import WindowCache, groups, occupancy, overflowed
from clusterkv_jax.cache.sliding_window import ring
from clusterkv_jax.checkpoints.loading import calibrated
from clusterkv_jax.decoding import decode_step
from clusterkv_jax.decoding.appending import append_step_jit
from clusterkv_jax.learned.repeated_attention import AttentionView, attend
from clusterkv_jax.models.decoder import forward
from clusterkv_jax.observation import calibrate
from clusterkv_jax.planning.abstract_request import ProgramJob
from clusterkv_jax.planning.compile_stats import few_and_more
from clusterkv_jax.runtime.sharding import named_mesh
from tests.support.numbers import relative
from tests.support.tiny import calmed, prefill, prompt, sliding, tiny

WINDOW = 12
METHOD = ckv.SnapKV(ckv.Budget(tokens=16), window=4, kernel=3, decode_interval=4)
step = jax.jit(decode_step, static_argnames=("config", "method"))
logits_of = jax.jit(forward, static_argnums=1)


def read(model: ckv.Model, texts: list[list[int]], method: Any, reserve: int = 24, **options: Any):
    # Padding is no id of the vocabulary: it is not looked at.
    return prefill(method, *texts, model=model, width=32, fill=2**20, reserve=reserve, **options)


@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_decoding_over_windows_is_the_model_itself(soft_cap):
    """Prompts shorter and longer than the window; tokens one by one, and a question of more tokens than a window."""
    model = sliding(soft_cap=soft_cap)
    texts = [prompt(1, 56), prompt(2, 56)]
    want = logits_of(model.params, model.config, jnp.asarray(texts))
    starts = np.asarray([5, 30])
    cache, logits = read(model, [text[:n] for text, n in zip(texts, starts, strict=True)], ckv.Full(), step_tokens=16)
    for i, n in enumerate(starts):
        assert relative(logits[i], want[i, n - 1]) < 1e-5
    for counts in ([16, 3], [3, 2]):
        counts = np.asarray(counts)
        fed = np.zeros((2, 16), np.int32)
        for i, (n, count) in enumerate(zip(starts, counts, strict=True)):
            fed[i, :count] = texts[i][n : n + count]
        args = model.params, model.config, ckv.Full(), cache, jnp.asarray(fed), jnp.asarray(counts, jnp.int32)
        cache, logits = append_step_jit(*args)
        starts = starts + counts
        for i, n in enumerate(starts):
            assert relative(logits[i], want[i, n - 1]) < 1e-5
    for _ in range(5):
        token = jnp.asarray([text[n] for text, n in zip(texts, starts, strict=True)], jnp.int32)
        cache, logits = step(model.params, model.config, ckv.Full(), cache, token)
        starts = starts + 1
        for i, n in enumerate(starts):
            assert relative(logits[i], want[i, n - 1]) < 1e-5
    assert not overflowed(cache)


def test_a_ring_holds_the_last_tokens_at_their_slots():
    keys = jnp.arange(9.0)[None, None, :, None] * jnp.ones((2, 1, 1, 1))
    keys = keys.at[0, :, 6:].set(jnp.nan).at[1, :, 3:].set(jnp.nan)
    layer = ring(keys, -keys, jnp.asarray([6, 3]), 4, 4)
    assert layer.rows.keys[:, 0, :, 0].tolist() == [[4, 5, 2, 3], [0, 1, 2, 0]]
    assert layer.rows.values[:, 0, :, 0].tolist() == [[-4, -5, -2, -3], [0, -1, -2, 0]]
    assert layer.rows.degree[:, 0].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert layer.rows.length[:, 0].tolist() == [4, 3]


def test_a_request_that_is_shorter_than_the_window_has_fewer_slots():
    model = sliding(window=100)
    cache, _ = read(model, [prompt(1, 30)], ckv.Full(), reserve=2)
    assert groups(cache.layers[0])[0].capacity == 34
    for _ in range(4):
        cache, logits = step(model.params, model.config, ckv.Full(), cache, jnp.asarray([3]))
        assert np.isfinite(logits).all()
    cache, logits = step(model.params, model.config, ckv.Full(), cache, jnp.asarray([3]))
    assert np.isnan(logits).all()


def test_a_model_of_windows_alone():
    """There is nothing to compress, whatever the budget."""
    model = sliding(layers=2, pattern=10)
    assert model.config.global_layers == ()
    text, method = prompt(1, 40), ckv.PyramidKV(ckv.Budget(bytes=1), window=4)
    got = ckv.generate(model, [text], method=method, max_new_tokens=6)
    assert got.tokens == ckv.generate(model, [text], max_new_tokens=6).tokens
    assert got.stats.kept_rows == []
    assert got.stats.window_bytes == got.stats.cache_bytes == got.stats.full_cache_bytes


def check_method(model: ckv.Model, method: Any) -> None:
    """Budgets count the layers that see every token; the others hold what they hold without a method."""
    model, texts = calmed(model, method), [prompt(1, 30), prompt(2, 5)]
    plain, _ = read(model, texts, ckv.Full(), reserve=8)
    cache, _ = read(model, texts, method, reserve=8)
    assert [isinstance(layer, WindowCache) for layer in cache.layers] == [True, False, True, False]
    for a, b in zip(jax.tree.leaves(plain.layers[0]), jax.tree.leaves(cache.layers[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert occupancy(cache, windows=True) == [[[12, 12], [5, 5]]] * 2
    held = np.asarray(occupancy(cache))
    assert held.shape[0] == 2
    assert (held[:, 1] == 5).all()
    if method.forgets:
        assert held[:, 0].mean() == 16, held
    alone, _ = read(model, texts[:1], method, reserve=8)
    for _ in range(6):
        cache, logits = step(model.params, model.config, method, cache, jnp.asarray([7, 8]))
        alone, logits_alone = step(model.params, model.config, method, alone, jnp.asarray([7]))
        assert relative(logits_alone[0], logits[0]) < 2e-5
    assert occupancy(cache, windows=True) == [[[12, 12], [11, 11]]] * 2


def test_a_method_leaves_windows_alone():
    check_method(sliding(), METHOD)


def test_stats_count_windows_apart():
    model, text = sliding(), prompt(1, 100)
    result = ckv.generate(model, [text], method=METHOD, questions=[prompt(2, 20)], max_new_tokens=4)
    stats, row = result.stats, 4 * (2 * 8) + 4
    assert stats.kept_rows == [[[16, 16]]] * 2
    assert stats.window_rows == [[[12, 12]]] * 2
    assert stats.window_bytes == 2 * 2 * WINDOW * row
    assert stats.full_cache_bytes == 2 * 2 * row * (WINDOW + 128 + 128)
    assert stats.cache_bytes > stats.window_bytes


def test_a_saved_cache_goes_on_as_it_was(tmp_path):
    model = sliding()
    cache, _ = read(model, [prompt(1, 30)], METHOD)
    saving.save(tmp_path / "cache", cache, model.config, METHOD)
    again = saving.load(tmp_path / "cache", model.config, METHOD)
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    bare = replace(cache, layers=(cache.layers[0].rows, *cache.layers[1:]))  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        ValueError, match=r"layers.0 of the cache must be that of the model, one with a window of 12\.$"
    ):
        saving.save(tmp_path / "other", bare, model.config, METHOD)


def test_a_plan_counts_windows_as_windows():
    model = sliding()
    cache, _ = read(model, [prompt(1, 30)], METHOD, reserve=24)
    job = ProgramJob(model.config, METHOD, named_mesh("model=1", jax.devices()[:1]), 1, 32, 24)

    def shapes(tree):
        return [x.shape for x in jax.tree.leaves(tree)]

    windows = [job.cache.layers[i] for i in model.config.sliding_layers]
    assert shapes(windows) == shapes([cache.layers[i] for i in model.config.sliding_layers])
    assert jax.tree.structure(job.cache) == jax.tree.structure(cache)
    gemma = replace(model.config, num_layers=26, sliding_layers=tuple(i for i in range(26) if (i + 1) % 6))
    assert few_and_more(gemma) == (6, 12)
    assert few_and_more(model.config) == (2, 4)
    assert few_and_more(tiny(layers=3).config) == (2, 3)


def test_a_calibration_is_of_the_layers_that_methods_compress():
    model = sliding()
    texts = [prompt(i, 300) for i in range(2)]
    found = calibrate(model, texts, ratio=0.25)
    assert np.shape(found.head_shares) == np.shape(found.outlier_share) == (2, 2)
    assert calibrated(model, found).calibration is found
    with pytest.raises(ValueError, match=r"2 layers of 2 KV heads; this model has 4 of 2\.$"):
        calibrated(tiny(layers=4), found)
    with pytest.raises(ValueError, match=r"^Every layer of sliding has a window"):
        calibrate(sliding(pattern=10), texts)


@pytest.mark.parametrize(("window", "soft_cap"), [(7, None), (20, 0.5), (10**6, 0.5)])
def test_a_repetition_looks_as_far_as_the_window(window, soft_cap):
    """What is fed behind a context attends as if all had been read at once."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 30, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    whole = causal_attention(q, k, v, window=window, soft_cap=soft_cap)
    rows = [jnp.swapaxes(x[:, part], 1, 2) for part in (slice(18), slice(18, None)) for x in (k, v)]
    sight = AttentionView(6, 2, window, soft_cap)
    counts, below = jnp.full(2, 18), jnp.zeros((2, 12))
    got, _ = attend(q[:, 18:], tuple(rows), below, counts, jnp.int32(12), sight)
    assert relative(got, whole[:, 18:]) < 1e-5


def test_an_engine_answers_as_generate_does():
    """Slots of requests of all lengths: rings that have come round beside those that have not."""
    model = sliding()
    texts, questions = [prompt(1, 60), prompt(2, 8)], [prompt(3, 20), prompt(4, 3)]
    engine = ckv.Engine(model, method=METHOD, slots=2, max_tokens=128, reserve=32)
    handles = [engine.add(*pair, max_new_tokens=8) for pair in zip(texts, questions, strict=True)]
    for handle, text, question in zip(handles, texts, questions, strict=True):
        want = ckv.generate(model, [text], method=METHOD, questions=[question], max_new_tokens=8)
        got = handle.result()
        assert got.tokens == want.tokens
        assert got.stats.window_rows == want.stats.window_rows
