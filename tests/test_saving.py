"""Caches on disk: what comes back, what is refused, and a context that serves many questions."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import saving
from clusterkv_jax.decoding import extend_step
from tests.support.tiny import prompt, tiny

METHOD = ckv.Chelsea(
    ckv.Budget(ratio=0.5, base="prompt"), sinks=2, recent=4, chunk=16, interval=4, outlier_heads=((1, 0),)
)


def prefill(method=METHOD, model=None):
    model = model or tiny()
    return ckv.prefill(
        model.params, model.config, method, jnp.asarray([prompt(1, 40)]), jnp.asarray([40]), max_new_tokens=12
    )[0]


def answer(cache, question, method=METHOD):
    step = jax.jit(extend_step, static_argnums=(1, 2))
    return step(tiny().params, tiny().config, method, cache, jnp.asarray([question]), jnp.asarray([len(question)]))[1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cache_comes_back_as_it_was(tmp_path, dtype):
    model = tiny()
    model = dataclasses.replace(model, params=jax.tree.map(lambda x: x.astype(dtype), model.params))
    cache = prefill(model=model)
    ckv.save_cache(tmp_path / "book", cache, model.config, METHOD)
    assert [file.name for file in tmp_path.iterdir()] == ["book"]
    copy = ckv.load_cache(tmp_path / "book", model.config, METHOD)
    assert jax.tree.structure(copy) == jax.tree.structure(cache)
    for result, expected in zip(jax.tree.leaves(copy), jax.tree.leaves(cache), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


def test_one_context_answers_many_questions_from_disk_too(tmp_path):
    cache = prefill()
    ckv.save_cache(tmp_path / "book", cache, tiny().config, METHOD)
    first, second = prompt(2, 5), prompt(3, 5)
    expected = answer(cache, first)
    other = answer(cache, second)
    assert not np.allclose(other, expected)
    np.testing.assert_array_equal(answer(cache, first), expected)
    np.testing.assert_array_equal(answer(ckv.load_cache(tmp_path / "book", tiny().config, METHOD), first), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_a_cache_that_could_not_be_written_leaves_the_one_before_it(tmp_path, monkeypatch, error):
    def half(arrays, file, metadata):
        Path(file).write_bytes(b"half of")
        raise error

    cache, path = prefill(), tmp_path / "book"
    ckv.save_cache(path, cache, tiny().config, METHOD)
    whole = path.read_bytes()
    monkeypatch.setattr(saving, "save_file", half)
    for name in ("book", "new"):
        with pytest.raises(error):
            ckv.save_cache(tmp_path / name, cache, tiny().config, METHOD)
    assert [file.name for file in tmp_path.iterdir()] == ["book"]
    assert path.read_bytes() == whole


def test_another_model_method_or_file_is_refused(tmp_path):
    path = tmp_path / "book"
    config = tiny().config
    ckv.save_cache(path, prefill(), config, METHOD)
    with pytest.raises(ValueError, match=r"a model with norm_eps = 1e-05, this one has 0.1"):
        ckv.load_cache(path, dataclasses.replace(config, norm_eps=0.1), METHOD)
    with pytest.raises(ValueError, match=r"made by Chelsea\(.*, not by Full\(\)"):
        ckv.load_cache(path, config, ckv.Full())
    with pytest.raises(ValueError, match="There is no cache file"):
        ckv.load_cache(tmp_path / "none", config, METHOD)
    with pytest.raises(ValueError, match=r"The folder .* does not exist"):
        ckv.save_cache(tmp_path / "no" / "book", prefill(), config, METHOD)
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"not safetensors"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="is not a whole cache file"):
            ckv.load_cache(path, config, METHOD)
    path.write_bytes(whole.replace(b"cache 2", b"cache 9"))
    with pytest.raises(ValueError, match="must be of format 'clusterkv_jax cache 2', got 'clusterkv_jax cache 9'"):
        ckv.load_cache(path, config, METHOD)
