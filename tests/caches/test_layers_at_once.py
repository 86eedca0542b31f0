"""Layers that a GPU compresses at once, as sequences of one batch: each becomes what it becomes alone."""

from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import soft_matching
from clusterkv_jax.methods import prefill_compression
from clusterkv_jax.methods.driver import LayerPrompt
from clusterkv_jax.methods.plan import plan_layer
from clusterkv_jax.methods.request import request_of_tensors
from clusterkv_jax.runtime.dispatch import TRAITS
from tests.caches.test_by_head import same
from tests.support.tiny import prompt, sliding, taught

LAYERS = 4
HALF = ckv.Budget(ratio=0.5)
UNEQUAL = replace(HALF, shares=((1.5, 0.5), (0.6, 1.4), (1.2, 0.8), (0.9, 1.1)))
SMALL = {"sinks": 2, "recent": 4, "chunk": 16, "interval": 8}
GRAVITY = ckv.GravityKV(HALF, **SMALL)
TOGETHER = {
    "centroids": ckv.CentroidKV(HALF, **SMALL),
    "codes": replace(GRAVITY, cache_dtype="int8"),
    "scores": ckv.OrbitKV(HALF, interval=8),
    "fitted": ckv.Matched(GRAVITY),
    "pair": ckv.Composed(GRAVITY, ckv.SnapKV(HALF, window=4, decode_interval=8)),
}
ALONE = {
    "all rows": ckv.Full(),
    "no merges": ckv.SnapKV(HALF, window=4, kernel=3),
    "merges later": ckv.Composed(ckv.SnapKV(HALF, window=4), GRAVITY),
    "draws": ckv.Composed(ckv.CaM(HALF, sinks=2), GRAVITY),
    "draws later": ckv.Composed(GRAVITY, ckv.CaM(HALF, sinks=2)),
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Where layers are compressed at once; all else stays as it is."""
    monkeypatch.setattr(prefill_compression, "traits", lambda: TRAITS["gpu"])


def prefill(method, model=None, lengths=(48, 33)):
    """A cache, the logits, and how often each program was called."""
    model, called = model or taught(layers=LAYERS), Counter()

    def run(program, *args):
        called[program.__name__] += 1
        return program(*args)

    texts = [prompt(i, 48) for i in range(len(lengths))]
    cache = ckv.prefill(
        model.params, model.config, method, np.asarray(texts), np.asarray(lengths), max_new_tokens=24, call=run
    )
    return cache, called


@pytest.mark.parametrize("lengths", [(48,), (48, 33)], ids=["one", "unequal"])
@pytest.mark.parametrize("name", TOGETHER)
def test_layers_at_once_are_what_each_is_alone(name, lengths, monkeypatch):
    got, called = prefill(TOGETHER[name], lengths=lengths)
    assert called["_compress_layers"] == 1
    assert called["_compress_layer"] == 0
    monkeypatch.setattr(prefill_compression, "traits", lambda: TRAITS["cpu"])
    want, called = prefill(TOGETHER[name], lengths=lengths)
    assert called["_compress_layer"] == LAYERS
    same(got, want)


@pytest.mark.parametrize("name", ["centroids", "scores"])
def test_so_are_layers_whose_heads_have_budgets_of_their_own(name, monkeypatch):
    method = replace(TOGETHER[name], budget=UNEQUAL)
    got, called = prefill(method)
    assert (called["_compress_heads_of_layers"], called["_page_heads"], called["_compress_heads"]) == (1, LAYERS, 0)
    monkeypatch.setattr(prefill_compression, "traits", lambda: TRAITS["cpu"])
    want, called = prefill(method)
    assert called["_compress_heads"] == LAYERS
    same(got, want)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((1.2, 0.8, 1.1, 0.9), {"_compress_layer": 4}),
        ((1.1, 1.1, 0.9, 0.9), {"_empty": 1, "_compress_layers": 2}),
        ((1.2, 0.8, 0.8, 1.2), {"_empty": 1, "_compress_layers": 1, "_compress_layer": 2}),
    ],
)
def test_layers_of_other_budgets_are_no_group(shares, expected, monkeypatch):
    method = replace(GRAVITY, budget=ckv.Budget(ratio=0.5, shares=tuple((share, share) for share in shares)))
    monkeypatch.setattr(prefill_compression, "MOST_LAYERS", 2)
    got, called = prefill(method)
    names = "_empty", "_taken", "_compress_layers", "_compress_layer"
    assert {name: called[name] for name in names if called[name]} == expected
    monkeypatch.setattr(prefill_compression, "traits", lambda: TRAITS["cpu"])
    same(got, prefill(method)[0])


def test_layers_that_fill_no_workspace_are_taken_out_of_it(monkeypatch):
    shares = (1.1, 1.1, 0.7, 1.1)
    method = replace(GRAVITY, budget=ckv.Budget(ratio=0.5, shares=tuple((share, share) for share in shares)))
    got, called = prefill(method)
    assert (called["_empty"], called["_taken"], called["_compress_layer"]) == (1, 2, LAYERS)
    monkeypatch.setattr(prefill_compression, "traits", lambda: TRAITS["cpu"])
    same(got, prefill(method)[0])


def test_a_workspace_that_was_not_filled_begins_anew(monkeypatch):
    """Two layers leave it one by one, then three fill it."""
    monkeypatch.setattr(prefill_compression, "MOST_LAYERS", 3)
    shares = tuple((share, share) for share in (1.1, 1.1, 0.9, 0.9, 0.9, 1.1))
    method, model = replace(GRAVITY, budget=ckv.Budget(ratio=0.5, shares=shares)), taught(layers=6)
    got, called = prefill(method, model)
    names = "_empty", "_taken", "_compress_layers", "_compress_layer"
    assert [called[name] for name in names] == [1, 2, 1, 3]
    monkeypatch.setattr(prefill_compression, "traits", lambda: TRAITS["cpu"])
    same(got, prefill(method, model)[0])


def test_a_workspace_is_used_again(monkeypatch):
    """By all groups of layers, each of which leaves its rows in it."""
    monkeypatch.setattr(prefill_compression, "MOST_LAYERS", 2)
    got, called = prefill(GRAVITY)
    assert (called["_empty"], called["_compress_layers"]) == (1, LAYERS // 2)
    monkeypatch.setattr(prefill_compression, "traits", lambda: TRAITS["cpu"])
    same(got, prefill(GRAVITY)[0])


@pytest.mark.parametrize(("name", "shares"), [("codes", None), ("scores", UNEQUAL.shares)])
def test_squares_come_with_the_rows(name, shares, monkeypatch):
    """They are not summed again. Three sequences are in no other test here, so that programs are traced."""

    def summed(rows):
        raise AssertionError("Squares are known.")

    monkeypatch.setattr(soft_matching, "row_squares", summed)
    prefill(replace(TOGETHER[name], budget=replace(HALF, shares=shares)), lengths=(48, 33, 40))
    monkeypatch.setattr(prefill_compression, "traits", lambda: TRAITS["cpu"])
    with pytest.raises(AssertionError, match="Squares are known"):
        prefill(replace(TOGETHER[name], budget=replace(HALF, shares=shares)), lengths=(48, 33, 40))


@pytest.mark.parametrize("name", ALONE)
def test_other_methods_take_one_layer_after_the_other(name):
    """Most of them are done in a few launches, and some draw numbers for each layer."""
    _, called = prefill(ALONE[name])
    assert (called["_compress_layers"], called["_compress_layer"]) == (0, LAYERS)


def test_layers_between_windows_go_one_by_one():
    """No rows wait while other layers are read."""
    _, called = prefill(GRAVITY, sliding(layers=LAYERS))
    assert (called["_compress_layers"], called["_compress_layer"]) == (0, LAYERS)


@pytest.mark.parametrize(
    ("tokens", "layers", "expected"),
    [
        (1024, 32, 16),
        (16384, 32, 16),
        (32768, 32, 8),
        (65536, 32, 4),
        (131072, 32, 2),
        (1048576, 32, 1),
        (32768, 36, 6),
        (32768, 30, 6),
        (32768, 61, 1),
    ],
)
def test_as_many_layers_as_share_out_and_have_few_bytes(tokens, layers, expected):
    """Llama-3.1-8B's KV heads in bfloat16, with the scores of their rows."""

    def shape(*of):
        return jax.ShapeDtypeStruct((1, 8, tokens, *of), "bfloat16" if of else "float32")

    read = LayerPrompt(None, shape(128), shape(128), jax.ShapeDtypeStruct((1,), "int32"), scores=shape())
    request = request_of_tensors(read.keys, read.values, np.asarray([tokens]), layers, 128)
    assert prefill_compression.layers_at_once(plan_layer(ckv.OrbitKV(HALF), 0, request), read, layers) == expected
