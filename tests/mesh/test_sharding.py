"""Tensor parallelism on eight fake devices gives the tokens of one device; what does not divide stays whole."""

import contextlib
import dataclasses
import logging
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import clusterkv_jax as ckv
from clusterkv_jax.benchmark.own_runner import random_params
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.runtime.sharding import (
    auto_mesh,
    first_greatest,
    fitted_mesh,
    named_mesh,
    param_shardings,
    partition,
    replicated,
    whole_axes,
)
from tests.support.tiny import calmed, prompt, taught, tiny, untied

HALF = ckv.Budget(ratio=0.5)
WORDS = ((3, 5), (7, 1, 4), (2,))
CENTROID = ckv.CentroidKV(ckv.Budget(ratio=0.5), sinks=2, recent=4, chunk=16, interval=4)
CHELSEA = ckv.Chelsea(
    ckv.Budget(ratio=0.5), sinks=2, recent=4, chunk=16, interval=4, outlier_heads=((1, 0), (1, 2), (1, 3))
)


def mesh(*shape):
    return auto_mesh(jax.make_mesh(shape, ("data", "model")[-len(shape) :]))


def placed(model, mesh):
    """The model as `load(..., mesh=)` lays it out."""
    shardings = param_shardings(abstract(model.config), fitted_mesh(mesh, model.config.num_kv_heads))
    scored = zip(shardings["layers"], model.params["layers"], strict=True)
    layers = tuple(each | ({"surrogate": replicated(mesh)} if "surrogate" in x else {}) for each, x in scored)
    shardings = shardings | {"layers": layers}
    return dataclasses.replace(model, params=jax.device_put(model.params, shardings), mesh=mesh)


def often(*case):
    """A case for runs that try everything; test_every_method has a like one."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("shape", "method"),
    [
        often((1, 4), CHELSEA),
        often((8,), CENTROID),
        often((8,), ckv.AdaKV(HALF, window=4, kernel=3)),
        ((8,), ckv.DropKV(HALF, window=4, kernel=3, scope="layer", decode_interval=4)),
        often((8,), ckv.KVzip(HALF, scope="layer", chunk=16, instruction=WORDS)),
        often((2, 4), ckv.ExpectedAttention(HALF, future=16, scope="layer", decode_interval=4)),
    ],
)
def test_tokens_are_those_of_one_device(shape, method):
    layers = 2 if method is CHELSEA else 1
    model, prompts = calmed(untied(taught(4, layers)), method), [prompt(1, 48), prompt(2, 33)]
    alone = ckv.generate(model, prompts, method=method, questions=[prompt(3, 5), prompt(4, 3)], max_new_tokens=12)
    many = placed(model, mesh(*shape))
    result = ckv.generate(many, prompts, method=method, questions=[prompt(3, 5), prompt(4, 3)], max_new_tokens=12)
    assert result.tokens == alone.tokens
    assert result.stats.kept_rows == alone.stats.kept_rows


def test_heads_lie_on_their_devices():
    model = placed(tiny(kv_heads=4), mesh(2, 4))
    assert model.mesh is not None
    query = model.params["layers"][0]["attention"]["q"]
    assert query.sharding.spec == P("model", None, None)
    with jax.set_mesh(model.mesh):
        tokens = np.asarray([prompt(1, 48), prompt(2, 48)])
        cache, _ = ckv.prefill(model.params, model.config, CENTROID, tokens, np.asarray([48, 48]))
    assert cache.layers[0].keys.sharding.spec[:2] == ("data", "model")


def test_pages_lie_on_all_devices():
    """Several to a head, with the tokens of one device: a page's owner may lie elsewhere."""
    one, method = tiny(kv_heads=4, layers=1), ckv.AdaKV(HALF, window=4, kernel=3, decode_interval=4)
    model = placed(one, mesh(2, 4))
    assert model.mesh is not None
    with jax.set_mesh(model.mesh):
        tokens = np.asarray([prompt(1, 200), prompt(2, 200)])
        cache, _ = ckv.prefill(model.params, model.config, method, tokens, np.asarray([200, 170]))
    assert cache.layers[0].keys.sharding.spec[:2] == ("data", "model")
    texts = [prompt(1, 200), prompt(2, 170)]
    alone, many = (ckv.generate(m, texts, method=method, max_new_tokens=12) for m in (one, model))
    assert many.tokens == alone.tokens
    assert many.stats.kept_rows == alone.stats.kept_rows
    # Three pages more at most, so that they divide.
    assert 0 <= many.stats.cache_bytes - alone.stats.cache_bytes <= 2 * 3 * 128 * (2 * 8 * 4 + 4)


def test_what_does_not_divide_stays_whole_and_is_named():
    specs = abstract(tiny(kv_heads=2).config)
    assert whole_axes(specs, mesh(1, 8)) == ("heads", "kv_heads", "vocab")
    assert whole_axes(specs, mesh(4, 2)) == ("vocab",)
    assert partition(("batch", "kv_heads", None), (4, 2, 7), mesh(1, 8)) == P("data", None, None)


def test_a_mesh_needs_a_model_axis():
    alone = jax.make_mesh((8,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match=r"A mesh needs an axis beside 'sequence' and 'slots', got \('sequence',\)."):
        ckv.load("demo", mesh=alone)


def test_one_mesh_axis_cannot_split_two_dimensions():
    with pytest.raises(ValueError, match="two dimensions over one axis"):
        partition(("heads", "mlp"), (8, 8), mesh(8))


def test_a_mesh_by_names():
    assert dict(named_mesh("data=2,model=4").shape) == {"data": 2, "model": 4}
    assert named_mesh("sequence=4, data=2").axis_names == ("data", "sequence", "model")
    assert named_mesh("model=2", jax.devices()[:2]).devices.tolist() == jax.devices()[:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=3", "The mesh model=3 is for 3 devices, and there are 8."),
        ("heads=8", "each of data, sequence, model once, .*, got 'heads=8' in 'heads=8'"),
        ("model=4,model=2", "got 'model=2' in 'model=4,model=2'"),
        ("model=0", "got 'model=0'"),
        ("", "got ''"),
    ],
)
def test_what_is_no_mesh(text, message):
    with pytest.raises(ValueError, match=message):
        named_mesh(text)


@pytest.mark.parametrize("prompts", [[prompt(i, 40) for i in range(1, 5)], [prompt(1, 40)] * 4], ids=["own", "copies"])
def test_all_segments_of_a_text_are_one_program(prompts, caplog):
    """The first begins with what the prompt left on the mesh, the others with what a segment left."""
    model = placed(tiny(), named_mesh("data=4,model=2"))
    with caplog.at_level(logging.DEBUG, logger="jax"):
        ckv.generate(model, prompts, method=CENTROID, max_new_tokens=70, progress=lambda *state: None)
    assert sum("Compiling jit(decode_loop)" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("text", ["model=8", "data=4,model=2", "data=8", "model=1", None])
def test_the_first_greatest_of_each_row_is_found_where_devices_share_its_columns(text):
    """Of equal numbers the first, as on one device; a row with a number that is not finite is told from the others.
    By one collective, an all-reduce; on one device without any detour.
    """
    alone = text in ("model=1", None)
    rows = np.random.default_rng(0).integers(0, 6, (4, 32)).astype(np.float32)
    rows[1, 9], rows[2, 30] = np.nan, -np.inf
    devices = jax.devices()[: 1 if alone else 8]
    with contextlib.nullcontext() if text is None else jax.set_mesh(named_mesh(text, devices)):
        program = jax.jit(first_greatest)
        places, finite = program(rows)
        assert ("shard_map" in str(jax.make_jaxpr(first_greatest)(rows))) == (not alone)
        names = re.findall(r" (all-[a-z-]+|collective-permute)\(", program.lower(rows).compile().as_text() or "")
    assert names == ([] if alone else ["all-reduce"])
    assert places.dtype == np.int32
    np.testing.assert_array_equal(finite, [True, False, False, True])
    np.testing.assert_array_equal(places[finite], rows[finite].argmax(axis=1))


def test_random_weights_lie_on_all_devices_of_their_mesh():
    """A surrogate's too: what lies on one device alone is copied to the others at every call of a program."""
    many = named_mesh("model=4", jax.devices()[:4])
    for x in jax.tree.leaves(random_params(tiny(4).config, np.float32, many)):
        assert x.sharding.device_set == set(many.devices.flat)
