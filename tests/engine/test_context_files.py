"""Contexts in files: asked by other engines, older than a field of the cache, or another file than was read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import dequantised_rows, quantised
from clusterkv_jax.decoding import decode_step, extend_step
from clusterkv_jax.methods.plan import plans_of_width
from tests.engine.test_engine import EIGHT, METHOD, alone, engine
from tests.support.tiny import prompt, tiny


def test_a_saved_context_is_asked_by_another_engine(tmp_path):
    first, file = engine(), tmp_path / "context.safetensors"
    first.save(first.read(prompt(3, 50)), file)
    served = engine()
    handle = served.add(file, prompt(904, 4), **EIGHT)
    assert tuple(handle.result().tokens[0]) == alone(3, 50, 4)
    assert handle.result().stats.prompt_tokens == [50]
    context = served.read(file)
    served.drop(context)
    assert tuple(served.add(context, prompt(904, 4), **EIGHT).result().tokens[0]) == alone(3, 50, 4)
    with pytest.raises(ValueError, match="holds no logits"):
        served.add(file, **EIGHT)
    with pytest.raises(ValueError, match="no cache file"):
        served.add(tmp_path / "nothing", **EIGHT)
    with pytest.raises(ValueError, match="does not fit the engine's slots"):
        engine(max_tokens=64, reserve=16).add(file, prompt(904, 4), **EIGHT)


def test_a_file_of_codes_from_before_means_were_taken_off_is_asked(tmp_path):
    file, method = tmp_path / "context.safetensors", ckv.Full(cache_dtype="int8")
    tokens, lengths = jnp.asarray([prompt(3, 50)]), jnp.asarray([50])
    cache, _ = ckv.prefill(tiny().params, tiny().config, method, tokens, lengths, reserve=64)
    layers = tuple(quantised(dequantised_rows(layer), "int8", less_mean=False) for layer in cache.layers)
    ckv.save_cache(file, dataclasses.replace(cache, layers=layers), tiny().config, method)
    expected = ckv.generate(tiny(), [prompt(3, 50)], questions=[prompt(904, 4)], method=method, **EIGHT)
    assert engine(method=method).add(file, prompt(904, 4), **EIGHT).result().tokens == expected.tokens


def test_a_file_of_heads_in_groups_is_asked(tmp_path):
    """Heads of unequal budgets stood in arrays of their own before they had pages."""
    shares, tokens = ((1.5, 0.5), (0.5, 1.5)), jnp.asarray([prompt(3, 50)])
    method = dataclasses.replace(METHOD, budget=ckv.Budget(ratio=0.5, shares=shares))
    request, (params, config) = {"reserve": 64, "step_tokens": 16}, (tiny().params, tiny().config)
    _, plan = plans_of_width(config, method, jnp.float32, 50, max_new_tokens=64, whole=0, **request)
    plans = [dataclasses.replace(plan(i), by_head=None, pool=None) for i in range(config.num_layers)]
    cache, _ = ckv.prefill(params, config, method, tokens, jnp.asarray([50]), plans=plans, **request)
    assert all(isinstance(layer, ckv.HeadGroups) for layer in cache.layers)
    ckv.save_cache(tmp_path / "older", cache, config, method)
    expected = ckv.generate(tiny(), [prompt(3, 50)], questions=[prompt(904, 4)], method=method, max_new_tokens=12)
    served = engine(method=method)
    assert served.add(tmp_path / "older", prompt(904, 4), max_new_tokens=12).result().tokens == expected.tokens
    never_due = tuple(tuple({"budget": memory["budget"]} for memory in state) for state in cache.state)
    ckv.save_cache(tmp_path / "never due", dataclasses.replace(cache, state=never_due), config, method)
    with pytest.raises(ValueError, match="a reserve for which nothing is compressed later"):
        served.add(tmp_path / "never due", prompt(904, 4), **EIGHT)

    def answer(cache):
        cache, logits = extend_step(params, config, method, cache, jnp.asarray([prompt(904, 4)]), jnp.asarray([4]))
        return decode_step(params, config, method, cache, jnp.argmax(logits, -1).astype(jnp.int32))[1]

    in_pages, _ = ckv.prefill(params, config, method, tokens, jnp.asarray([50]), **request)
    loaded = ckv.load_cache(tmp_path / "older", config, method)
    np.testing.assert_allclose(jax.jit(answer)(loaded), jax.jit(answer)(in_pages), rtol=1e-4, atol=1e-4)


def test_a_file_that_has_become_another_is_refused(tmp_path):
    first, file, other = engine(), tmp_path / "context.safetensors", tmp_path / "other.safetensors"
    first.save(first.read(prompt(3, 50)), file)
    first.save(first.read(prompt(4, 60)), other)
    served = engine(context_bytes=0, context_host_bytes=0)
    context = served.read(file)
    assert tuple(served.add(context, prompt(904, 4), **EIGHT).result().tokens[0]) == alone(3, 50, 4)
    other.replace(file)
    with pytest.raises(ValueError, match=r"The saved cache .* is another one than this engine has read\."):
        served.add(context, prompt(904, 4), **EIGHT).result()
    assert tuple(served.add(file, prompt(904, 4), **EIGHT).result().tokens[0]) == alone(4, 60, 4)
