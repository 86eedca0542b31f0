"""Every method gives the tokens of one device on every kind of mesh, and no step moves a cache between devices."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.decoding import DecodeState, append_step, decode_loop
from clusterkv_jax.generation.batch import make_batch
from clusterkv_jax.generation.stages import prefill_batch
from clusterkv_jax.methods.recompression import due
from clusterkv_jax.runtime.sharding import fitted_mesh, named_mesh, on_mesh
from tests.mesh.test_sharding import CENTROID, CHELSEA, placed
from tests.support.methods import every_method, named
from tests.support.tiny import calmed, prompt, sliding, taught, untied, with_sinks

HALF = ckv.Budget(ratio=0.5)
WORDS = ((3, 5), (7, 1, 4), (2,))
MESHES = ("model=8", "data=2,model=4", "data=4,model=2", "sequence=4,model=2")
KVZIP = ckv.KVzip(HALF, plus=True, chunk=16, instruction=WORDS)
METHODS = [
    ckv.Full(),
    CHELSEA,
    *every_method(HALF),
    ckv.Compactor(HALF, sinks=2, recent=2, chunk=16),
    KVZIP,
    ckv.KVzip(HALF, scope="layer", chunk=16, instruction=WORDS),
    ckv.Quest(HALF, page=4, min_pages=2, dense_layers=0),
    ckv.ClusterKV(HALF, sinks=2, tokens_per_cluster=4, interval=4, interval_clusters=2, dense_layers=0),
    ckv.InfiniGen(HALF, partial_ratio=0.5, dense_layers=0),
]
# Methods whose layers differ, or which choose by what equal tokens of the first layer have alike; one layer shows the
# others, which compiles twice as fast.
OF_LAYERS = ("Chelsea", "ChunkKV", "InfiniGen", "KVzap", "LargeValues", "LargeValuesInPages", "OrbitKV", "PyramidKV")
# These ask of devices what another method asks.
LIKE_ANOTHER = ("DropKV", "GravityKV", "Knorm", "LagKV", "LargeValues", "PyramidKV", "TOVA")


def ordinary(i: int, j: int) -> bool:
    """The others, and of a class its first, meet one mesh, and neighbours in the list different ones."""
    return (i + j) % len(MESHES) == 3 and named(METHODS[i]) not in (*LIKE_ANOTHER, *map(named, METHODS[:i]))


CASES = [
    pytest.param(text, method, marks=[] if ordinary(i, j) else pytest.mark.exhaustive)
    for i, method in enumerate(METHODS)
    for j, text in enumerate(MESHES)
]
COLLECTIVE = re.compile(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
WIDTHS = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


def model_on(text: str, kv_heads: int = 4, layers: int = 2) -> ckv.Model:
    return placed(untied(taught(kv_heads, layers)), named_mesh(text))


ASKED = {"questions": [prompt(3, 5), prompt(4, 3)], "max_new_tokens": 12}
TEXTS = [prompt(1, 48), prompt(2, 33)]


def layers_for(method) -> int:
    return 2 if named(method) in OF_LAYERS else 1


def answers(model: ckv.Model, method) -> ckv.Result:
    return ckv.generate(model, TEXTS, method=method, **ASKED)


def read(model: ckv.Model, method) -> ckv.KVCache:
    """The cache that `answers` begins with, by the same programs."""
    with on_mesh(model.mesh, model.config.num_kv_heads):
        return prefill_batch(model, method, make_batch(model, TEXTS, **ASKED), jax.random.key(0))[0]


@pytest.mark.parametrize(("text", "method"), CASES, ids=lambda x: x if isinstance(x, str) else named(x))
def test_tokens_are_those_of_one_device(text, method):
    layers = layers_for(method)
    models = untied(taught(4, layers)), model_on(text, layers=layers)
    alone, many = (answers(calmed(m, method), method) for m in models)
    assert many.tokens == alone.tokens
    assert many.stats.kept_rows == alone.stats.kept_rows


# A kind of mesh each, the first with devices that heads leave.
ON_MESHES = (
    ("model=8", 2, CENTROID),
    ("data=2,model=4", 4, KVZIP),
    ("data=4,model=2", 4, ckv.H2O(HALF)),
    ("sequence=4,model=2", 4, CENTROID),
)


def on_meshes(*ordinary: str):
    """All of them; ordinary runs take some."""
    marks = [[] if text in ordinary else pytest.mark.exhaustive for text, _, _ in ON_MESHES]
    cases = [pytest.param(*case, marks=mark) for case, mark in zip(ON_MESHES, marks, strict=True)]
    return pytest.mark.parametrize(
        ("text", "kv_heads", "method"), cases, ids=lambda x: x if isinstance(x, str | int) else named(x)
    )


# Rings on devices that heads leave are those of the next test.
@on_meshes("sequence=4,model=2")
def test_windows_are_those_of_one_device(text, kv_heads, method):
    """A ring of 16 slots, which devices that heads leave share."""
    alone = sliding(layers=2, window=16, soft_cap=0.5, kv_heads=kv_heads)
    one, many = (answers(calmed(model, method), method) for model in (alone, placed(alone, named_mesh(text))))
    assert many.tokens == one.tokens
    assert many.stats.kept_rows == one.stats.kept_rows
    assert many.stats.window_rows == one.stats.window_rows


@on_meshes("model=8", "data=4,model=2")
def test_sinks_count_once(text, kv_heads, method):
    """However many devices share the rows of a head; and the biases of experts, whose hidden units they share."""
    alone = with_sinks(kv_heads, layers=2)
    one, many = (answers(calmed(model, method), method) for model in (alone, placed(alone, named_mesh(text))))
    assert many.tokens == one.tokens
    assert many.stats.kept_rows == one.stats.kept_rows
    assert many.stats.window_rows == one.stats.window_rows


def moved(program: jax.stages.Wrapped, *args, **options) -> list[int]:
    """Bytes of what each collective of a program delivers to a device."""
    text = program.lower(*args, **options).compile().as_text()
    assert text is not None
    return [
        sum(WIDTHS[kind] * math.prod(map(int, filter(None, shape.split(",")))) for kind, shape in arrays)
        for arrays in (re.findall(r"(\w+)\[([\d,]*)\]", result) for result in COLLECTIVE.findall(text))
    ]


# Its scores enter beside the rows, on the devices that share those.
ORBIT = ckv.OrbitKV(HALF, sinks=2, recent=4, interval=16)


@pytest.mark.parametrize(
    ("text", "kv_heads", "method"),
    [("model=8", 2, ckv.Full()), *((text, 4, ckv.Full()) for text in MESHES), ("model=8", 2, ORBIT)],
    ids=lambda x: x if isinstance(x, str | int) else named(x),
)
def test_a_step_moves_no_cache(text, kv_heads, method):
    """Devices that share a head's slots exchange outputs; two more collectives a layer, of hidden states."""
    model, tokens = model_on(text, kv_heads), 248
    with on_mesh(model.mesh, model.config.num_kv_heads):
        ids = np.asarray([prompt(1, tokens), prompt(2, tokens)])
        cache, _ = ckv.prefill(model.params, model.config, method, ids, np.asarray([tokens] * 2), max_new_tokens=8)
        state = DecodeState(cache, jnp.zeros(2, jnp.int32), jnp.zeros(2, bool))
        arguments = model.params, model.config, method, state, jax.random.key(0), jnp.int32(0), jnp.int32(4)
        sizes = moved(decode_loop, *arguments, sampling=ckv.Sampling(), eos_ids=(), steps=8)
    layers, hidden = model.config.num_layers, 4 * 2 * model.config.hidden_size
    shares_slots = len(cache.layers[0].keys.sharding.spec) > 2
    large = [size for size in sizes if size >= hidden / 4]
    assert len(large) <= (3 if shares_slots else 2) * layers
    rows = cache.layers[0].keys
    assert max(sizes) <= 8 * (hidden + 4 * 2 * model.config.num_heads) < rows.nbytes / 4


def test_what_devices_tell_each_other_beside_hidden_states_does_not_grow_with_layers():
    """Whether heads are due, and whether they overflow."""

    def step(params, config, cache, token):
        cache, logits = append_step(params, config, CENTROID, cache, token, jnp.ones_like(token[:, 0]))
        return cache, logits, due(CENTROID, cache)

    def beside(layers: int) -> list[int]:
        model = model_on("data=2,model=4", layers=layers)
        with on_mesh(model.mesh, model.config.num_kv_heads):
            arguments = model.params, model.config, read(model, CENTROID), jnp.zeros((2, 1), jnp.int32)
            sizes = moved(jax.jit(step, static_argnums=1), *arguments)
        return [size for size in sizes if size < 4 * model.config.hidden_size]

    one, three = beside(1), beside(3)
    assert three == one
    assert sum(one) <= 4


def test_slots_lie_on_the_devices_that_heads_leave():
    model = model_on("model=8", kv_heads=2)
    assert model.mesh is not None
    assert dict(fitted_mesh(model.mesh, 2).shape) == {"model": 2, "slots": 4}
    keys = read(model, CENTROID).layers[0].keys
    assert keys.addressable_shards[0].data.shape == (2, 1, keys.shape[2] // 4, keys.shape[3])


def test_scores_lie_where_their_rows_lie():
    """After the prompt, and after steps that bring the cache back to its budget."""
    model, method = model_on("model=8", 2, layers=1), dataclasses.replace(ORBIT, interval=4)
    many = answers(model, method)
    assert many.tokens == answers(untied(taught(2, 1)), method).tokens
    cache = read(model, method)
    with on_mesh(model.mesh, model.config.num_kv_heads):
        state = DecodeState(cache, jnp.zeros(2, jnp.int32), jnp.zeros(2, bool))
        arguments = model.params, model.config, method, state, jax.random.key(0), jnp.int32(0), jnp.int32(6)
        after = decode_loop(*arguments, sampling=ckv.Sampling(), eos_ids=(), steps=8)[0].cache
    for now in (read(model, method), after):
        for layer, (memory,) in zip(now.layers, now.state, strict=True):
            assert memory["scores"].shape == layer.degree.shape
            assert memory["scores"].sharding.is_equivalent_to(layer.degree.sharding, 3)
            assert memory["scores"].addressable_shards[0].data.size * 8 == layer.degree.size


def test_heads_of_their_own_budgets_share_every_device():
    """A group of one head leaves all devices but one; its slots lie on all of them."""
    budget = ckv.Budget(ratio=0.5, shares=((1.5, 0.5),))
    method = ckv.GravityKV(budget, sinks=2, recent=4, chunk=16, interval=4)
    model = model_on("model=8", 2, layers=1)
    alone, many = (answers(each, method) for each in (untied(taught(2, 1)), model))
    assert many.tokens == alone.tokens
    leaves = jax.tree.leaves(read(model, method).layers)
    held = [x.addressable_shards[0].data.nbytes / x.nbytes for x in leaves if x.ndim == 4]
    assert held == [1 / 8] * len(held)


@pytest.mark.parametrize("chunk", [None, 8])
def test_a_sequence_axis_reads_what_one_device_reads(chunk):
    """Rows that are kept too, and with projections in chunks."""
    alone, many = taught(4, 1), model_on("sequence=8", layers=1)
    texts = [prompt(1, 120), prompt(2, 100)]
    one, eight = (ckv.generate(m, texts, method=CENTROID, max_new_tokens=8, prefill_chunk=chunk) for m in (alone, many))
    assert eight.tokens == one.tokens
    assert eight.stats.kept_rows == one.stats.kept_rows


def test_what_devices_cannot_share_is_refused():
    model = model_on("sequence=4,model=2")
    message = "A mesh of sequence=4 splits prompts into 8 equal parts, and 50 tokens, padding included, cannot be."
    with on_mesh(model.mesh, model.config.num_kv_heads), pytest.raises(ValueError, match=message):
        ckv.prefill(model.params, model.config, ckv.Full(), np.asarray([prompt(1, 50)]), np.asarray([50]))
    with pytest.raises(ValueError, match="A model axis of 5 devices cannot share the 768 hidden units"):
        ckv.load("demo", mesh=named_mesh("model=5", jax.devices()[:5]))
    longest = dataclasses.replace(model, config=dataclasses.replace(model.config, max_positions=50))
    with pytest.raises(ValueError, match="into 8 equal parts, and 50 tokens"):
        ckv.generate(longest, [prompt(1, 20)], max_new_tokens=4)
