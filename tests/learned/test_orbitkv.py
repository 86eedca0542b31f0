"""OrbitKV: its rule written out, what happens to scores while decoding, and answers of the demo model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import groups, take_slots
from clusterkv_jax.decoding import extend_step
from tests.support.tiny import prompt, taught, tiny


def tensors(seed, rows=120, heads=2, batch=1, dim=8):
    rng = np.random.default_rng(seed)
    keys, values = (jnp.asarray(rng.normal(size=(batch, heads, rows, dim)), jnp.float32) for _ in range(2))
    return keys, values, jnp.asarray(rng.normal(size=(batch, heads, rows)), jnp.float32)


def test_the_best_stay_and_the_others_merge_by_the_rule_of_gravity():
    keys, values, scores = tensors(1)
    method = ckv.OrbitKV(ckv.Budget(tokens=40), sinks=3, recent=5, merged=0.25)
    layer = ckv.compress(method, None, keys, values, scores=scores)
    for head in range(2):
        order = 3 + np.argsort(-np.asarray(scores)[0, head, 3:-5], kind="stable")
        single = sorted([*range(3), *order[:24], *range(115, 120)])  # 40 - 3 - 5 - 8
        others = np.setdiff1d(np.arange(120), single)
        alone = take_slots(groups(ckv.compress(ckv.Full(), None, keys, values))[0], jnp.asarray(others)[None, None])
        gravity = ckv.GravityKV(ckv.Budget(tokens=8), sinks=0, recent=0)
        heavy = ckv.compress(gravity, None, alone.keys[:, head : head + 1], alone.values[:, head : head + 1])
        rows = {int(p): ("single", p) for p in single}
        rows |= {int(others[int(p)]): ("centroid", i) for i, p in enumerate(np.asarray(heavy.positions)[0, 0])}
        positions = np.asarray(layer.positions)[0, head]
        assert positions.tolist() == sorted(rows)
        for slot, position in enumerate(positions.tolist()):
            kind, at = rows[position]
            key = keys[0, head, at] if kind == "single" else heavy.keys[0, 0, at]
            value = values[0, head, at] if kind == "single" else heavy.values[0, 0, at]
            np.testing.assert_allclose(layer.keys[0, head, slot], key, atol=1e-6)
            np.testing.assert_allclose(layer.values[0, head, slot], value, atol=1e-6)
            assert layer.degree[0, head, slot] == (1 if kind == "single" else heavy.degree[0, 0, at])


@pytest.mark.parametrize(
    ("budget", "shares", "recent"),
    [
        (40, (1.0, 1.0), (5, 5)),  # a 16th is less
        (160, (1.0, 1.0), (10, 10)),
        (160, (1.5, 0.5), (10, 10)),
        (320, (1.95, 0.05), (20, 11)),  # a head of 16 rows has 11 beside its sinks and one row
    ],
)
def test_a_16th_of_the_mean_budget_stays_at_the_end_of_each_head(budget, shares, recent):
    rows = 700
    keys, values, scores = tensors(2, rows)
    scores = scores.at[:, :, -40:].add(-100)  # none of them stays for its score
    method = ckv.KVzap(ckv.Budget(tokens=budget, shares=(shares,)), recent=5, recent_share=1 / 16)
    layer = ckv.compress(method, None, keys, values, scores=scores)
    for head, last in enumerate(recent):
        (kept,) = _positions(layer, head)
        assert len(kept) == round(budget * shares[head])
        assert set(range(rows - last, rows)) <= kept
        assert rows - last - 1 not in kept


def _positions(layer, head):
    """Of a head's rows in each sequence."""
    group, at = [(group, i) for group in groups(layer) for i in range(group.length.shape[1])][head]
    real = np.asarray(group.degree)[:, at] > 0
    return [set(np.asarray(group.positions)[i, at][kept].tolist()) for i, kept in enumerate(real)]


@settings(deadline=None)
@given(
    lengths=st.tuples(st.integers(8, 60), st.integers(8, 60)),
    choice=st.sampled_from([(7, 0.0), (12, 0.15), (30, 0.5), (50, 1.0)]),
    seed=st.integers(0, 9),
)
def test_no_token_is_forgotten_and_the_budget_is_met(lengths, choice, seed):
    rows, (budget, merged) = 60, choice
    keys, values, scores = tensors(seed, rows, batch=2)
    method = ckv.OrbitKV(ckv.Budget(tokens=budget), sinks=2, recent=4, merged=merged)
    lengths = np.asarray(lengths)
    layer = ckv.compress(method, None, keys, values, lengths, scores=scores)
    assert layer.length.tolist() == [[min(budget, n)] * 2 for n in lengths.tolist()]
    assert layer.degree.sum(-1).tolist() == [[n] * 2 for n in lengths.tolist()]
    centroids = np.asarray((layer.degree > 1).sum(-1))
    assert (centroids <= max(1, int(merged * (budget - 6)))).all()
    total = jnp.einsum("bkc,bkcd->bkd", layer.degree, layer.values)
    real = (np.arange(rows) < lengths[:, None])[:, None, :, None]
    np.testing.assert_allclose(total, jnp.sum(jnp.where(real, values, 0), axis=2), atol=1e-4)


def run(method, tokens, steps):
    model = taught()
    ids, lengths = jnp.asarray([tokens], jnp.int32), jnp.asarray([len(tokens)])
    cache, _ = ckv.prefill(model.params, model.config, method, ids, lengths, max_new_tokens=len(steps))
    step = jax.jit(extend_step, static_argnums=(1, 2))
    for token in steps:
        cache, _ = step(model.params, model.config, method, cache, jnp.asarray([[token]]), jnp.asarray([1]))
    return cache


@pytest.mark.parametrize("kind", [ckv.KVzap, ckv.OrbitKV])
def test_rows_take_their_scores_along(kind):
    """Single rows have the score of their position, of the prompt as of what was appended, in whatever slot."""
    model, text = taught(), prompt(1, 60)
    more = prompt(2, 11)
    interval = {"decode_interval": 4} if kind is ckv.KVzap else {"interval": 4}
    whole = run(kind(ckv.Budget(tokens=200), sinks=2, recent=4, **interval), text, more)
    few = run(kind(ckv.Budget(tokens=20), sinks=2, recent=4, **interval), text, more)
    assert int(few.layers[0].length[0, 0]) < 24
    # The first layer reads the tokens alone, so compression does not change its scores.
    expected, scores = (np.asarray(cache.state[0][0]["scores"])[0] for cache in (whole, few))
    for head in range(model.config.num_kv_heads):
        layer = few.layers[0]
        for slot in range(int(layer.length[0, head])):
            if layer.degree[0, head, slot] == 1:
                position = int(layer.positions[0, head, slot])
                assert scores[head, slot] == pytest.approx(expected[head, position], abs=1e-5)


@pytest.mark.parametrize("kind", [ckv.KVzap, ckv.OrbitKV])
def test_scores_of_a_question_are_those_of_its_tokens(kind):
    """Several tokens at once, padding behind them, in sequences of their own lengths."""
    model, texts, questions = taught(), [prompt(1, 60), prompt(3, 51)], [prompt(2, 5), prompt(4, 3)]
    method = kind(
        ckv.Budget(tokens=200), sinks=2, recent=4, **{"decode_interval" if kind is ckv.KVzap else "interval": 64}
    )
    ids = np.zeros((2, 60), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    asked = jnp.asarray([questions[0], questions[1] + [0, 0]], jnp.int32)
    cache, _ = ckv.prefill(
        model.params, model.config, method, ids, np.asarray([60, 51]), max_new_tokens=8, step_tokens=5
    )
    step = jax.jit(extend_step, static_argnums=(1, 2))
    whole, _ = step(model.params, model.config, method, cache, asked, jnp.asarray([5, 3]))
    for i in range(5):
        here = jnp.asarray([1, int(i < 3)])
        cache, _ = step(model.params, model.config, method, cache, asked[:, i : i + 1], here)
    for (one,), (many,), before in zip(cache.state, whole.state, cache.layers, strict=True):
        np.testing.assert_allclose(many["scores"], one["scores"], atol=1e-5)
        assert (np.asarray(many["scores"])[np.asarray(before.degree) == 0] == 0).all()


def test_while_decoding_the_best_of_all_that_was_read_stay():
    """Recompression goes by scores: a single row that is left has a higher score than those that are not."""
    cache = run(
        ckv.OrbitKV(ckv.Budget(tokens=20), sinks=2, recent=4, merged=0.3, interval=4), prompt(1, 60), prompt(2, 8)
    )
    layer, scores = cache.layers[0], np.asarray(cache.state[0][0]["scores"])
    whole = run(ckv.OrbitKV(ckv.Budget(tokens=200), sinks=2, recent=4, interval=4), prompt(1, 60), prompt(2, 8))
    every = np.asarray(whole.state[0][0]["scores"])
    for head in range(2):
        positions = np.asarray(layer.positions)[0, head, :20]
        single = np.asarray(layer.degree)[0, head, :20] == 1
        assert int(np.asarray(layer.degree)[0, head].sum()) == 68
        inner = [p for p, alone in zip(positions.tolist(), single, strict=True) if alone and 2 <= p < 64]
        assert len(inner) >= 10  # 20 - 6 - 4
        best = np.sort(every[0, head, 2:64])[-10:]
        assert np.sort(scores[0, head][np.isin(positions, inner).nonzero()[0]])[-1] == pytest.approx(best[-1], abs=1e-5)


def test_a_model_without_a_surrogate_is_one_sentence():
    model = tiny()
    ids, lengths = jnp.asarray([prompt(1, 40)], jnp.int32), jnp.asarray([40])
    with pytest.raises(ValueError, match="OrbitKV keeps rows by learned scores, and the model has none: give load"):
        ckv.prefill(model.params, model.config, ckv.OrbitKV(ckv.Budget(tokens=20)), ids, lengths)
    keys, values, _ = tensors(1)
    with pytest.raises(ValueError, match=r"scores must be \[B,K,N\], got None"):
        ckv.compress(ckv.OrbitKV(ckv.Budget(tokens=20)), None, keys, values)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"merged": 1.5}, "between 0 and 1"),
        ({"sinks": -1}, "at least 0"),
        ({"interval": 0}, "at least 1"),
    ],
)
def test_impossible_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        ckv.OrbitKV(ckv.Budget(ratio=0.5), **settings)
