"""Pages: the same rows and the same attention as head by head, in the memory of the rows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.cache import attention, layers, pages
from clusterkv_jax.cache.attention import attend_cache
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.plan import plan_layer
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.runtime.dispatch import Traits
from tests.support.tiny import STEP, extend, prefill, prompt, tiny

HEADS, TOKENS, MEAN, DIM, PAGE, ROOM = 4, 60, 20, 8, 4, 5
METHOD = ckv.AdaKV(ckv.Budget(ratio=0.5), window=4, kernel=3)
AGAIN = dataclasses.replace(METHOD, decode_interval=8)


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def spread(rng, batch=2):
    """Prompts, and HEADS * MEAN rows to keep of each: some heads hold almost all, some next to nothing."""
    lengths = jnp.asarray(rng.integers(TOKENS // 2, TOKENS + 1, batch))
    prompt = layers.from_tokens(*(normal(rng, batch, HEADS, TOKENS, DIM) for _ in range(2)), lengths)
    score = rng.random((batch, HEADS, TOKENS)) + rng.choice([0, 0.1, 0.5, 5], (batch, HEADS, 1))
    score = np.where(prompt.degree > 0, score, -1.0).reshape(batch, -1)
    keep = score >= np.sort(score)[:, -HEADS * MEAN, None]
    return prompt, jnp.asarray(keep.reshape(batch, HEADS, TOKENS))


def tokens_to_append(rng, lengths):
    new = normal(rng, 2, HEADS, ROOM, DIM), normal(rng, 2, HEADS, ROOM, DIM)
    return *new, lengths[:, None] + ordinals(ROOM, 2), ordinals(ROOM, 2) < jnp.asarray([[ROOM], [2]])


def assert_same(result, expected, tolerance=None):
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        if tolerance is None:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, atol=tolerance)


@given(seed=st.integers(0, 10**6))
def test_pages_hold_what_heads_hold_and_attention_is_the_same(seed):
    rng = np.random.default_rng(seed)
    prompt, keep = spread(rng)
    paged = pages.to_pages(prompt, keep, MEAN + ROOM, PAGE)
    padded = layers.resize(layers.take_rows(prompt, keep, TOKENS)[0], TOKENS + ROOM)
    assert_same(pages.from_pages(paged, TOKENS + ROOM), padded)
    # The memory of the rows, less than a page more for each head, and nothing beside them.
    slots = math.prod(paged.degree.shape[1:])
    assert slots <= HEADS * (MEAN + ROOM + PAGE - 1)
    assert int((paged.degree > 0).sum()) == int(keep.sum())
    np.testing.assert_array_equal(paged.capacity.sum(1), slots)
    np.testing.assert_array_equal(pages.page_view(paged).length, (paged.degree > 0).sum(-1))

    query = normal(rng, 2, 3, 2 * HEADS, DIM)
    assert_same(attend_cache(paged, query), attend_cache(padded, query), 1e-5)
    # Every head has room for what will be appended, however the rows are spread, and each token for itself.
    tokens = tokens_to_append(rng, prompt.length[:, 0])
    paged, padded = pages.append(paged, *tokens), layers.append(padded, *tokens)
    assert bool(jnp.all(paged.length <= paged.capacity))
    assert_same(pages.from_pages(paged, TOKENS + ROOM), padded)
    assert_same(attend_cache(paged, query), attend_cache(padded, query), 1e-5)

    # Chosen anew: in the same pages, of other owners; with all that there is, not a bit changes.
    every = ordinals(slots, 3) < paged.length[..., None]
    assert_same(pages.reassign(paged, every), paged)
    fewer = every & jnp.asarray(rng.random(every.shape) < rng.random((2, HEADS, 1)))
    again = layers.take_rows(padded, fewer[:, :, : TOKENS + ROOM], TOKENS + ROOM)[0]
    paged = pages.reassign(paged, fewer)
    assert_same(pages.from_pages(paged, TOKENS + ROOM), again)
    assert_same(attend_cache(paged, query), attend_cache(again, query), 1e-5)


def test_a_device_that_the_host_drives_reads_heads_and_not_pages(monkeypatch):
    """By an op of its own, whose kernel has its own tests."""
    rng = np.random.default_rng(2)
    prompt, keep = spread(rng)
    paged = pages.to_pages(prompt, keep, MEAN + ROOM, PAGE)
    query = normal(rng, 2, 3, 2 * HEADS, DIM)
    expected = attend_cache(paged, query, 0.7, 0.5)
    called = []
    monkeypatch.setattr(attention, "traits", lambda: Traits(host_driven=True))
    op = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *args, **how: called.append(1) or op(*args, **how))
    assert_same(attend_cache(paged, query, 0.7, 0.5), expected, 1e-5)
    assert called


def test_a_head_without_rows_gives_zeros_and_empty_slots_may_hold_anything():
    rng = np.random.default_rng(0)
    prompt, keep = spread(rng)
    paged = pages.to_pages(prompt, keep.at[:, 1].set(False), MEAN, PAGE)
    query = normal(rng, 2, 1, HEADS, DIM)
    out, lse = attend_cache(paged, query)
    np.testing.assert_array_equal(out[:, :, 1], 0)
    np.testing.assert_array_equal(lse[:, :, 1], -np.inf)
    assert bool(jnp.isfinite(out).all())

    def poison(x):
        return jnp.where((paged.degree > 0)[..., None], x, jnp.nan)

    dirty = dataclasses.replace(paged, keys=poison(paged.keys), values=poison(paged.values))
    assert_same(attend_cache(dirty, query), (out, lse))


def test_a_token_without_a_slot_is_counted_and_stored_nowhere():
    rng = np.random.default_rng(1)
    prompt, keep = spread(rng)
    paged = pages.to_pages(prompt, keep, MEAN, PAGE)
    more = int((paged.capacity - paged.length).max()) + 1
    new = normal(rng, 2, HEADS, more, DIM)
    full = pages.append(paged, new, new, jnp.zeros((2, more), jnp.int32), jnp.ones((2, more), bool))
    np.testing.assert_array_equal(full.length, paged.length + more)
    assert int(full.degree.sum()) == full.degree.size
    assert bool(layers.overflowed(ckv.KVCache((full,), (None,), prompt.length[:, 0])))
    assert not bool(layers.overflowed(ckv.KVCache((paged,), (None,), prompt.length[:, 0])))
    # Nobody else's row was written over.
    for b, head in np.ndindex(*paged.length.shape):
        count = int(paged.length[b, head])
        before, after = (pages.from_pages(x, count, jnp.asarray([head])).keys[b] for x in (paged, full))
        np.testing.assert_array_equal(after, before)
    stored = np.asarray(pages.page_view(full).length).sum(1)
    np.testing.assert_array_equal(stored, full.degree[0].size)


# --- AdaKV ---


def read(method, *texts, new=24, width=200):
    return prefill(method, *texts, width=width, max_new_tokens=new)[0]


@pytest.mark.parametrize("mode", ["kvpress", "factory"])
def test_bytes_are_those_of_the_budget(mode):
    """Rows, room for what is appended, and at most an interval of 128 rows a head."""
    for tokens, ratio, reserve in ((200, 0.5, 0), (200, 0.31, 24), (180, 0.2, 7)):
        method = dataclasses.replace(METHOD, budget=ckv.Budget(ratio=ratio), mode=mode)
        kv = read(method, prompt(1, tokens), new=reserve, width=tokens)
        rows, heads = int(ratio * tokens), 2
        all_heads = len(kv.layers) * heads
        least = (rows + reserve) * layers.slot_bytes(kv) * all_heads
        assert least <= layers.nbytes(kv) <= least + 128 * layers.slot_bytes(kv) * all_heads
        for layer in layers.occupancy(kv):
            over = sum(layer[0]) - heads * rows
            assert over == 0 if mode == "kvpress" else -1.5 * heads <= over <= heads / 2


def test_heads_that_share_a_budget_are_a_group():
    """Of two sequences that spread their rows over the heads in other ways."""
    kv, tokens = read(METHOD, prompt(1, 200), prompt(2, 150), new=0), (200, 150)
    for layer in kv.layers:
        assert layer.heads == ((0, 1),)
        (group,) = layer.groups
        np.testing.assert_array_equal(group.length, layer.length)
        assert np.sum(group.length, axis=1).tolist() == [200, 150]
        np.testing.assert_array_equal(np.sum(group.degree == 1, axis=-1), group.length)
        for b, i in np.ndindex(*group.length.shape):
            positions = np.asarray(group.positions[b, i, : group.length[b, i]])
            assert np.all(np.diff(positions) > 0)
            assert positions[-1] == tokens[b] - 1


def test_bytes_of_a_large_model():
    """Llama-3.1-8B, 32,768 tokens, a fifth kept."""
    request = RequestShape(np.asarray([32768]), 32, 8, max_new_tokens=128, reserve=128, row_bytes=516)
    method = ckv.AdaKV(ckv.Budget(ratio=0.2))
    (capacity,) = plan_layer(method, 0, request).capacities
    prompt = jax.eval_shape(layers.from_tokens, *[jnp.zeros((1, 8, 32768, 1))] * 2, jnp.zeros(1, jnp.int32))
    layer = jax.eval_shape(lambda p: pages.to_pages(p, p.degree > 0, capacity), prompt)
    assert 6553 + 128 <= math.prod(layer.degree.shape) / 8 <= 6553 + 128 + 128


def test_one_head_may_hold_almost_everything():
    """A head of flat attention beside sharp ones takes what those leave, which is no more than their safe rows."""
    rng, tokens, budget = np.random.default_rng(3), 300, 100
    keys = normal(rng, 1, HEADS, tokens, DIM)
    queries = normal(rng, 1, HEADS, tokens, DIM)
    # Sharp heads attend to the window alone: what is before it scores next to nothing.
    keys = keys.at[:, 1:].set(0.0).at[:, 1:, -4:, 0].set(9.0)
    queries = queries.at[:, 1:].set(0.0).at[:, 1:, :, 0].set(9.0)
    method = ckv.AdaKV(ckv.Budget(tokens=budget), window=4, kernel=1)
    layer = ckv.compress(method, queries, keys, keys)
    assert int(layer.length[0, 0]) > 0.9 * tokens
    assert int(layer.length.sum()) == HEADS * budget
    assert int(layer.length[0, 1:].min()) >= 0.2 * budget


def in_one_page(layer):
    """The same rows, every head's in a page that all of them would fit."""
    heads = pages.from_pages(layer, 224)
    return pages.to_pages(heads, heads.degree > 0, 224, page=512)


@pytest.mark.parametrize("first", [ckv.Full(), ckv.SnapKV(ckv.Budget(ratio=0.5), window=4, kernel=3)])
def test_pages_take_over_what_another_method_read(first):
    """A cache that is too long is shared out at the first step; then the budget is kept as always."""
    method = ckv.Composed(first, dataclasses.replace(AGAIN, budget=ckv.Budget(ratio=0.5)))
    result = ckv.generate(tiny(), [prompt(1, 60)], method=method, max_new_tokens=30)
    assert len(result.tokens[0]) == 30
    kv = read(method, prompt(1, 60))
    assert all(isinstance(layer, layers.PagedHeads) for layer in kv.layers)
    kv, _ = extend(method, kv, jnp.ones((1, 1), jnp.int32))
    assert all(int(layer.length.sum()) <= 2 * (30 + 8) for layer in kv.layers)


def test_a_budget_that_covers_the_prompt_is_the_full_cache():
    pair = [read(method, prompt(1, 200)) for method in (ckv.AdaKV(ckv.Budget(tokens=500)), ckv.Full())]
    assert jax.tree.structure(pair[0].layers) == jax.tree.structure(pair[1].layers)
    assert_same(pair[0].layers, pair[1].layers)


@pytest.mark.parametrize("method", [METHOD, AGAIN], ids=["appends", "chooses again"])
def test_decoding_with_pages_is_decoding_head_by_head(method):
    kv = read(method, prompt(1, 200), prompt(2, 150))
    assert max(int(layer.capacity.max()) for layer in kv.layers) > pages.PAGE  # several pages to a head
    whole = dataclasses.replace(kv, layers=tuple(map(in_one_page, kv.layers)))
    for token in prompt(3, 20):
        tokens = jnp.asarray([token, token])
        kv, logits = STEP(tiny().params, tiny().config, method, kv, tokens)
        whole, expected = STEP(tiny().params, tiny().config, method, whole, tokens)
        np.testing.assert_allclose(logits, expected, atol=2e-4)
        assert layers.occupancy(kv) == layers.occupancy(whole)


@pytest.mark.parametrize("method", [METHOD, AGAIN], ids=["appends", "chooses again"])
def test_a_question_in_one_piece_is_its_tokens_one_by_one(method):
    question = prompt(4, 7)
    kv = read(method, prompt(1, 200), prompt(2, 150))
    tokens = jnp.asarray([[*question, 0], question[:3] + [5] * 5])
    once, logits = extend(method, kv, tokens, jnp.asarray([7, 3]))
    for i, token in enumerate(question):
        kv, expected = STEP(tiny().params, tiny().config, method, kv, jnp.asarray([token, token]))
        if i == 2:
            np.testing.assert_allclose(logits[1], expected[1], atol=2e-4)
    np.testing.assert_allclose(logits[0], expected[0], atol=2e-4)
    assert [rows[0] for rows in layers.occupancy(once)] == [rows[0] for rows in layers.occupancy(kv)]
    assert bool(jnp.all(jnp.stack([jnp.all(layer.length <= layer.capacity) for layer in once.layers])))


def test_a_row_does_not_depend_on_its_batch():
    texts = [prompt(1, 200), prompt(2, 130), prompt(3, 171)]
    together = ckv.generate(tiny(), texts, method=AGAIN, max_new_tokens=20)
    for i, text in enumerate(texts):
        alone = ckv.generate(tiny(), [text], method=AGAIN, max_new_tokens=20)
        assert alone.tokens[0] == together.tokens[i]
        assert [layer[0] for layer in alone.stats.kept_rows] == [layer[i] for layer in together.stats.kept_rows]


def test_stats_tell_the_truth():
    result = ckv.generate(tiny(), [prompt(1, 200)], questions=[prompt(2, 5)], method=METHOD, max_new_tokens=4)
    for layer in result.stats.kept_rows:
        assert sum(layer[0]) == 2 * 100
        assert layer[0][0] != layer[0][1]
    rows, row = 100 + 128, 2 * 8 * 4 + 4
    assert 4 * rows * row <= result.stats.cache_bytes <= 4 * (rows + 128) * row
    full = ckv.generate(tiny(), [prompt(1, 60)], method=ckv.Full(), max_new_tokens=4)
    all_of_it = dataclasses.replace(METHOD, budget=ckv.Budget(ratio=1.0))
    assert ckv.generate(tiny(), [prompt(1, 60)], method=all_of_it, max_new_tokens=4).tokens == full.tokens


def test_pages_come_back_from_disk(tmp_path):
    kv = read(AGAIN, prompt(1, 200))
    ckv.save_cache(tmp_path / "book", kv, tiny().config, AGAIN)
    copy = ckv.load_cache(tmp_path / "book", tiny().config, AGAIN)
    assert jax.tree.structure(copy) == jax.tree.structure(kv)
    assert_same(copy, kv)


def test_composed_with_full_appends_to_pages():
    both = ckv.Composed(AGAIN, ckv.Full())
    alone = ckv.generate(tiny(), [prompt(1, 200)], method=METHOD, max_new_tokens=20)
    assert ckv.generate(tiny(), [prompt(1, 200)], method=both, max_new_tokens=20).tokens == alone.tokens
