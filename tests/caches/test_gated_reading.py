"""Gated reading: what is kept, of whom, and what it equals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.cache import chunk_attention
from clusterkv_jax.cache.attention import MOST_QUERIES, attend_where, combine
from clusterkv_jax.cache.layers import HeadGroups, LayerCache, StepInputs, groups, occupancy, quantised
from clusterkv_jax.cache.pages import from_heads
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.generation.gated_reading import gated_prefill
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.base import Rows, compacted
from clusterkv_jax.methods.families import eviction
from clusterkv_jax.methods.gating import renumber
from clusterkv_jax.methods.request import GroupPlan
from clusterkv_jax.runtime.dispatch import TRAITS
from clusterkv_jax.runtime.programs import compilation
from tests.support.tiny import VOCAB, padded, prefill, prompt, sliding, taught, tiny, untied, with_sinks

HALF = ckv.Budget(ratio=0.5)
SHARES = replace(HALF, shares=((1.0, 2.0), (3.0, 0.7)))
ROWS = ckv.Budget(tokens=40)
PROMPTS = [prompt(1, 48), prompt(2, 33), prompt(3, 20)]
GATE = Gate(window=16, chunk=8)
SMALL = {"sinks": 2, "recent": 4}
CLUSTERING = SMALL | {"chunk": 16, "interval": 8}


def kinds(budget):
    return [
        ckv.KVzap(budget, **SMALL, decode_interval=8),
        ckv.StreamingLLM(budget, sinks=2),
        ckv.CentroidKV(budget, **CLUSTERING),
        ckv.OrbitKV(budget, **SMALL, interval=8),
    ]


def name(method):
    return type(method).__name__


def gated(method, prompts=PROMPTS, model=None, gate=GATE, fill=0, **options):
    model, options = model or taught(), {"max_new_tokens": 24, "gate": gate} | options
    return gated_prefill(model.params, model.config, method, *padded(*prompts, width=48, fill=fill), **options)


def afterwards(method, prompts=PROMPTS, model=None):
    return prefill(method, *prompts, model=model or taught(), width=48, max_new_tokens=24)


def alike(one, other, atol=2e-4):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-3)


@pytest.mark.parametrize("method", kinds(HALF), ids=name)
def test_a_window_that_holds_the_prompt_changes_nothing(method):
    asked = {"method": method, "max_new_tokens": 12, "questions": [prompt(7, 5)] * 3}
    whole = ckv.generate(taught(), PROMPTS, **asked)
    read = ckv.generate(taught(), PROMPTS, **asked, reading="gated", window=48, chunk=8)
    assert (read.tokens, read.stats.kept_rows) == (whole.tokens, whole.stats.kept_rows)
    assert read.stats.cache_bytes == whole.stats.cache_bytes


@pytest.mark.parametrize("method", kinds(ROWS), ids=name)
def test_a_budget_that_fills_only_at_the_end_compresses_as_afterwards(method):
    """Rows are 40 and a window of 16 beside them, so none goes before the prompt of 48 has been read in chunks."""
    alike(gated(method), afterwards(method))


@pytest.mark.parametrize("method", [*kinds(HALF), *kinds(SHARES)[::3]], ids=name)
def test_budgets_are_met_exactly_and_slots_are_those_of_reading_whole(method):
    (read, _), (whole, _) = gated(method), afterwards(method)
    assert occupancy(read) == occupancy(whole)
    assert jax.tree.map(jnp.shape, read) == jax.tree.map(jnp.shape, whole)
    if method.storage == "centroids":
        in_groups = (layer.groups if isinstance(layer, ckv.PagedHeads) else groups(layer) for layer in read.layers)
        for group in (group for groups_of_layer in in_groups for group in groups_of_layer):
            np.testing.assert_allclose(jnp.sum(group.degree, axis=2)[:, 0], [48, 33, 20], rtol=1e-6)


def test_rows_that_are_kept_by_scores_are_the_best_of_all_read_so_far():
    """Scores of the first layer do not depend on attention, and the best of what is left are the best of all."""
    method = ckv.KVzap(ckv.Budget(tokens=12), **SMALL)
    (read, _), (whole, _) = gated(method), afterwards(method)
    np.testing.assert_array_equal(read.layers[0].positions, whole.layers[0].positions)
    assert not np.array_equal(read.layers[1].values, whole.layers[1].values)


def test_streaming_keeps_the_first_and_the_latest():
    cache, _ = gated(ckv.StreamingLLM(ckv.Budget(tokens=10), sinks=2))
    assert np.asarray(cache.layers[1].positions)[0, 0, :10].tolist() == [0, 1, *range(40, 48)]


@pytest.mark.parametrize("method", [*kinds(HALF), kinds(SHARES)[0]], ids=name)
def test_prompts_of_a_batch_are_read_as_each_alone(method):
    model = untied(taught())
    together, logits = gated(method, model=model, whole=0)
    for i in range(2):
        cache, alone = gated(method, PROMPTS[i : i + 1], model=model)
        np.testing.assert_allclose(logits[i], alone[0], atol=2e-3)
        assert [[row[i]] for row in occupancy(together)] == occupancy(cache)


@pytest.mark.parametrize("method", kinds(HALF)[2:], ids=name)
def test_padding_never_matters(method):
    model = taught()
    embed = jnp.asarray(model.params["embed"]).at[VOCAB - 1].set(jnp.nan)
    poisoned = replace(model, params=model.params | {"embed": embed})
    prompts = [[min(token, VOCAB - 2) for token in row] for row in PROMPTS]
    (one, _), (other, _) = gated(method, prompts), gated(method, prompts, model=poisoned, fill=VOCAB - 1)
    alike(one, other, atol=0)


@pytest.mark.parametrize("model", [sliding, with_sinks])
def test_layers_with_windows_and_sink_logits_are_read_in_chunks(model):
    method = kinds(ROWS)[0]
    alike(gated(method, model=model()), afterwards(method, model=model()))


@pytest.mark.parametrize("method", kinds(HALF), ids=name)
def test_questions_and_answers_go_on_from_what_was_read(method):
    asked = {"method": method, "max_new_tokens": 20, "questions": [prompt(7, 5)] * 3, "window": 16, "chunk": 8}
    read = ckv.generate(taught(), PROMPTS, **asked, reading="gated")
    assert [len(tokens) for tokens in read.tokens] == [20] * 3
    assert read.stats.reading_bytes > read.stats.cache_bytes / 2 > 0


def test_longer_prompts_take_no_other_programs():
    method = kinds(ckv.Budget(tokens=16))[2]
    gated(method, [prompt(1, 26)])
    with compilation() as compiled:
        gated(method, [prompt(2, 42)])
    assert compiled.programs == 0


def test_memory_does_not_grow_with_the_prompt():
    held = []
    method = kinds(ckv.Budget(tokens=16))[0]
    gated(method, [prompt(1, 48)], on_chunk=lambda done, cache: held.append((done, cache.layers[0].capacity)))
    assert held == [(24, 16 + 16 - 4 + 8), (32, 36), (40, 36), (48, 36)]


def short_of_positions(positions=100):
    model = taught()
    return replace(model, config=replace(model.config, max_positions=positions))


def test_rows_that_are_renumbered_say_the_same_where_nothing_stood_between_them():
    """Of a ring of latest rows all distances stay true."""
    method, model = ckv.StreamingLLM(ckv.Budget(tokens=12), sinks=0), taught()
    cache, _ = gated(method)
    token = jnp.asarray([3, 5, 7])
    moved = renumber(jax.tree.map(jnp.copy, cache), model.config.ropes)
    assert np.asarray(moved.layers[0].positions)[0, 0, :12].tolist() == list(range(12))
    assert moved.position.tolist() == [12, 12, 12]
    step = jax.jit(ckv.decode_step, static_argnums=(1, 2))
    one, other = (step(model.params, model.config, method, x, token)[1] for x in (cache, moved))
    np.testing.assert_allclose(one, other, atol=2e-3)


@pytest.mark.parametrize("budget", [ckv.Budget(tokens=16), ckv.Budget(tokens=16, shares=((1.0, 2.0), (3.0, 0.7)))])
def test_a_text_without_end_is_read_in_the_positions_of_the_model(budget):
    method = kinds(budget)[0]
    asked = {"method": method, "max_new_tokens": 6, "question": [5, 6, 7], "reading": "gated", "window": 16, "chunk": 8}
    text = prompt(1, 700)
    with pytest.raises(ValueError, match="exceed the model's 200 positions"):
        ckv.generate(short_of_positions(200), [text], **asked)
    read = ckv.generate(short_of_positions(200), [text], **asked, renumber=True)
    assert len(read.tokens[0]) == 6
    assert np.mean(read.stats.kept_rows) == pytest.approx(16, abs=1)


@pytest.mark.parametrize("method", kinds(HALF)[::3], ids=name)
def test_an_engine_reads_as_generate_does(method):
    how = {"method": method, "reading": "gated", "window": 16, "chunk": 8}
    engine = ckv.Engine(untied(taught()), slots=2, max_tokens=80, reserve=16, **how)
    asked = {"max_new_tokens": 6, "questions": [prompt(7, 5)] * 2}
    for one, question in zip(engine.generate(PROMPTS[:2], **asked), PROMPTS[:2], strict=True):
        alone = ckv.generate(untied(taught()), [question], **how, **asked | {"questions": [prompt(7, 5)]})
        assert (one.tokens, one.stats.kept_rows) == (alone.tokens, alone.stats.kept_rows)
    whole = ckv.Engine(untied(taught()), method=method, slots=2, max_tokens=80, reserve=16)
    assert engine.memory.slots == whole.memory.slots


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4}, "window must be a whole number of at least the chunk, 8, got 4"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1, got 0"),
        ({"reading": "in parts"}, "reading must be 'whole' or 'gated', got 'in parts'"),
        ({"method": ckv.SnapKV(HALF)}, "SnapKV needs later queries, or all rows at once"),
        ({"method": ckv.KVzip(HALF)}, "KVzip needs later queries"),
        ({"method": ckv.KVzap(HALF, scope="layer")}, "KVzap needs later queries"),
        ({"method": kinds(ckv.Budget(tokens=48))[0]}, "keeps all of a prompt of 48 tokens with this budget"),
        ({"method": ckv.Full()}, "Full"),
        ({"renumber": True, "reading": "whole"}, "renumber=True is for reading='gated'"),
        ({"renumber": True, "max_new_tokens": 200}, "Rows, window and chunk of .* exceed the model's 256 positions"),
        ({"prefill_chunk": 8}, "prefill_chunk=8 is for reading='whole'"),
        ({"max_new_tokens": 300}, "exceed the model's 256 positions"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(options, message):
    asked = {"method": kinds(HALF)[0], "reading": "gated", "window": 16, "chunk": 8, "max_new_tokens": 4} | options
    with pytest.raises(ValueError, match=message):
        ckv.generate(taught(), PROMPTS, **asked)


def test_an_engine_refuses_at_once_what_it_cannot_read():
    with pytest.raises(ValueError, match="SnapKV needs later queries"):
        ckv.Engine(taught(), method=ckv.SnapKV(HALF), reading="gated")


def test_scores_need_a_calibration():
    with pytest.raises(ValueError, match="KVzap keeps rows by learned scores"):
        gated(kinds(HALF)[0], model=tiny())


def group(rng, heads, slots, length):
    """Rows of so many heads, of degree 1, and what lies behind them."""
    keys, values = (jnp.asarray(rng.normal(size=(1, heads, slots, 8)), jnp.float32) for _ in range(2))
    degree = jnp.broadcast_to(ordinals(slots, 3) < length, (1, heads, slots)).astype(jnp.float32)
    keys, values = (jnp.where(degree[..., None] > 0, x, 0.0) for x in (keys, values))
    return LayerCache(keys, values, degree, jnp.full((1, heads), length))


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_that_a_kernel_moves_stand_where_a_loop_over_heads_puts_them(monkeypatch, in_place):
    rng, method = np.random.default_rng(0), kinds(HALF)[0]
    held = replace(group(rng, 3, 40, 33), positions=ordinals(40, 3) + jnp.zeros((1, 3, 1), jnp.int32))
    state = {"scores": jnp.asarray(rng.normal(size=(1, 3, 40)), jnp.float32)}
    rows = Rows(held, jnp.asarray([12]), jnp.asarray([33]), state, plan=GroupPlan((0, 1, 2), 40))
    loop = compacted(method.recompress(rows))
    monkeypatch.setattr(eviction, "traits", lambda: TRAITS["gpu"])
    alike(compacted(method.recompress(rows), in_place=in_place), loop, atol=0)


def library(q, keys, values, lengths):
    """What a device's attention gives, by plain products, heads first."""
    count, rows = q.shape[2], keys.shape[2]
    ends = jnp.arange(count)[None] + 1 if lengths is None else jnp.broadcast_to(lengths[:, None], (len(q), count))
    found = attend_where(jnp.swapaxes(q, 1, 2), keys, values, ordinals(rows, 3) < ends[..., None])
    return tuple(jnp.swapaxes(x, 1, 2) for x in found)


@pytest.mark.parametrize("layer", ["one group", "groups", "codes", "pages"])
@pytest.mark.parametrize("serves", [True, False], ids=["library", "plain"])
def test_a_chunk_attends_to_rows_and_itself(monkeypatch, layer, serves):
    rng, count, kv_heads = np.random.default_rng(0), MOST_QUERIES + 88, 3
    held = group(rng, kv_heads, 40, 33)
    if layer == "groups":
        held = HeadGroups((group(rng, 2, 24, 20), group(rng, 1, 60, 57)), ((2, 0), (1,)))
    if layer == "codes":
        held = quantised(held, "int8")
    if layer == "pages":
        held = replace(held, positions=jnp.zeros(held.degree.shape, jnp.int32))
        held = replace(from_heads(held, jnp.asarray([[0, 5, 10]]), 15, 8), head_slots=(((0, 1, 2), 40),))
    q, k, v = (jnp.asarray(rng.normal(size=(1, count, h, 8)), jnp.float32) for h in (6, kv_heads, kv_heads))
    real = jnp.arange(count)[None] < count - 9
    tokens = StepInputs(q, k, v, jnp.arange(count)[None], real, sink_logits=jnp.arange(6.0))
    monkeypatch.setattr(chunk_attention, "attention_with_lse", lambda *_: library if serves else None)
    found = chunk_attention.attend_chunk(held, tokens, plain=True)
    for start in range(0, count - 9, 200):  # a few tokens at a time attend by what questions attend by
        some = slice(start, min(start + 200, count - 9))
        among = attend_where(
            q[:, some],
            jnp.swapaxes(k, 1, 2),
            jnp.swapaxes(v, 1, 2),
            jnp.tril(jnp.ones((1, count, count), bool))[:, some],
        )
        rows = chunk_attention.attend_cache(held, q[:, some])
        np.testing.assert_allclose(found[:, some], combine(rows, among, tokens.sink_logits), atol=2e-5)
