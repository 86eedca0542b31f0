"""Heads of unequal budgets: compressed together, each as a sequence of its own, they are what each is alone."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import StepInputs, group_heads, groups, pad_slots, resize
from clusterkv_jax.methods import driver, heads_as_batch, prefill_compression, recompression, sharing
from clusterkv_jax.methods.plan import few_sizes, plan_layer, rows_of_request
from clusterkv_jax.methods.request import request_of_tensors
from clusterkv_jax.runtime import control_flow
from clusterkv_jax.runtime.dispatch import TRAITS
from clusterkv_jax.runtime.programs import compilation
from clusterkv_jax.runtime.sharding import named_mesh

LAYERS, HEADS, GROUP, DIM, PROMPT = 3, 3, 2, 8, 100
SHARES = ((3.0, 0.5, 0.5), (0.2, 1.0, 1.5), (0.4, 0.6, 0.3))  # heads alike; around the mean; a layer of little
BUDGET = ckv.Budget(ratio=0.3, shares=SHARES)
LENGTHS = np.asarray([100, 71, 45])

METHODS = {
    "centroids": ckv.CentroidKV(BUDGET, sinks=2, recent=4, chunk=32, interval=16),
    "gravity": ckv.GravityKV(BUDGET, sinks=2, recent=4, chunk=32, interval=16, cache_dtype="int8"),
    "orbit": ckv.OrbitKV(BUDGET, interval=16),
    "outliers": ckv.Chelsea(ckv.Budget(ratio=0.3), sinks=2, recent=4, chunk=32, interval=16, outlier_heads=((1, 1),)),
    "window": ckv.SnapKV(BUDGET, window=4, decode_interval=16),
    "scores": ckv.KVzap(BUDGET, sinks=2, recent=4, decode_interval=16),
    "moments": ckv.ExpectedAttention(BUDGET, decode_interval=16),
    "both": ckv.Composed(
        ckv.SnapKV(replace(BUDGET, ratio=0.2), window=4),
        ckv.GravityKV(BUDGET, sinks=2, recent=4, chunk=32, interval=16),
    ),
}


def prompt(seed: int = 0) -> driver.LayerPrompt:
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    batch, rows = len(LENGTHS), (HEADS, PROMPT, DIM)
    queries, keys, values = draw(batch, HEADS * GROUP, PROMPT, DIM), draw(batch, *rows), draw(batch, *rows)
    return driver.LayerPrompt(queries, keys, values, jnp.asarray(LENGTHS), scores=draw(batch, HEADS, PROMPT))


def planned(method, layer):
    whole = prompt(layer)
    request = request_of_tensors(whole.keys, whole.values, np.arange(1, PROMPT + 1), LAYERS, 64)
    return whole, plan_layer(method, layer, request), request


def compressed(method, layer, together=True):
    """A layer after its prompt, and what is remembered of its groups."""
    whole, plan, request = planned(method, layer)
    budgets = rows_of_request(method, plan, LENGTHS, layer, request)
    plan = plan if together else replace(plan, by_head=None)
    return jax.jit(lambda key: driver.compress_layer(method, whole, budgets, plan, key)[:2])(jax.random.key(layer))


compressed_once = functools.cache(compressed)


def of_heads(layer, state):
    """What each head of a layer holds in slots for a prompt and more, and what is remembered of it."""
    slots, heads = 256, {}
    for group, numbers, memory in zip(groups(layer), group_heads(layer), state, strict=True):
        memory = memory or {}
        if isinstance(group, ckv.PagedHeads):
            held, memory = heads_as_batch.copies(replace(group, head_slots=((tuple(range(HEADS)), slots),)), memory)
        else:
            held, shape = resize(group, slots), (len(LENGTHS), len(numbers), -1)
            in_slots = {name: pad_slots(x, slots) for name, x in memory.items() if name in heads_as_batch.OF_SLOTS}
            memory = {
                name: jnp.stack([x] * len(numbers), axis=1) if x.ndim == 1 else x.reshape(*shape, *x.shape[2:])
                for name, x in (memory | in_slots).items()
            }
        for i, head in enumerate(numbers):
            heads[head] = jax.tree.map(lambda x, i=i: x[:, i], (held, memory))
    return [heads[head] for head in sorted(heads)]


def same_heads(got, want):
    """What stays whole is remembered by no group, and never due."""
    for (held, memory), (rows, remembered) in zip(of_heads(*got), of_heads(*want), strict=True):
        same((held, {name: memory[name] for name in remembered}), (rows, remembered))


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_leaves_what_each_group_would_alone(name):
    """Rows, their numbers, and what is remembered: of sequences of unequal length, and of heads alike."""
    layer = 0 if name in ("centroids", "scores") else 1
    together, apart = (compressed_once(METHODS[name], layer, together=together) for together in (True, False))
    (in_pages, _), (in_groups, _) = together, apart
    assert isinstance(in_pages, ckv.PagedHeads)
    assert not isinstance(in_groups, ckv.PagedHeads)
    same_heads(together, apart)
    assert in_pages.heads == group_heads(in_groups)
    same(in_pages.groups, groups(in_groups))


@pytest.mark.parametrize("name", METHODS)
def test_groups_become_pages(name):
    """As the heads of older files do."""
    _, plan, _ = planned(METHODS[name], 1)
    together, apart = (compressed_once(METHODS[name], 1, together=together) for together in (True, False))
    layer, state = heads_as_batch.repaged(*apart, plan.pool)
    same(layer, together[0])
    same_heads((layer, state), apart)
    assert jax.tree.structure(state) == jax.tree.structure(together[1])


def extended(method, together=True):
    """A layer whose heads have taken 40 tokens more, and have been due on the way."""
    layer, state = compressed(method, 1, together=together)
    cache = ckv.KVCache((layer,), (state,), jnp.asarray(LENGTHS))
    rng, rounds = np.random.default_rng(5), 0

    @jax.jit
    def step(cache, k, v, q, scores):
        real, at = jnp.ones((len(LENGTHS), 1), bool), cache.position[:, None]
        new = StepInputs(q, k, v, at, real, scores=scores)
        attended, layer, state = driver.step_layer(method, cache.layers[0], cache.state[0], new)
        return attended, replace(cache, layers=(layer,), state=(state,), position=cache.position + 1)

    recompress = jax.jit(lambda cache: recompression.recompress(method, cache, (None,) * len(cache.layers)))
    for _ in range(40):

        def draw(*shape):
            return jnp.asarray(rng.standard_normal((len(LENGTHS), 1, *shape)), jnp.float32)

        attended, cache = step(cache, draw(HEADS, DIM), draw(HEADS, DIM), draw(HEADS * GROUP, DIM), draw(HEADS))
        late = recompression.due(method, cache)
        if late is not None and late:
            cache, rounds = recompress(cache), rounds + 1
    assert rounds >= 2
    return attended, cache


extended_once = functools.cache(extended)


@pytest.mark.parametrize(
    ("name", "most_bytes"), [("orbit", None), ("gravity", 1), ("window", 1), ("moments", None), ("both", None)]
)
def test_decoding_leaves_what_each_group_would_alone(name, most_bytes, monkeypatch):
    """All sequences at once, and one after the other where copies of all would be too large."""
    want, apart = extended_once(METHODS[name], together=False)
    if most_bytes is not None:
        turns = heads_as_batch.in_turns
        monkeypatch.setattr(heads_as_batch, "in_turns", lambda function, tree: turns(function, tree, most_bytes))
    got, together = extended(METHODS[name])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # pages are combined
    same_heads((together.layers[0], together.state[0]), (apart.layers[0], apart.state[0]))


@pytest.mark.parametrize("name", ["orbit", "gravity", "scores"])
def test_heads_in_pages_take_the_step_of_groups_on_a_gpu(name, monkeypatch):
    """Scores and codes enter with the rows."""
    (want, apart), steps = extended_once(METHODS[name]), []
    monkeypatch.setattr(heads_as_batch, "traits", lambda: TRAITS["gpu"])
    step = heads_as_batch.step
    monkeypatch.setattr(heads_as_batch, "step", lambda *args: steps.append(1) or step(*args))
    got, together = extended(METHODS[name])
    assert steps
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    same(together, apart)


@pytest.mark.parametrize("name", ["centroids", "gravity", "scores"])
def test_equal_heads_take_the_step_of_groups_on_a_gpu(name, monkeypatch):
    """What a layer without groups becomes by it is what it becomes by itself."""
    method = replace(METHODS[name], budget=replace(BUDGET, shares=None))
    alone, steps = extended_once(method), []
    monkeypatch.setattr(heads_as_batch, "traits", lambda: TRAITS["gpu"])
    step = heads_as_batch.step
    monkeypatch.setattr(heads_as_batch, "step", lambda *args: steps.append(1) or step(*args))
    same(extended(method), alone)
    assert steps


@pytest.mark.parametrize("mesh", ["model=3", "data=2"])
@pytest.mark.parametrize("name", ["centroids", "scores"])
def test_devices_take_the_step_of_groups_for_heads_or_sequences_of_their_own(name, mesh, monkeypatch):
    method = replace(METHODS[name], budget=replace(BUDGET, shares=None))
    alone, steps = extended_once(method), []
    monkeypatch.setattr(heads_as_batch, "traits", lambda: TRAITS["gpu"])
    step = heads_as_batch.step
    monkeypatch.setattr(heads_as_batch, "step", lambda *args: steps.append(1) or step(*args))
    with jax.set_mesh(named_mesh(mesh, jax.devices()[: int(mesh[-1])])):
        got = extended(method)
    same(got, alone)
    assert steps


@pytest.mark.parametrize("name", ["gravity", "scores"])
def test_a_gpu_brings_one_layer_after_the_other_to_its_budget(name, monkeypatch):
    """Layers that are due become what they become elsewhere, and the one between them stays as it is."""
    method, parts = METHODS[name], [compressed(METHODS[name], layer) for layer in range(LAYERS)]

    def sooner(memory):
        return memory | {"due": memory["budget"], "budget": memory["budget"] // 2}

    states = [tuple(memory and sooner(memory) for memory in state) for _, state in parts]
    states[1] = parts[1][1]
    cache = ckv.KVCache(tuple(layer for layer, _ in parts), tuple(states), jnp.asarray(LENGTHS))

    def recompressed():
        return jax.jit(lambda cache: recompression.recompress(method, cache, (None,) * len(cache.layers)))(cache)

    elsewhere = recompressed()
    monkeypatch.setattr(control_flow, "platform", lambda: "gpu")
    got = recompressed()
    same(got, elsewhere)
    same((got.layers[1], got.state[1]), (cache.layers[1], cache.state[1]))
    rows = [[sum(int(group.length.sum()) for group in groups(layer)) for layer in each.layers] for each in (got, cache)]
    assert [now < before for now, before in zip(*rows, strict=True)] == [True, False, True]


def test_all_layers_share_the_program_that_compresses():
    method, whole = METHODS["orbit"], prompt()
    request = request_of_tensors(whole.keys, whole.values, np.arange(1, PROMPT + 1), LAYERS, 64)
    plans = [plan_layer(method, layer, request) for layer in range(LAYERS)]
    assert len({plan.by_head for plan in plans}) == 1
    assert len({plan.capacities for plan in plans}) == LAYERS
    called = []

    def run(program, *args):
        called.append(program.__name__)
        return program(*args)

    with compilation() as compiled:
        for number, plan in enumerate(plans):
            budgets = rows_of_request(method, plan, LENGTHS, number, request)
            read = prefill_compression.ReadLayer(number, plan, whole, budgets)
            (layer_and_state,), *_ = prefill_compression.compress(run, method, [read], jax.random.key(0), None, None)
            same(layer_and_state, jax.jit(compress_layer_of(method, plan, whole, budgets, number))())
    assert called == ["_compress_heads", "_page_heads", "_cut_pages"] * LAYERS
    assert compiled.programs >= 1


def compress_layer_of(method, plan, whole, budgets, number):
    key = jax.random.fold_in(jax.random.key(0), number)
    return lambda: driver.compress_layer(method, whole, budgets, plan, key)[:2]


@pytest.mark.parametrize(
    "method",
    [
        ckv.ChunkKV(BUDGET, window=4, chunk=4),
        ckv.Compactor(BUDGET),
        ckv.Matched(ckv.Compactor(BUDGET)),
        ckv.Composed(ckv.ChunkKV(BUDGET, window=4, chunk=4), ckv.Full()),
        ckv.H2O(BUDGET),
        ckv.StreamingLLM(BUDGET, rerotate=True),
        ckv.ClusterKV(BUDGET, sinks=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_heads_that_agree_or_take_turns_stay_in_groups(method):
    assert not sharing.is_by_head(method, LAYERS)


def test_heads_of_a_layer_have_slots_of_their_own():
    """However they were compressed: no head has the slots of the largest."""
    layer, _ = compressed(METHODS["centroids"], 1)
    slots = np.asarray(layer.capacity)[0].tolist()
    assert len(set(slots)) == HEADS
    assert max(slots) > 3 * min(slots) / 2


@given(needs=st.lists(st.integers(1, 1000), min_size=1, max_size=30), more=st.sampled_from([0.0, 0.05, 0.3]))
def test_pools_have_few_sizes_and_hardly_more_pages(needs, more):
    needs = sorted(needs)
    sizes = few_sizes(needs, more)
    assert list(sizes) == sorted(set(sizes))
    taken = [next(size for size in sizes if size >= need) for need in needs]
    assert sum(taken) <= (1 + more) * sum(needs)
    assert more or sizes == tuple(sorted(set(needs)))
    # One size less would take more, whichever they were: of few needs all choices are tried.
    for fewer in itertools.combinations(sorted(set(needs))[:-1], len(sizes) - 2) if 2 <= len(sizes) <= 3 else ():
        chosen = (*fewer, needs[-1])
        assert sum(min(size for size in chosen if size >= need) for need in needs) > (1 + more) * sum(needs)
