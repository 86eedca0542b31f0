"""SnapKV, PyramidKV, ChunkKV, H2O, StreamingLLM and CaM: the golden files, decoding, and what each paper promises."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import StepInputs
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.driver import step_layer
from clusterkv_jax.methods.plan import plan_layer
from clusterkv_jax.methods.request import RequestShape
from tests.support.golden_files import golden
from tests.support.layers import compress as compress_layer

Budget = ckv.Budget


def positions(layer):
    """Kept positions [B, K, rows] of a layer whose heads hold equally many."""
    count = int(layer.length.max())
    assert (np.asarray(layer.length) == count).all()
    return np.asarray(layer.positions)[:, :, :count]


def same_kept(result, expected, score=None):
    """Equal as sets, or different only in positions whose score ties with the worst one kept."""
    for i in np.ndindex(*expected.shape[:-1]):
        ours, theirs = set(result[i].tolist()), set(expected[i].tolist())
        if ours == theirs:
            continue
        if score is None or len(ours) != len(theirs):
            return False
        cut = min(score[i][p] for p in theirs if p < score.shape[-1])
        if any(p >= score.shape[-1] or abs(score[i][p] - cut) > 1e-5 * abs(cut) for p in ours ^ theirs):
            return False
    return True


def compress(method, arrays, **options):
    return ckv.compress(method, *(jnp.asarray(arrays[name]) for name in "qkv"), **options)


@pytest.mark.parametrize("name", ["snapkv_case0", "snapkv_case2"])
def test_snapkv_keeps_what_the_authors_code_keeps(name):
    arrays, meta = golden(name)
    method = ckv.SnapKV(Budget(tokens=meta["cap"]), meta["w"], meta["ks"], meta["pool"].removesuffix("pool"))
    layer = compress(method, arrays)
    assert same_kept(positions(layer), arrays["kept_idx"], arrays["score"])
    order = np.argsort(arrays["kept_idx"], axis=-1)[..., None]
    np.testing.assert_array_equal(layer.keys, np.take_along_axis(arrays["k_out"], order, axis=2))
    np.testing.assert_array_equal(layer.values, np.take_along_axis(arrays["v_out"], order, axis=2))
    np.testing.assert_array_equal(layer.degree, np.ones(layer.degree.shape))
    # Another pooling is another choice: the comparison can tell.
    other = ckv.SnapKV(Budget(tokens=meta["cap"]), meta["w"], 1)
    assert not same_kept(positions(compress(other, arrays)), arrays["kept_idx"], arrays["score"])


def test_snapkv_as_kvpress_has_it():
    arrays, meta = golden("kvpress_snapkv_case0")
    method = ckv.SnapKV(Budget(ratio=1 - meta["cr"]), meta["w"], meta["ks"], "avg", pool_before_group=True)
    assert same_kept(positions(compress(method, arrays)), arrays["kept_idx"], arrays["score"])


def kept_mask(layer, tokens):
    """Which tokens [B, K, tokens] a layer holds, however many each head does."""
    mask = np.zeros((*layer.length.shape, tokens), bool)
    for b, head in np.ndindex(*layer.length.shape):
        mask[b, head, np.asarray(layer.positions)[b, head, : int(layer.length[b, head])]] = True
    return mask


def test_adakv_as_kvpress_has_it():
    """Heads from flat to sharp: made with kvpress from the numbers in the file."""
    arrays, meta = golden("kvpress_adakv_sharp")
    method = ckv.AdaKV(
        Budget(ratio=1 - meta["cr"]), meta["w"], meta["ks"], "avg", pool_before_group=True, safeguard=meta["alpha"]
    )
    layer = compress(method, arrays)
    np.testing.assert_array_equal(kept_mask(layer, meta["n"]), ~arrays["evicted"])
    assert layer.length.tolist() == [[16, 29, 51, 64]]
    # A whole safeguard makes all equal.
    assert compress(dataclasses.replace(method, safeguard=1.0), arrays).length.tolist() == [[40] * 4]


def test_adakv_in_the_authors_counts():
    arrays, meta = golden("kvpress_adakv_sharp")
    scores, before, rest = arrays["score"][0], meta["n"] - meta["w"], 40 - meta["w"]
    cut = np.sort(scores[:, :before], axis=None)[-4 * rest]
    counts = np.round(0.8 * (scores[:, :before] >= cut).sum(-1) + int(0.2 * rest)).astype(int)
    method = ckv.AdaKV(Budget(tokens=40), meta["w"], meta["ks"], "avg", True, mode="factory")
    layer = compress(method, arrays)
    assert layer.length.tolist() == [(counts + meta["w"]).tolist()]
    expected = np.zeros((4, meta["n"]), bool)
    expected[:, before:] = True
    for head, count in enumerate(counts):
        expected[head, np.argsort(-scores[head, :before], kind="stable")[:count]] = True
    np.testing.assert_array_equal(kept_mask(layer, meta["n"])[0], expected)


def layer_rows(method, tokens, layers):
    request = RequestShape(np.asarray([tokens]), layers, 2)
    return [int(method.budget_rows(np.asarray([tokens]), layer, request)[0, 0]) for layer in range(layers)]


@pytest.mark.parametrize("name", ["pyramidkv_case0", "pyramidkv_case4"])
def test_pyramidkv_in_the_authors_numbers(name):
    arrays, meta = golden(name)
    method = ckv.PyramidKV(Budget(tokens=meta["cap"]), meta["w"], meta["kernel"], "max", meta["beta"], "factory")
    assert layer_rows(method, meta["n"], meta["L"]) == arrays["total_len_per_layer"].tolist()
    for number in (0, 7):
        layer = compress(method, arrays, layer=number, num_layers=meta["L"])
        assert layer.capacity == arrays["total_len_per_layer"][number]
        assert same_kept(positions(layer), arrays[f"kept_idx_layer{number}"], arrays["score"])


def test_the_pyramids_of_many_budgets():
    table, _ = golden("pyramidkv_schedule")
    for tokens, cap, window, layers, layer, total in table["table"].tolist():
        method = ckv.PyramidKV(Budget(tokens=cap), window, mode="factory")
        assert min(tokens, layer_rows(method, tokens, layers)[layer]) == total


def test_pyramidkv_as_kvpress_has_it():
    arrays, meta = golden("kvpress_pyramidkv_case0")
    method = ckv.PyramidKV(Budget(ratio=1 - meta["cr"]), meta["w"], meta["kernel"], "avg", meta["beta"])
    assert layer_rows(method, meta["n"], meta["L"]) == arrays["n_kept_per_layer"].tolist()
    layer = compress(method, arrays, num_layers=meta["L"])
    assert same_kept(positions(layer), arrays["kept_idx_layer0"])


@pytest.mark.parametrize("name", ["kvpress_chunkkv_case0", "kvpress_chunkkv_case2"])
def test_chunkkv_as_kvpress_has_it(name):
    arrays, meta = golden(name)
    # 1 - 0.9 and 0.1 are different numbers; 40 runs at either are 3, as kvpress counts.
    for ratio in {1 - meta["cr"], round(1 - meta["cr"], 6)}:
        layer = compress(ckv.ChunkKV(Budget(ratio=ratio), meta["w"], meta["cl"], "kvpress"), arrays)
        np.testing.assert_array_equal(
            positions(layer), np.broadcast_to(arrays["kept_idx"], (*layer.length.shape, arrays["kept_idx"].shape[-1]))
        )
    np.testing.assert_array_equal(layer.keys[:, :, : arrays["k_out"].shape[2]], arrays["k_out"])


def test_chunkkv_keeps_the_best_runs_whole_and_fills_its_budget():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, h, 107, 8)).astype(np.float32) for h in (4, 2, 2))
    window, chunk, budget = 8, 10, 45
    layer = ckv.compress(ckv.ChunkKV(Budget(tokens=budget), window, chunk), *map(jnp.asarray, (q, k, v)))
    score = np.einsum("khtd,knd->khtn", q.reshape(2, 2, 107, 8)[:, :, -window:], k[0]) / np.sqrt(8)
    score = np.where(np.arange(107) <= np.arange(99, 107)[:, None], score, -np.inf)
    score = np.exp(score - score.max(-1, keepdims=True))
    score = (score / score.sum(-1, keepdims=True)).mean((1, 2)).sum(0)[:99]
    runs = sorted(range(10), key=lambda i: -score[i * chunk : (i + 1) * chunk].sum())
    best = [p for i in runs for p in range(i * chunk, min((i + 1) * chunk, 99))][: budget - window]
    expected = sorted(best) + list(range(99, 107))
    for head in range(2):
        assert positions(layer)[0, head].tolist() == expected


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("h2o_prefill_case0", lambda meta: ckv.H2O(Budget(tokens=meta["cap"]), meta["w"])),
        ("kvpress_observed_attention_case0", lambda _: ckv.H2O(Budget(ratio=0.5), 0, normalize=True)),
        ("streamingllm_factory_case0", lambda meta: ckv.StreamingLLM(Budget(tokens=meta["cap"]))),
    ],
)
def test_what_stays_of_a_prompt(name, method):
    arrays, meta = golden(name)
    assert same_kept(positions(compress(method(meta), arrays)), arrays["kept_idx"])


def test_h2o_sums_do_not_depend_on_the_blocks_of_queries(monkeypatch):
    arrays, meta = golden("h2o_prefill_case0")
    monkeypatch.setattr("clusterkv_jax.kernels.accumulated_attention.reference.PROBABILITIES_AT_ONCE", 4 * 160 * 48)
    layer = compress(ckv.H2O(Budget(tokens=meta["cap"] + 1), meta["w"] + 1), arrays)
    assert set(arrays["kept_idx"][0, 0].tolist()) <= set(positions(layer)[0, 0].tolist())


def test_streamingllm_keeps_the_first_and_the_last():
    arrays, meta = golden("streamingllm_official_case0")
    keys = jnp.zeros((1, 1, meta["n"], 2))
    for name in ("kept_call", "kept_space"):
        layer = ckv.compress(ckv.StreamingLLM(Budget(tokens=len(arrays[name]))), None, keys, keys)
        assert positions(layer)[0, 0].tolist() == arrays[name].tolist()


def test_streamingllm_moves_its_keys_together():
    arrays, meta = golden("kvpress_streamingllm_case0")
    layer = compress(ckv.StreamingLLM(Budget(ratio=0.5), meta["sink"], rerotate=True), arrays)
    np.testing.assert_array_equal(positions(layer), arrays["kept_idx_sorted"])
    np.testing.assert_allclose(layer.keys, arrays["k_rerotated"], atol=1e-5)
    np.testing.assert_array_equal(layer.values, arrays["v_rerotated"])


def steps(method: Method, q, k, v, prompt: int):
    """Compress the first `prompt` tokens and feed the others one by one: attention and layer after each step."""
    total = k.shape[2]
    q, k, v = map(np.asarray, (q, k, v))  # a slice of jax's compiles for each place
    request = RequestShape(np.asarray([prompt]), 1, k.shape[1], reserve=total - prompt)
    tensors = [jnp.asarray(x[:, :, :prompt]) for x in (q, k, v)]
    layer, state, _ = compress_layer(method, tensors, np.asarray([prompt]), request)
    yield None, layer
    step = jax.jit(partial(step_layer, method))
    for t in range(prompt, total):
        token = (jnp.asarray(np.swapaxes(x[:, :, t : t + 1], 1, 2)) for x in (q, k, v))
        attended, layer, state = step(layer, state, StepInputs(*token, jnp.asarray([[t]]), jnp.asarray([[True]])))
        yield np.asarray(attended)[:, 0], layer


def test_h2o_decodes_as_the_authors_code_does():
    arrays, meta = golden("h2o_realdrop_case0")
    method = ckv.H2O(Budget(tokens=meta["hh"] + meta["recent"]), meta["recent"])
    for t, (attended, layer) in enumerate(steps(method, *(jnp.asarray(arrays[x]) for x in "qkv"), meta["n"])):
        np.testing.assert_array_equal(np.sort(positions(layer)), np.sort(arrays["kept_idx"][t]))
        if t:
            np.testing.assert_allclose(attended, arrays["attn_out"][t - 1], atol=2e-5)


def test_cam_merges_the_leaving_value_as_the_authors_code_does():
    """One row leaves: keys are made so that the last query attends as in the file."""
    arrays, meta = golden("cam_official_case0")
    leaving, sinks = meta["n"] - meta["recent"] + 1, meta["start"]
    rows = np.r_[0:sinks, leaving : meta["n"]]
    attention, values = arrays["attn"][:, :, 0, rows], arrays["v"][:, :, rows]
    keys = np.zeros_like(values)
    keys[..., 0] = np.log(attention) * np.sqrt(values.shape[-1])
    queries = np.zeros_like(values)
    queries[..., 0] = 1
    method = ckv.CaM(Budget(tokens=len(rows) - 1), sinks, meta["merge_budget"], stochastic=False)
    layer = ckv.compress(method, *map(jnp.asarray, (queries, keys, values)))
    expected = arrays["v"].copy()
    share = (arrays["p"] / meta["merge_budget"])[:, None, None]
    expected[0, :, leaving + 1 : leaving + 1 + meta["merge_budget"]] += share * expected[0, :, leaving : leaving + 1]
    others = np.delete(rows, sinks)
    np.testing.assert_array_equal(layer.keys, np.delete(keys, sinks, axis=2))
    np.testing.assert_allclose(layer.values, expected[:, :, others], atol=1e-5)
    # The official run drew these numbers: a head whose draw is below p passes everything on.
    passed = arrays["u"] < arrays["p"]
    expected = arrays["v"].copy()
    share = (passed / meta["merge_budget"])[:, None, None]
    expected[0, :, leaving + 1 : leaving + 1 + meta["merge_budget"]] += share * expected[0, :, leaving : leaving + 1]
    np.testing.assert_allclose(expected, arrays["v_out"], atol=1e-6)


def test_cam_merges_as_kvpress_does_each_row_that_leaves():
    """kvpress drops all rows at once and adds each to the first `merge_budget` rows that stay, attention to which is
    what attention to it is compared with: a ring of so many rows, and one that leaves it."""
    arrays, meta = golden("kvpress_cam_case0")
    sinks, span, tokens, target = 4, meta["mb"], meta["n"], meta["target"]
    attention, values = arrays["cum_attn"][0], arrays["v"][0]
    keys = np.zeros_like(values)
    keys[..., 0] = np.log(attention) * np.sqrt(meta["d"])
    queries = np.zeros((1, meta["hq"], tokens, meta["d"]), np.float32)
    queries[..., 0] = 1
    stays = np.r_[0:sinks, tokens - target + sinks : tokens]
    method = ckv.CaM(Budget(tokens=target), sinks, span, stochastic=False)
    layer = ckv.compress(method, jnp.asarray(queries), jnp.asarray(keys[None]), jnp.asarray(values[None]))
    np.testing.assert_array_equal(positions(layer)[0], np.broadcast_to(stays, (meta["hkv"], target)))
    np.testing.assert_allclose(keys[:, stays], np.asarray(layer.keys)[0, :, :target])

    leaving = np.arange(sinks, sinks + meta["steps"])
    rows = np.stack([np.r_[0:sinks, row, stays[sinks : sinks + span]] for row in leaving])
    alone = [jnp.asarray(np.moveaxis(x[:, rows], 1, 0)) for x in (keys, values)]
    queries = jnp.asarray(
        np.broadcast_to(queries[:, :, : rows.shape[1]], (len(rows), *queries[0, :, : rows.shape[1]].shape))
    )
    layer = ckv.compress(dataclasses.replace(method, budget=Budget(tokens=sinks + span)), queries, *alone)
    added = np.asarray(layer.values)[:, :, sinks : sinks + span] - np.asarray(alone[1])[:, :, sinks + 1 :]
    share = np.moveaxis(arrays["p"][0], 1, 0)[:, :, None, None] / span
    np.testing.assert_allclose(
        added, np.broadcast_to(share * np.asarray(alone[1])[:, :, sinks : sinks + 1], added.shape), atol=1e-5
    )
    # The file's run drew: a row whose draw is below its probability is passed on whole.
    passed = np.moveaxis(arrays["u"] < arrays["p"], 2, 0)[:, 0, :, None, None]
    expected = values[:, stays].copy()
    expected[:, sinks : sinks + span] += np.sum(passed * added / (share * span), axis=0)
    np.testing.assert_allclose(expected, arrays["v_out"][0], atol=1e-5)


@pytest.mark.parametrize("stochastic", [False, True])
def test_cam_reads_a_prompt_as_if_it_had_been_decoded(stochastic):
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(1, h, 60, 8)), jnp.float32) for h in (4, 2, 2))
    method = ckv.CaM(Budget(tokens=20), 3, 8, stochastic)
    *_, (_, decoded) = steps(method, q, k, v, 25)
    *_, (_, read) = steps(method, q, k, v, 60)
    order = np.argsort(positions(decoded), axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(positions(decoded), order, axis=-1), positions(read))
    values = np.take_along_axis(np.asarray(decoded.values), order[..., None], axis=2)
    np.testing.assert_allclose(values, read.values[:, :, :20], atol=1e-5)
    plain = np.asarray(v)[:, :, positions(read)[0, 0]]
    assert np.abs(values - plain).max() > 0.01


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    arrays, meta = golden("tiny_llama_weights")
    folder = tmp_path_factory.mktemp("tiny_llama")
    save_file(arrays, folder / "model.safetensors")
    config = {"model_type": "llama", "rope_theta": meta["rope_theta"], "tie_word_embeddings": False, **meta["cfg"]}
    (folder / "config.json").write_text(json.dumps(config))
    return ckv.load(folder)


HALF = Budget(ratio=0.5)
PRESSES = {
    "snapkv": ckv.SnapKV(HALF, 16, 5, "avg", pool_before_group=True),
    "snapkv75": ckv.SnapKV(Budget(ratio=0.25), 16, 5, "avg", pool_before_group=True),
    "pyramidkv": ckv.PyramidKV(HALF, 16, 5, "avg"),
    "chunkkv": ckv.ChunkKV(HALF, 16, 20, "kvpress"),
    # kvpress compresses prompts only: what is decoded is appended.
    "streaming": ckv.Composed(ckv.StreamingLLM(HALF), ckv.Full()),
    "keyrerot": ckv.Composed(ckv.StreamingLLM(HALF, rerotate=True), ckv.Full()),
}


@pytest.mark.parametrize("press", PRESSES)
def test_a_model_answers_as_with_kvpress(tiny_llama, press):
    """220 tokens are compressed, 9 question tokens follow at true positions, then 7 greedy ones."""
    with np.load("tests/golden/tiny_llama_kvpress.npz") as file:
        context, question = jnp.asarray(file["ctx"]), jnp.asarray(file["question"])
        logits, rows, greedy = (file[f"{name}_{press}"] for name in ("logits", "len", "greedy"))
    model, method = tiny_llama, PRESSES[press]
    cache, _ = ckv.prefill(
        model.params, model.config, method, context, jnp.asarray([220]), max_new_tokens=16, step_tokens=9
    )
    assert [int(layer.length[0, 0]) for layer in cache.layers] == rows.tolist()
    step = jax.jit(ckv.decode_step, static_argnums=(1, 2))
    for i in range(9):
        cache, last = step(model.params, model.config, method, cache, question[:, i])
        np.testing.assert_allclose(last[0], logits[i], atol=2e-4)
    ids = []
    for _ in range(7):
        ids.append(int(jnp.argmax(last[0])))
        cache, last = step(model.params, model.config, method, cache, jnp.asarray(ids[-1:]))
    assert ids == greedy.tolist()


def test_rerotated_sinks_stay_near_while_decoding():
    """What a step of the moving window attends to is the paper's: keys at their places in the cache, the query last."""
    from clusterkv_jax.blocks.rope import rotate
    from clusterkv_jax.models.config import Rope

    rope, rng = Rope(1e4, 8), np.random.default_rng(5)
    turned_to = jax.jit(partial(rotate, rope=rope))
    plain = [rng.normal(size=(1, 40, h, 8)).astype(np.float32) for h in (2, 1, 1)]
    turned = [np.asarray(turned_to(x, np.arange(40)[None])) for x in plain[:2]]
    q, k, v = (np.swapaxes(x, 1, 2) for x in (*turned, plain[2]))
    method = ckv.StreamingLLM(Budget(tokens=12), 4, rerotate=True)
    request = RequestShape(np.asarray([20]), 1, 1, reserve=20, rope=rope)
    tensors = (None, *(jnp.asarray(x[:, :, :20]) for x in (k, v)))
    layer, state, _ = compress_layer(method, tensors, np.asarray([20]), request)
    new = StepInputs(
        *(jnp.asarray(np.swapaxes(x[:, :, 20:], 1, 2)) for x in (q, k, v)),
        20 + jnp.arange(20)[None],
        jnp.ones((1, 20), bool),
        rope=rope,
    )
    attended, layer, _ = jax.jit(partial(step_layer, method))(layer, state, new)
    assert int(layer.length[0, 0]) == 12 == layer.capacity
    for t in (20, 27, 39):
        window = np.r_[0:4, t - 7 : t + 1]
        places = np.arange(12)[None]
        key = np.asarray(turned_to(plain[1][:, window], places), np.float64)[0, :, 0]
        query = np.asarray(turned_to(plain[0][:, t : t + 1], places[:, -1:]), np.float64)[0, 0]
        score = query @ key.T / np.sqrt(8)
        weight = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
        np.testing.assert_allclose(np.asarray(attended)[0, t - 20], weight @ plain[2][0, window, 0], atol=1e-5)


def test_chunkkv_layers_that_reuse_compute_no_scores():
    method = ckv.ChunkKV(Budget(tokens=45), 8, 10, reuse_layers=2)
    request = RequestShape(np.asarray([107]), 4, 2)
    assert [plan_layer(method, layer, request).selects for layer in range(4)] == [True, False, True, False]
    rng = np.random.default_rng(4)
    first, second = ([jnp.asarray(rng.normal(size=(1, h, 107, 8)), jnp.float32) for h in (4, 2, 2)] for _ in range(2))

    def compressed(tensors, number, selection):
        layer, _, selection = compress_layer(method, tensors, np.asarray([107]), request, number, selection)
        return layer.positions, selection

    original, selection = compressed(first, 0, None)
    reused, _ = compressed(second, 1, selection)
    own, _ = compressed(second, 2, None)
    np.testing.assert_array_equal(reused, original)
    assert not np.array_equal(own, original)
    programs = [
        str(jax.make_jaxpr(lambda x, h, number=number: compressed(x, number, h))(second, before))
        for number, before in ((2, None), (1, selection))
    ]
    assert ["dot_general" in program for program in programs] == [True, False]
