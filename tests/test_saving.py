"""Caches on disk: what comes back, what is refused, and a context that serves many questions."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import clusterkv_jax as ckv
from clusterkv_jax import saving
from clusterkv_jax.cache.layers import HeadGroups, KVCache, LayerCache, groups
from tests.support.checkpoint_files import LLAMA, random_tensors, write
from tests.support.tiny import extend, prompt, tiny
from tests.support.tiny import prefill as tiny_prefill

METHOD = ckv.Chelsea(
    ckv.Budget(ratio=0.5, base="prompt"), sinks=2, recent=4, chunk=16, interval=4, outlier_heads=((1, 0),)
)


def prefill(method=METHOD, model=None):
    return tiny_prefill(method, prompt(1, 40), model=model, max_new_tokens=12)[0]


def answer(cache, question, method=METHOD):
    return extend(method, cache, [question])[1]


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
    with pytest.raises(ValueError, match="made by a model with weights = None, this one has 'abc'"):
        ckv.load_cache(path, dataclasses.replace(config, weights="abc"), METHOD)
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
    path.write_bytes(whole.replace(b"cache 3", b"cache 9"))
    with pytest.raises(ValueError, match="must be of format 'clusterkv_jax cache 3', got 'clusterkv_jax cache 9'"):
        ckv.load_cache(path, config, METHOD)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A saved cache."""
    path = tmp_path_factory.mktemp("caches") / "book"
    ckv.save_cache(path, prefill(), tiny().config, METHOD)
    return path


def changed(book, path, arrays=(), metadata=()):
    """The file as a program would write it that knows nothing of its rules; None takes a part away."""
    with safe_open(book, framework="np") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()} | dict(arrays)  # noqa: SIM118
        about = (file.metadata() or {}) | dict(metadata)

    def there(parts):
        return {name: part for name, part in parts.items() if part is not None}

    save_file(there(parts), path, there(about))
    return path


KEYS, DEGREE = "layers.0.0.keys", "layers.0.0.degree"


@pytest.mark.parametrize(
    ("arrays", "metadata", "sentence"),
    [
        ({}, {"format": None}, "must be of format 'clusterkv_jax cache 3', got None."),
        ({}, {"about": None}, "is damaged: its metadata do not have the checksum that they were saved with."),
        ({}, {"about": "{}"}, "is damaged: its metadata do not have the checksum that they were saved with."),
        ({}, {"checksum": None}, "is damaged: its metadata do not have the checksum that they were saved with."),
        ({}, {"about": "{", "checksum": saving._checksum("{")}, "is not valid JSON: Expecting property name"),
        ({}, {"about": "{}", "checksum": saving._checksum("{}")}, "Object missing required field config ({})."),
        ({"extra": np.zeros(3)}, {}, "is damaged: extra is not among its arrays, or not among its checksums."),
        ({KEYS: None}, {}, f"is damaged: {KEYS} is not among its arrays, or not among its checksums."),
        ({KEYS: np.zeros((1, 1, 32, 8), np.int32)}, {}, f"{KEYS} does not have the checksum"),
        ({DEGREE: np.full((1, 1, 32), np.nan, np.float32)}, {}, f"{DEGREE} does not have the checksum"),
    ],
)
def test_a_cache_that_was_changed_is_refused(book, tmp_path, arrays, metadata, sentence):
    path = changed(book, tmp_path / "changed", arrays, metadata)
    with pytest.raises(ValueError, match="^" + re.escape(str(path)) + ".*" + re.escape(sentence)):
        ckv.load_cache(path, tiny().config, METHOD)


@pytest.mark.parametrize("place", [0.2, 0.5, 0.9, -1])
def test_a_flipped_bit_is_noticed(book, tmp_path, place):
    raw = bytearray(book.read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    raw[header + int(place * (len(raw) - header)) if place > 0 else place] ^= 1
    (tmp_path / "flipped").write_bytes(raw)
    with pytest.raises(ValueError, match=r"is damaged: .* does not have the checksum that it was saved with"):
        ckv.load_cache(tmp_path / "flipped", tiny().config, METHOD)


def with_group(cache, **changes):
    """The cache with other arrays in its first group of heads."""
    first, *others = cache.layers
    group = dataclasses.replace(first.groups[0] if isinstance(first, HeadGroups) else first, **changes)
    first = HeadGroups((group, *first.groups[1:]), first.heads) if isinstance(first, HeadGroups) else group
    return dataclasses.replace(cache, layers=(first, *others))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c, g: with_group(c, keys=g.keys.astype(jnp.int32)), f"{KEYS} of the cache must be float32 [1, 2, "),
        (lambda c, g: with_group(c, keys=g.keys[:, :1]), f"{KEYS} of the cache must be float32 [1, 2, "),
        (lambda c, g: with_group(c, degree=g.degree * jnp.nan), f"{DEGREE} of the cache holds numbers that are not"),
        (lambda c, g: with_group(c, degree=-g.degree), f"{DEGREE} of the cache must be at least 0, got -"),
        (lambda c, g: with_group(c, values=g.values / 0), "values of the cache holds numbers that are not finite"),
        (lambda c, g: with_group(c, length=g.length.astype(jnp.float32)), "length of the cache must be int32 [1, 2]"),
        (lambda c, g: with_group(c, length=g.length[0]), "0.0.length of the cache must be int32 [B, K]"),
        (lambda c, g: dataclasses.replace(c, layers=c.layers[:1]), "The cache must have 2 layers, got 1."),
        (lambda c, g: None, "cache must be a cache made by prefill, got NoneType."),
    ],
)
@pytest.mark.wrong_arguments
def test_what_is_no_cache_is_not_written(tmp_path, change, sentence):
    cache = prefill()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ckv.save_cache(tmp_path / "book", change(cache, groups(cache.layers[0])[0]), tiny().config, METHOD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wrong_arguments
def test_what_is_no_path_model_or_method():
    with pytest.raises(ValueError, match=r"path must be the path of a file, got 5\."):
        ckv.load_cache(5, tiny().config, METHOD)
    with pytest.raises(ValueError, match=r"must be a ModelConfig and a method, got None and 'full'\."):
        ckv.load_cache("book", None, "full")


def test_a_cache_is_for_the_weights_that_made_it(tmp_path):
    """Two models of the same configuration and other weights, and the first one on a mesh."""
    tensors = random_tensors(LLAMA)
    first = write(tmp_path / "first", LLAMA, tensors)
    second = write(tmp_path / "second", LLAMA, {name: -tensor for name, tensor in tensors.items()})
    model, other = ckv.load(first), ckv.load(second)
    assert model.config == other.config
    shape = (1, model.config.num_kv_heads, 4, model.config.head_dim)
    rows = jnp.ones(shape)
    layer = LayerCache(rows, rows, jnp.ones(shape[:3]), jnp.full(shape[:2], 4), jnp.zeros(shape[:3], jnp.int32))
    cache = KVCache((layer,) * 2, ((None,),) * 2, jnp.asarray([4]))
    ckv.save_cache(tmp_path / "book", cache, model.config, ckv.Full())
    for same in (model, ckv.load(first, mesh=jax.make_mesh((8,), ("model",)))):
        copy = ckv.load_cache(tmp_path / "book", same.config, ckv.Full())
        assert jax.tree.structure(copy) == jax.tree.structure(cache)
    with pytest.raises(ValueError, match=rf"by a model with weights = '{model.config.weights}', this one has '"):
        ckv.load_cache(tmp_path / "book", other.config, ckv.Full())
