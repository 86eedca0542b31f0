"""KVzip's reconstruction and its surrogates against the public implementations, in batches and in blocks of queries."""

import functools
from collections import OrderedDict
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax import learned
from clusterkv_jax.blocks import surrogate as surrogate_block
from clusterkv_jax.blocks.surrogate import affine, in_one_launch, in_parts, keys_and_scores
from clusterkv_jax.learned import repeated_attention
from clusterkv_jax.runtime import programs
from clusterkv_jax.runtime.dispatch import Traits
from tests.support.golden_files import golden
from tests.support.gpu_blocks import take_gpu
from tests.support.learned_model import CASES, SINKS, arrays, close, lowest, model
from tests.support.tiny import prompt, tiny


@CASES
@pytest.mark.parametrize("tag", ["kvzip", "plus"])
def test_reconstruction_is_kvzips(case, tag):
    outputs, meta = golden(f"kvzip_case{case}")
    prompts = [outputs[f"prompt_ids_{j}"] for j in range(meta["n_chunks"])]
    settings = {"chunk": meta["chunk"], "prompts": prompts, "prefix": meta["prefix"], "normalize": tag == "plus"}
    score = functools.partial(
        learned.reconstruction, model(case).params, model(case).config, model(case).tokens, **settings
    )
    result = np.concatenate(score())
    close(result, outputs[f"score_protected_{tag}"])
    close(result[:, :, SINKS:], outputs[f"score_{tag}"][:, :, SINKS:])
    for removed, suffix in ((0.5, "5"), (0.8, "8")):
        np.testing.assert_array_equal(
            lowest(result, int(result.size * removed)), outputs[f"evicted_{tag}_global_{suffix}"]
        )
        by_layer = [lowest(layer, int(layer.size * removed)) for layer in result]
        np.testing.assert_array_equal(by_layer, outputs[f"evicted_{tag}_layer_{suffix}"])
    with pytest.raises(AssertionError):  # a softmax without sinks
        close(np.concatenate(score(sinks=0))[:, :, SINKS:], outputs[f"score_{tag}"][:, :, SINKS:])


@pytest.mark.parametrize("normalize", [False, True])
def test_reconstruction_of_a_batch_is_that_of_each_sequence(normalize):
    small, chunk = tiny(), 16
    lengths, ids = (40, 30, 12), [prompt(seed, 40) for seed in range(3)]
    prompts = [[3, 5], jnp.asarray([prompt(9 + i, 4) for i in range(3)]), [7, 1, 2]]
    score = functools.partial(learned.reconstruction, small.params, small.config, chunk=chunk, normalize=normalize)
    both = score(jnp.asarray(ids), prompts=prompts, lengths=jnp.asarray(lengths))
    for i, n in enumerate(lengths):
        mine = [np.broadcast_to(p, (3, np.shape(p)[-1]))[i] for p in prompts[: -(-n // chunk)]]
        alone = score(jnp.asarray([ids[i][:n]]), prompts=mine)
        for layer, whole in zip(alone, both, strict=True):
            assert layer.dtype == jnp.float32
            close(whole[i, :, :n], layer[0])
            assert (np.asarray(whole[i, :, n:]) == -np.inf).all()


def test_reconstruction_does_not_depend_on_blocks_of_queries():
    small = tiny()
    score = functools.partial(learned.reconstruction, small.params, small.config, prompts=[[3, 5]], normalize=True)
    tokens = jnp.asarray([prompt(1, 53)])
    whole = score(tokens)
    with (
        mock.patch.object(repeated_attention, "traits", return_value=Traits(serial=True, scratch=16 * 4 * 108)),
        mock.patch.object(programs, "_kept", OrderedDict()),
    ):
        blocks = score(tokens)
    close(np.stack(blocks), np.stack(whole), 5e-5)


def test_reconstruction_under_jit():
    small = tiny()
    ids = jnp.asarray([prompt(1, 20)])
    score = functools.partial(learned.reconstruction, config=small.config, chunk=16, prompts=[[3], [4]])
    jitted = jax.jit(lambda params, tokens: score(params, tokens=tokens))(small.params, ids)
    close(np.stack(jitted), np.stack(score(small.params, tokens=ids)), 1e-5)


@CASES
def test_surrogates_are_kvzaps(case):
    outputs, _ = golden(f"kvzap_case{case}")
    for i, layer in enumerate(model(case).layers):
        linear = learned.surrogate(*arrays(outputs[f"weight_{i}"].T, outputs[f"bias_{i}"]), layer.hidden)
        close(linear[0], outputs["score_linear"][i])
        weights = arrays(*(outputs[f"mlp_{name}_{i}"].T for name in ("w1", "b1", "w2", "b2")))
        close(learned.surrogate_mlp(*weights, layer.hidden)[0], outputs["score_mlp"][i])
        # Scores know their token alone in the first layer: equal tokens tie exactly.
        tokens = np.asarray(model(case).tokens[0])
        if i == 0:
            for token in np.unique(tokens):
                assert np.ptp(np.asarray(linear)[0, :, tokens == token], axis=0).max() == 0


def test_a_product_in_parts_is_one_in_float32():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 9, 64)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(64, 5)) * 10.0 ** rng.integers(-6, 3, (64, 5)), jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    got = jax.jit(in_parts)(x, weights)
    assert got.dtype == jnp.float32
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)
    rounded = np.asarray(x, np.float64) @ np.asarray(weights.astype(jnp.bfloat16), np.float64)
    assert np.linalg.norm(rounded - want) > 1e-3 * np.linalg.norm(want)


def test_one_product_makes_keys_and_scores():
    rng = np.random.default_rng(3)
    x, keys = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2, 9, 64), (5, 16, 64)))
    surrogate = {"weights": rng.normal(size=(64, 5)) * 10.0 ** rng.integers(-6, 3, (64, 5)), "bias": rng.normal(size=5)}
    surrogate = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), surrogate)
    projected, scores = jax.jit(keys_and_scores)(keys, surrogate, x)
    assert (projected.dtype, scores.dtype) == (jnp.bfloat16, jnp.float32)
    wide = np.asarray(x, np.float64)
    want = np.einsum("btm,kdm->btkd", wide, np.asarray(keys, np.float64))
    assert np.linalg.norm(np.asarray(projected, np.float64) - want) < 2**-8 * np.linalg.norm(want)
    want = wide @ np.asarray(surrogate["weights"], np.float64) + np.asarray(surrogate["bias"])
    assert np.linalg.norm(scores - want) < 1e-6 * np.linalg.norm(want)
    with pytest.raises(ValueError, match=r"weights must be \[64, outputs\] with as many outputs as bias"):
        keys_and_scores(keys, {"weights": jnp.ones((64, 5)), "bias": jnp.ones(1)}, x)


def test_few_tokens_in_one_launch_are_multiplied_in_float32():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 3, 64)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(64, 5)) * 10.0 ** rng.integers(-6, 3, (64, 5)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=5) * 100, jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64) + np.asarray(bias, np.float64)
    for product in (in_one_launch, jax.jit(in_one_launch)):
        got = product(x, weights, bias)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
        # The bias is there once, whatever the tokens are.
        np.testing.assert_array_equal(product(0 * x, weights, bias), np.broadcast_to(bias, (2, 3, 5)))
    gradients = [jax.grad(lambda w, f=f: jnp.sum(f(x, w, bias) ** 2))(weights) for f in (in_one_launch, affine)]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-4 * np.abs(gradients[0]).max())


def test_one_launch_takes_few_tokens_and_outputs(monkeypatch):
    """A network's inner layer has many outputs, whose weights each token would read for itself."""
    take_gpu(monkeypatch, whole=False)
    for tokens, outputs, taken in ((16, 32, True), (17, 32, False), (1, 33, False), (1, 1, True)):
        with mock.patch.object(surrogate_block, "in_one_launch", wraps=in_one_launch) as one:
            affine(jnp.zeros((1, tokens, 8)), jnp.zeros((8, outputs)), jnp.zeros(outputs))
        assert one.called == taken
