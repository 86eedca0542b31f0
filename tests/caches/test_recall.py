"""Recall methods: the goldens, what is selected, and decoding from it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import StepInputs
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.kmeans import cluster
from clusterkv_jax.methods.driver import step_layer
from clusterkv_jax.methods.infinigen import partial_columns, rows_within
from clusterkv_jax.methods.quest import page_scores
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.runtime.sharding import auto_mesh, param_shardings
from tests.support.golden_files import golden, names
from tests.support.layers import compress as compress_layer
from tests.support.tiny import extend, prompt, tiny
from tests.support.tiny import prefill as tiny_prefill


def attended(query, keys, values, rows):
    """Attention of one query per head [B,H,D] to the rows named for it."""
    batch, heads, _ = query.shape
    kv_heads = keys.shape[1]
    grouped = (jnp.asarray(x).reshape(batch, kv_heads, heads // kv_heads, -1) for x in (query, rows))
    q, rows = grouped
    return recalled_attention(q, jnp.asarray(keys), jnp.asarray(values), rows).reshape(query.shape)


@pytest.mark.parametrize("name", names("clusterkv_case*"))
def test_clusterkv_is_the_golden_one(name):
    data, meta = golden(name)
    sinks, n = meta["sink"], meta["n"]
    keys, values, query = data["k"][:, :, :n], data["v"][:, :, :n], jnp.asarray(data["q_last"])
    method = ckv.ClusterKV(ckv.Budget(tokens=meta["budget"]), sinks=sinks, max_iterations=meta["iters"])
    index = ckv.build_index(
        method, jnp.asarray(keys), jnp.asarray(values), initial_rows=jnp.asarray(data["init_idx"]) + sinks
    )
    np.testing.assert_allclose(index["centroids"][0], data["centroids"], atol=1e-5)
    np.testing.assert_array_equal(index["sizes"][0], data["cluster_size"])
    for head, labels in enumerate(data["labels"]):
        order = np.asarray(index["order"])[0, head, sinks:]
        np.testing.assert_array_equal(order, sinks + np.argsort(labels, kind="stable"))
    rows = ckv.select(method, index, query)
    np.testing.assert_array_equal(rows[0, :, :sinks], np.tile(np.arange(sinks), (meta["hq"], 1)))
    np.testing.assert_array_equal(np.sort(rows[0, :, sinks:], axis=-1), np.sort(data["selected"], axis=-1))
    generated = np.broadcast_to(np.arange(n, data["k"].shape[2]), (1, meta["hq"], meta["gen"]))
    out = attended(query, data["k"], data["v"], np.concatenate([rows, generated], axis=-1))
    np.testing.assert_allclose(out, data["attn_out"], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", names("quest_case*"))
def test_quest_is_the_golden_one(name):
    data, meta = golden(name)
    query = jnp.asarray(data["q_last"])
    method = ckv.Quest(ckv.Budget(tokens=meta["budget"]), page=meta["page"])
    index = ckv.build_index(method, jnp.asarray(data["k"]), jnp.asarray(data["v"]))
    grouped = query.reshape(1, meta["hkv"], -1, meta["d"])
    scores = page_scores(grouped, index["bounds"]).reshape(data["page_score"].shape)
    np.testing.assert_allclose(scores, data["page_score"], rtol=1e-5, atol=1e-5)
    rows = np.asarray(ckv.select(method, index, query))
    assert rows.shape == (1, meta["hq"], max(meta["budget"], 3 * meta["page"]))
    # The authors' evaluation rates the newest page as any other, and drops one even where the budget covers everything.
    number, (newest, covered) = np.arange(meta["n"]), ((meta["n"] - 1) // meta["page"], meta["budget"] >= meta["n"])
    for head, (score, mask) in enumerate(zip(data["page_score"][0], data["mask"][0], strict=True)):
        others = np.argsort(-score[:newest], kind="stable")[: max(meta["budget"] // meta["page"], 3) - 1]
        expected = covered | np.isin(number // meta["page"], [*others, newest])
        assert sorted(rows[0, head][rows[0, head] >= 0]) == np.flatnonzero(expected).tolist()
        if mask[-1] and not covered:
            np.testing.assert_array_equal(expected, mask)
    authors = jnp.asarray(np.where(data["mask"], number, -1), jnp.int32)
    np.testing.assert_allclose(attended(query, data["k"], data["v"], authors), data["attn_out"], rtol=1e-6, atol=1e-5)


def quest_at(tokens, page, min_pages, budget):
    """A method, queries, keys and values, and what the last query selects."""
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(1, 4, tokens, 8)), jnp.float32)
    keys, values = (jnp.asarray(rng.normal(size=(1, 2, tokens, 8)), jnp.float32) for _ in range(2))
    method = ckv.Quest(ckv.Budget(tokens=budget), page=page, min_pages=min_pages, dense_layers=0)
    rows = ckv.select(method, ckv.build_index(method, keys, values), queries[:, :, -1])
    return method, (queries, keys, values), np.asarray(rows)


@pytest.mark.parametrize("sizes", [(23, 4, 2, 9), (25, 4, 2, 17)])
def test_quest_selects_what_a_step_attends_to(sizes):
    """The step is that of the last token, after a prompt of those before it."""
    method, tensors, rows = quest_at(*sizes)
    before = sizes[0] - 1
    request = RequestShape(np.asarray([before]), 1, 2, max_new_tokens=1, reserve=1)
    layer, state, _ = compress_layer(method, [x[:, :, :-1] for x in tensors], np.asarray([before]), request)
    by_token = (jnp.swapaxes(x[:, :, -1:], 1, 2) for x in tensors)
    new = StepInputs(*by_token, jnp.asarray([[before]]), jnp.ones((1, 1), bool))
    out = jax.jit(functools.partial(step_layer, method))(layer, state, new)[0]
    queries, keys, values = tensors
    expected = attended(queries[:, :, -1], keys, values, rows)
    np.testing.assert_allclose(out[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_infinigen_is_the_golden_one():
    data, meta = golden("infinigen_case0")
    b, h, n, d = (meta[x] for x in "bhnd")
    queries = jnp.asarray(data["query"].reshape(b, n, h, d).transpose(0, 2, 1, 3))
    keys, values = (jnp.asarray(data[x].reshape(n, b, h, d).transpose(1, 2, 0, 3)) for x in ("k_cache", "v_cache"))
    columns = partial_columns(queries[:, :, None], meta["ratio"])
    np.testing.assert_array_equal(columns, data["partial_idx"])
    method = ckv.InfiniGen(ckv.Budget(tokens=meta["max_num_kv"]), partial_ratio=meta["ratio"], alpha=meta["alpha"])
    same = jnp.broadcast_to(jnp.eye(d), (b, h, d, d))
    index = ckv.build_index(method, keys, values, queries=queries, skew=same)
    np.testing.assert_allclose(index["partial"][0], data["partial_k"].transpose(1, 0, 2), atol=1e-6)
    query = jnp.asarray(data["w_q"] @ data["hidden"][0, 0]).reshape(b, h, d)
    rows = np.asarray(ckv.select(method, index, query))
    for head in range(h):
        assert set(rows[0, head]) - {-1} == set(data["prefetch_idx"][:, 0, head])


def test_centroids_are_means_in_float32_held_as_the_keys_are():
    keys = jax.random.normal(jax.random.key(0), (1, 2, 90, 8), jnp.bfloat16)
    seeds = jnp.arange(5, dtype=jnp.int32)
    index = ckv.build_index(ckv.ClusterKV(ckv.Budget(tokens=40), sinks=10), keys, keys, initial_rows=10 + seeds)
    centroids, _, sizes = jax.jit(cluster)(keys[:, :, 10:], seeds)
    assert centroids.dtype == jnp.float32
    assert index["centroids"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(index["centroids"], centroids.astype(jnp.bfloat16))
    np.testing.assert_array_equal(index["sizes"], sizes)


def test_infinigen_fetches_as_many_rows_as_the_golden_mask():
    """The authors' mask takes the first head's threshold for all heads; rows where that changes the number are out."""
    data, meta = golden("infinigen_accmask_case0")
    scores, fetched = data["spec_attn"][0], data["fetched"][0]
    cap, compared = int(meta["budget"] * meta["n"]), 0
    within = jax.jit(lambda past: rows_within(past, meta["alpha"]))
    for n in range(cap, meta["n"]):
        past = np.where(np.arange(scores.shape[-1]) <= n, scores[:, n], -np.inf)  # one shape, one program
        quirk = (past > past[0].max() - meta["alpha"]).sum() // len(past)
        count = int(within(jnp.asarray(past)[None, :, None])[0])
        if quirk == count:
            compared += 1
            assert fetched[:, n].sum(-1).tolist() == [min(count, cap)] * len(past)
    assert compared > 4


# --- decoding

HALF = ckv.Budget(ratio=0.5)
INTERVAL = 8
CLUSTER = ckv.ClusterKV(HALF, sinks=2, tokens_per_cluster=4, interval=INTERVAL, interval_clusters=2, dense_layers=0)
METHODS = [
    CLUSTER,
    dataclasses.replace(CLUSTER, per_query_head=False),
    ckv.Quest(HALF, page=4, min_pages=2, dense_layers=0),
    ckv.InfiniGen(HALF, partial_ratio=0.5, dense_layers=0),
    ckv.InfiniGen(HALF, partial_ratio=0.5, alpha=1.0, dense_layers=0),
]
PROMPTS = [prompt(1, 48), prompt(2, 33), prompt(3, 40)]
STEPS = 3 * INTERVAL
NAMES = ["clusterkv", "per_kv_head", "quest", "infinigen", "alpha"]
of_methods = pytest.mark.parametrize("method", METHODS, ids=NAMES)
# Those that differ in more than what they choose.
of_kinds = pytest.mark.parametrize("method", [METHODS[0], *METHODS[2:4]], ids=["clusterkv", "quest", "infinigen"])
# Where what they choose does not matter, or little, ordinary runs take those.
kinds_first = pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, id=name, marks=[pytest.mark.exhaustive] * (name in ("per_kv_head", "alpha")))
        for name, method in zip(NAMES, METHODS, strict=True)
    ],
)


prefill = functools.partial(tiny_prefill, width=48, max_new_tokens=STEPS, step_tokens=8)


@of_kinds
def test_a_row_in_a_batch_is_the_row_alone(method):
    questions = [prompt(5, 7), prompt(6, 3), prompt(7, 5)]
    together = ckv.generate(tiny(), PROMPTS, method=method, questions=questions, max_new_tokens=STEPS)
    alone = ckv.generate(tiny(), PROMPTS[1:2], method=method, questions=questions[1:2], max_new_tokens=STEPS)
    assert alone.tokens[0] == together.tokens[1]
    assert together.tokens != ckv.generate(tiny(), PROMPTS, questions=questions, max_new_tokens=STEPS).tokens


@of_kinds
def test_a_question_in_one_piece_is_its_tokens_one_by_one(method):
    question = prompt(4, 7)
    cache, _ = prefill(method, PROMPTS[0], PROMPTS[1])
    once, logits = extend(method, cache, [[*question, 0], question[:3] + [5] * 5], [7, 3])
    for i, token in enumerate(question):
        cache, expected = extend(method, cache, [[token], [token]])
        if i == 2:
            np.testing.assert_allclose(logits[1], expected[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[0], expected[0], rtol=1e-4, atol=1e-4)
    for index, single in zip(once.state[-1], cache.state[-1], strict=True):
        np.testing.assert_array_equal(index["recalled"][0], single["recalled"][0])


@kinds_first
def test_while_the_budget_covers_everything_a_step_is_that_of_the_full_cache(method):
    """With room for so much more text the index is there, is kept up to date, and leaves nothing out."""
    method = dataclasses.replace(method, budget=ckv.Budget(tokens=100))
    if isinstance(method, ckv.InfiniGen):
        method = dataclasses.replace(method, alpha=None)
    cache, _ = prefill(method, PROMPTS[0], PROMPTS[1], reserve=400)
    full, _ = prefill(ckv.Full(), PROMPTS[0], PROMPTS[1], reserve=400)
    assert any(index is not None for state in cache.state for index in state)
    for token in prompt(9, 12):
        cache, logits = extend(method, cache, [[token], [token]])
        full, expected = extend(ckv.Full(), full, [[token], [token]])
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@of_methods
def test_a_step_attends_to_its_budget(method):
    cache, _ = prefill(method, PROMPTS[0], PROMPTS[1])
    shapes = [x.shape for x in jax.tree.leaves(cache)]
    for token in prompt(9, 11):
        cache, _ = extend(method, cache, [[token], [token]])
        assert [x.shape for x in jax.tree.leaves(cache)] == shapes
        for layer, state in zip(cache.layers, cache.state, strict=True):
            assert (np.asarray(layer.degree).sum(-1) == np.asarray(cache.position)[:, None]).all()
            for index in filter(None, state):
                for b, budget in enumerate((24, 16)):
                    rows = np.asarray(index["recalled"][b])
                    counts = (rows >= 0).sum(-1)
                    if getattr(method, "alpha", None) is not None:
                        assert ((counts >= 1) & (counts <= budget)).all()
                    else:
                        # The newest page of Quest is part of its budget and stands elsewhere.
                        assert (counts == budget - (4 if isinstance(method, ckv.Quest) else 0)).all()
                    assert rows.max() < cache.position[b]
                    for row in rows.reshape(-1, rows.shape[-1]):
                        assert len(set(row[row >= 0])) == (row >= 0).sum()


def test_generated_tokens_are_clustered_among_themselves():
    cache, _ = prefill(CLUSTER, PROMPTS[0], PROMPTS[1])
    for i, token in enumerate(prompt(9, INTERVAL)):
        before = cache
        cache, _ = extend(CLUSTER, cache, [[token], [token]])
        assert int(cache.state[1][0]["indexed"][0]) == 48 + (INTERVAL if i == INTERVAL - 1 else 0)
    for layer, state, old in zip(cache.layers, cache.state, before.state, strict=True):
        index, was = state[0], old[0]
        for b, (n, clusters) in enumerate(((48, 11), (33, 7))):
            for k in range(2):
                order, sizes, starts = (np.asarray(index[name][b, k]) for name in ("order", "sizes", "starts"))
                np.testing.assert_array_equal(np.sort(order[: n + INTERVAL]), np.arange(n + INTERVAL))
                np.testing.assert_array_equal(order[:n], was["order"][b, k, :n])
                assert sizes[:clusters].sum() == n - 2
                assert sizes.sum() == n - 2 + INTERVAL
                assert sizes[clusters : clusters + 2].sum() == INTERVAL
                keys = np.asarray(layer.keys[b, k])
                for c in np.flatnonzero(sizes):
                    members = order[starts[c] : starts[c] + sizes[c]]
                    assert (np.diff(members) > 0).all()
                    np.testing.assert_allclose(index["centroids"][b, k, c], keys[members].mean(0), atol=1e-5)


@pytest.mark.parametrize(("method", "expected"), [(CLUSTER, 1), (METHODS[2], 0), (METHODS[3], 0)])
def test_the_loop_holds_one_conditional_at_most(method, expected):
    cache, _ = prefill(method, PROMPTS[0], PROMPTS[1])
    lowered = decode_loop.lower(
        tiny().params,
        tiny().config,
        method,
        DecodeState(cache, jnp.asarray([1, 2]), jnp.asarray([False, False])),
        jax.random.key(0),
        jnp.int32(1),
        jnp.int32(3),
        sampling=ckv.Sampling(),
        eos_ids=(),
        steps=STEPS,
    )
    assert len(re.findall(r"stablehlo\.(?:case|if)\b", lowered.as_text())) == expected


@kinds_first
def test_padding_never_reaches_an_index(method):
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(2, 4, 64, 8)), jnp.float32)
    keys, values = (jnp.asarray(rng.normal(size=(2, 2, 64, 8)), jnp.float32) for _ in range(2))

    def compressed(lengths, *arrays):
        tokens = arrays[1].shape[2]
        request = RequestShape(np.arange(1, tokens + 1), 4, 2, max_new_tokens=16, reserve=16)
        return jax.jit(lambda *x: compress_layer(method, x, lengths, request, layer=3)[1][0])(*arrays)

    real = (np.arange(64) < np.asarray([64, 37])[:, None])[:, None, :, None]
    both = compressed(np.asarray([64, 37]), *(jnp.where(real, x, jnp.nan) for x in (queries, keys, values)))
    alone = compressed(np.asarray([37]), *(x[1:, :, :37] for x in (queries, keys, values)))
    for leaf in jax.tree.leaves(both):
        assert bool(jnp.isfinite(leaf).all())
    query = jnp.asarray(rng.normal(size=(2, 4, 8)), jnp.float32)
    result, expected = (np.asarray(ckv.select(method, x, q)) for x, q in ((both, query), (alone, query[1:])))
    np.testing.assert_array_equal(result[1, :, : expected.shape[2]], expected[0])
    assert (result[1, :, expected.shape[2] :] == -1).all()


@pytest.mark.exhaustive  # tests/mesh has each of them on a mesh
@of_kinds
def test_tokens_on_a_mesh_are_those_of_one_device(method):
    model, prompts = tiny(kv_heads=4), PROMPTS[:2]
    alone = ckv.generate(model, prompts, method=method, max_new_tokens=12)
    mesh = auto_mesh(jax.make_mesh((2, 4), ("data", "model")))
    params = jax.device_put(model.params, param_shardings(abstract(model.config), mesh))
    many = ckv.generate(dataclasses.replace(model, params=params, mesh=mesh), prompts, method=method, max_new_tokens=12)
    assert many.tokens == alone.tokens
    assert many.stats.recalled_rows == alone.stats.recalled_rows


def test_stats_say_what_was_recalled():
    method = dataclasses.replace(CLUSTER, dense_layers=1)
    stats = ckv.generate(tiny(), PROMPTS[:2], method=method, max_new_tokens=4).stats
    assert stats.recalled_rows == [[], [[24] * 4, [16] * 4]]
    assert all(16 <= n <= 48 for row in stats.union_rows[1] for n in row)
    assert stats.kept_rows == [[[48, 48], [33, 33]]] * 2
    full = ckv.generate(tiny(), PROMPTS[:2], max_new_tokens=4).stats
    assert full.recalled_rows == full.union_rows == []
    assert full.cache_bytes == full.full_cache_bytes < stats.cache_bytes


@of_kinds
def test_a_cache_with_its_index_comes_back_from_disk(tmp_path, method):
    cache, _ = prefill(method, PROMPTS[0], PROMPTS[1])
    ckv.save_cache(tmp_path / "book", cache, tiny().config, method)
    copy = ckv.load_cache(tmp_path / "book", tiny().config, method)
    assert jax.tree.structure(copy) == jax.tree.structure(cache)
    _, expected = extend(method, cache, [[3], [4]])
    np.testing.assert_array_equal(extend(method, copy, [[3], [4]])[1], expected)


@pytest.mark.parametrize("budget", [ckv.Budget(ratio=1.0), ckv.Budget(tokens=48)])
@of_kinds
def test_a_budget_that_covers_the_prompt_is_bit_for_bit_the_full_cache(method, budget):
    method = dataclasses.replace(method, budget=budget)
    cache, _ = prefill(method, PROMPTS[0], PROMPTS[1])
    full, _ = prefill(ckv.Full(), PROMPTS[0], PROMPTS[1])
    _, logits = extend(method, cache, [[3], [4]])
    _, expected = extend(ckv.Full(), full, [[3], [4]])
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("tokens", [1, 17])
def test_short_prompts_grow_into_their_budget(tokens):
    """Sinks that the prompt does not fill hold what is generated."""
    method = ckv.ClusterKV(ckv.Budget(tokens=40), tokens_per_cluster=4, interval=8, interval_clusters=2, dense_layers=0)
    cache, _ = prefill(method, prompt(1, tokens), width=50, reserve=400)
    full, _ = prefill(ckv.Full(), prompt(1, tokens), width=50, reserve=400)
    for token in prompt(9, 20):
        cache, logits = extend(method, cache, [[token]])
        full, expected = extend(ckv.Full(), full, [[token]])
        assert bool(jnp.isfinite(logits).all())
        if int(cache.position[0]) <= 40:
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def tensors(tokens=40):
    return jax.random.normal(jax.random.key(0), (2, 1, 2, tokens, 8))


def quest_index():
    return ckv.build_index(ckv.Quest(HALF), *tensors())


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ckv.ClusterKV(HALF, sinks=-1), "sinks must be a whole number of at least 0, got -1"),
        (lambda: ckv.ClusterKV(HALF, interval=3), "interval_clusters must be at most interval = 3, got 4"),
        (lambda: ckv.ClusterKV(HALF, store="disk"), "store must be "),
        (lambda: ckv.Quest(HALF, page=0), "page must be a whole number of at least 1, got 0"),
        (lambda: ckv.InfiniGen(HALF, partial_ratio=0), "partial_ratio must be above 0 and at most 1, got 0"),
        (lambda: ckv.InfiniGen(HALF, alpha=-1), "alpha must be at least 0 or None, got -1"),
        (
            lambda: ckv.build_index(ckv.ClusterKV(ckv.Budget(tokens=16)), *tensors()),
            "a prompt of 40 tokens has a budget of 16 rows, which must be more than sinks = 16",
        ),
        (lambda: ckv.build_index(ckv.Full(), *tensors()), r"one that recalls .*, got Full\(\)"),
        (
            lambda: ckv.build_index(ckv.Quest(HALF), *tensors(), initial_rows=jnp.arange(3)),
            "Quest takes no initial_rows; ClusterKV does",
        ),
        (lambda: ckv.build_index(ckv.Quest(HALF), *tensors().at[0, 0, 1, 7, 2].set(np.nan)), r"at \[0, 1, 7, 2\]"),
        (lambda: ckv.build_index(ckv.Quest(HALF), *tensors()[:, 0]), r"keys must be an array \[B,K,N,D\]"),
        (lambda: ckv.select(ckv.Full(), quest_index(), jnp.ones((1, 4, 8))), r"one that recalls .*, got Full\(\)"),
        (lambda: ckv.select(ckv.InfiniGen(HALF), quest_index(), jnp.ones((1, 4, 8))), "makes for InfiniGen"),
        (lambda: ckv.select(ckv.Quest(HALF), None, jnp.ones((1, 4, 8))), "build_index makes for Quest, got None"),
        (lambda: ckv.select(ckv.Quest(HALF), quest_index(), jnp.ones((1, 3, 8))), "multiple of the 2 KV heads"),
        (lambda: ckv.select(ckv.Quest(HALF), quest_index(), jnp.ones((1, 4, 7))), r"shape \[1,H,8\]"),
        (lambda: ckv.select(ckv.Quest(HALF), quest_index(), jnp.full((1, 4, 8), np.nan)), "query must be finite"),
        (lambda: ckv.Composed(ckv.SnapKV(HALF), ckv.ClusterKV(HALF)), "decode must be"),
        (lambda: ckv.Composed(ckv.ClusterKV(HALF), ckv.H2O(HALF)), "prefill must be"),
    ],
)
def test_what_is_impossible_is_named_in_one_sentence(make, said):
    with pytest.raises(ValueError, match=said) as error:
        make()
    assert str(error.value).count(". ") == 0
