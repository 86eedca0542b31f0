"""Flax nnx models with a compressed cache: the same tokens as the model's own, and as ours of the same weights."""

import importlib
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.calibration import PARTS, Calibration, read, write
from clusterkv_jax.checkpoints.loading import calibrated
from tests.support.methods import named
from tests.support.tiny import prompt, tiny, with_surrogate

nnx = pytest.importorskip("flax.nnx", reason="models of flax: pip install 'clusterkv-jax[flax]'")

from tests.support.toy import as_llama, documented, enlarge  # noqa: E402  (needs flax)

HALF = ckv.Budget(ratio=0.5)
CENTROID = ckv.CentroidKV(HALF, sinks=2, recent=4, chunk=16, interval=4)
PROMPTS, QUESTIONS = [prompt(1, 48), prompt(2, 33)], [prompt(3, 5), prompt(4, 3)]
TOY = documented()
# tests/mesh and tests/parity have all of them.
METHODS = [
    CENTROID,
    ckv.ExpectedAttention(HALF, sinks=2, future=8, decode_interval=4),
]


@pytest.fixture(scope="module")
def toy() -> Any:
    return enlarge(TOY["Toy"](nnx.Rngs(0)))


def continued(model, text, count) -> list[int]:
    """Greedy tokens of the model's own forward pass, without any cache; one program for all lengths."""
    ids, width = list(text), len(text) + count
    forward = nnx.jit(lambda model, tokens, positions: model(tokens, positions))
    for _ in range(count):
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(forward(model, jnp.asarray(padded), jnp.arange(width)[None])[0, len(ids) - 1].argmax()))
    return ids[len(text) :]


def learned(model, file):
    """Our model with a random surrogate and unequal heads, and the file of its calibration."""
    layers = [layer["surrogate"] for layer in with_surrogate(model).params["layers"]]
    surrogate = tuple({name: np.asarray(x) for name, x in layer.items()} for layer in layers)
    heads = ((0.5, 0.5),) * len(layers)
    rising = np.linspace(-3, 0, len(PARTS))
    scores = ((tuple(rising.tolist()), tuple((rising + 0.5).tolist())),) * len(layers)
    write(file, Calibration("toy", heads, (), heads, {}, scores, heads, surrogate))
    return calibrated(model, read(file))


@pytest.mark.parametrize("method", [ckv.OrbitKV(HALF, interval=4), ckv.KVzap(HALF, sinks=2, recent=4)], ids=named)
def test_a_calibration_brings_learned_scores_and_shares(toy, method, tmp_path):
    file = tmp_path / "toy.safetensors"
    ours = ckv.generate(learned(as_llama(toy), file), PROMPTS, method=method, max_new_tokens=12)
    small = ckv.nnx.compressed(toy, method, max_positions=256, calibration=file)
    result = small.generate(PROMPTS, max_new_tokens=12)
    assert result.tokens == ours.tokens
    assert result.stats.kept_rows == ours.stats.kept_rows
    assert len({rows for layer in result.stats.kept_rows for heads in layer for rows in heads}) > 1
    # The arrays go through a program of one's own, with the model's.
    tokens, lengths = jnp.asarray([PROMPTS[0]]), jnp.asarray([len(PROMPTS[0])])
    inside = nnx.jit(lambda small, tokens, lengths: small.prefill(tokens, lengths, max_new_tokens=12)[1])
    np.testing.assert_allclose(inside(small, tokens, lengths), small.prefill(tokens, lengths)[1], atol=1e-4)


def test_a_calibration_that_is_missing_or_of_another_model_is_one_sentence(toy, tmp_path):
    method, file = ckv.KVzap(HALF, sinks=2, recent=4), tmp_path / "toy.safetensors"
    with pytest.raises(ValueError, match=r"give load, or nnx\.compressed, the calibration"):
        ckv.nnx.compressed(toy, method, max_positions=256).generate(PROMPTS, max_new_tokens=4)
    with pytest.raises(FileNotFoundError, match="There is no calibration at"):
        ckv.nnx.compressed(toy, method, calibration=file)
    learned(tiny(layers=3), file)
    with pytest.raises(ValueError, match="3 layers of 2 KV heads; this model has 2"):
        ckv.nnx.compressed(toy, method, calibration=file)


def test_methods_have_names(toy, tmp_path):
    assert ckv.nnx.compressed(toy, "knorm", ratio=0.5).method == ckv.Knorm(HALF)
    learned(as_llama(toy), tmp_path / "toy.safetensors")
    auto = ckv.nnx.compressed(toy, "auto", ratio=0.5, calibration=tmp_path / "toy.safetensors").method
    assert (type(auto), auto.budget.ratio, auto.recent, auto.recent_share) == (ckv.KVzap, 0.5, 8, 1 / 16)
    assert auto.budget.shares is not None
    with pytest.raises(ValueError, match="did you mean 'snapkv'"):
        ckv.nnx.compressed(toy, "snapkw", ratio=0.5)


def test_full_gives_the_tokens_of_the_model_itself(toy):
    result = ckv.nnx.compressed(toy, ckv.Full()).generate(PROMPTS, max_new_tokens=32)
    assert result.tokens == [continued(toy, text, 32) for text in PROMPTS]
    assert len(set(result.tokens[0])) > 4


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_a_method_gives_the_tokens_of_our_own_model(toy, method):
    asked = {"questions": QUESTIONS, "max_new_tokens": 12}
    ours = ckv.generate(as_llama(toy), PROMPTS, method=method, **asked)
    result = ckv.nnx.compressed(toy, method, max_positions=256).generate(PROMPTS, **asked)
    assert result.tokens == ours.tokens
    assert result.stats.kept_rows == ours.stats.kept_rows
    assert result.stats.cache_bytes == ours.stats.cache_bytes


def test_a_window_and_a_cap_are_those_of_our_own_model(toy):
    model = nnx.clone(toy)
    model.layers[0].attn.window = 12
    for layer in model.layers:
        layer.attn.soft_cap = 0.5
    small, own = ckv.nnx.compressed(model, CENTROID), as_llama(toy)
    same = {"window": 12, "sliding_layers": (0,), "soft_cap": 0.5}
    own = replace(own, config=replace(own.config, **same))
    asked = {"questions": QUESTIONS[:1], "max_new_tokens": 6}
    result, expected = small.generate(PROMPTS[:1], **asked), ckv.generate(own, PROMPTS[:1], method=CENTROID, **asked)
    assert result.tokens == expected.tokens
    assert result.stats.window_rows == expected.stats.window_rows == [[[12, 12]]]
    model.layers[1].attn.window = 13
    with pytest.raises(ValueError, match=r"all layers need the same window, got \[12, 13\]"):
        ckv.nnx.compressed(model, CENTROID)


def test_steps_under_nnx_jit_are_those_of_generate(toy):
    small = ckv.nnx.compressed(toy, CENTROID)
    expected = small.generate([PROMPTS[0]], questions=[QUESTIONS[0]], max_new_tokens=10).tokens[0]
    small = nnx.merge(*nnx.split(small))

    @nnx.jit
    def read(small, tokens, lengths, question):
        cache, _ = small.prefill(tokens, lengths, reserve=15, step_tokens=5)
        return small.extend(cache, question, jnp.full(1, 5))

    @nnx.jit
    def step(small, cache, token):
        return small.decode_step(cache, token)

    cache, logits = read(small, jnp.asarray([PROMPTS[0]]), jnp.asarray([48]), jnp.asarray([QUESTIONS[0]]))
    tokens = [int(logits[0].argmax())]
    for _ in range(9):
        cache, logits = step(small, cache, jnp.asarray(tokens[-1:]))
        tokens.append(int(logits[0].argmax()))
    assert tokens == expected
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(cache))


def test_a_saved_cache_goes_on(toy, tmp_path):
    small = ckv.nnx.compressed(toy, CENTROID)
    cache, logits = small.prefill(np.asarray([PROMPTS[0]]), np.asarray([48]), max_new_tokens=2)
    token = logits.argmax(axis=-1)
    ckv.save_cache(tmp_path / "cache.safetensors", cache, small.config, CENTROID)
    loaded = ckv.load_cache(tmp_path / "cache.safetensors", small.config, CENTROID)
    np.testing.assert_array_equal(small.decode_step(loaded, token)[1], small.decode_step(cache, token)[1])


def test_it_holds_the_model_and_leaves_it_as_it_is(toy):
    model = nnx.clone(toy)
    graph, before = nnx.split(model)
    small = ckv.nnx.compressed(model, ckv.Full())
    first = small.generate([PROMPTS[0]], max_new_tokens=8).tokens
    assert nnx.graphdef(model) == graph
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (before, nnx.state(model))), strict=True))
    model.head.kernel[...] = -model.head.kernel[...]
    assert small.generate([PROMPTS[0]], max_new_tokens=8).tokens != first


def assert_read_alike(small, model):
    """A prompt's last logits are those of the model itself."""
    tokens = jnp.asarray([PROMPTS[0]])
    _, logits = small.prefill(tokens, np.asarray([48]), max_new_tokens=1)
    np.testing.assert_allclose(logits[0], model(tokens, jnp.arange(48)[None])[0, -1], rtol=1e-4, atol=1e-4)


def test_a_layout_says_where_attention_is(toy):
    class Block(nnx.Module):
        def __init__(self, layer):
            self.inner = layer

        def __call__(self, x, where, extra):
            return {}, self.inner(x, where) if extra is None else x

        @property
        def mixer(self):
            return self.inner.attn

        @mixer.setter
        def mixer(self, value):
            self.inner.attn = value

    class Wrapped(nnx.Module):
        def __init__(self, model):
            self.body = model
            self.body.layers = nnx.List([Block(layer) for layer in model.layers])

        def __call__(self, tokens, positions):
            hidden = self.body.embed(tokens)
            for block in self.body.layers:
                hidden = block(hidden, positions, None)[1]
            return self.body.head(self.body.norm(hidden)), "more"

    layout = ckv.nnx.Layout(
        layer=lambda layer, hidden, positions: layer(hidden, positions, None),
        call=lambda model, tokens, positions: model(tokens, positions)[0],
        layers="body.layers",
        attention="mixer",
        rope=TOY["Attention"].rope,
    )
    assert_read_alike(ckv.nnx.compressed(Wrapped(nnx.clone(toy)), ckv.Full(), attention=layout), toy)


def _generate_pos_embeddings(positions, head_dim, rope_theta=10_000):
    timescale = jnp.float32(rope_theta) ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, :, None].astype(jnp.float32) / timescale[None, None]
    return jnp.sin(angles), jnp.cos(angles)


def apply_rope(x, sin, cos):
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = sin[:, :, None], cos[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class BonsaiAttention(nnx.Module):
    """What bonsai's Qwen3 calls things, and how: positions are made of segments, inside."""

    def __init__(self, attention):
        self.q_proj, self.k_proj, self.v_proj = attention.q, attention.k, attention.v
        self.o_proj, self.head_dim = attention.o, 8

    def __call__(self, x, cache, segment_ids):
        raise NotImplementedError("Its cache is not called for.")


class BonsaiLayer(nnx.Module):
    def __init__(self, layer):
        self.inner, self.attn = layer, BonsaiAttention(layer.attn)

    def __call__(self, x, cache, segment_ids):
        x = x + self.attn(self.inner.norm_1(x), cache, segment_ids)
        y = self.inner.norm_2(x)
        return x + self.inner.down(nnx.silu(self.inner.gate(y)) * self.inner.up(y))


class Bonsai(nnx.Module):
    def __init__(self, model):
        self.rest, self.layers = model, nnx.List([BonsaiLayer(layer) for layer in model.layers])

    def __call__(self, tokens, *, cache, segment_ids):
        x = self.rest.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, cache[i], segment_ids)
        return self.rest.head(self.rest.norm(x))


def test_bonsai_is_found_by_its_names(toy):
    small = ckv.nnx.compressed(Bonsai(nnx.clone(toy)), ckv.Full())
    assert small.config.rope == TOY["Attention"].rope
    assert_read_alike(small, toy)


class Unknown(nnx.Module):
    def __init__(self):
        self.q_proj = self.k_proj = nnx.data(jnp.zeros(1))


def test_what_does_not_fit_is_named_in_a_sentence(toy):
    model = nnx.clone(toy)
    for layer in model.layers:
        layer.attn = Unknown()
    with pytest.raises(ValueError, match=r"Unknown is attention of an unknown kind, without qkv, output, v_proj, o_"):
        ckv.nnx.compressed(model, ckv.Full())
    model.layers[0].attn = _LikeGemma4()
    with pytest.raises(ValueError, match=r"_LikeGemma4 is attention of an unknown kind, without qkv, output, q_proj, "):
        ckv.nnx.compressed(model, ckv.Full())
    model.layers[0].attn = toy.layers[0].attn
    with pytest.raises(ValueError, match=r"attention of one kind, got Attention in layer 0 and Unknown in layer 1\."):
        ckv.nnx.compressed(model, ckv.Full())
    del model.layers[1].attn
    with pytest.raises(ValueError, match=r"Layer has no attention under the name 'attn'\."):
        ckv.nnx.compressed(model, ckv.Full())
    del model.layers[0].attn
    with pytest.raises(ValueError, match="has no attention under the names attn, attention, self_attn"):
        ckv.nnx.compressed(model, ckv.Full())
    unlike = nnx.clone(toy)
    attention = unlike.layers[1].attn
    attention.k = attention.v = nnx.LinearGeneral(32, (1, 8), use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"as many heads .* \(1, 2, 2, 8\) in layer 0, .* \(1, 2, 1, 8\) in layer 1"):
        ckv.nnx.compressed(unlike, ckv.Full())
    with pytest.raises(ValueError, match="Embed has no list of layers under the name 'layers'"):
        ckv.nnx.compressed(model.embed, ckv.Full())
    flat = ckv.nnx.Layout(project=lambda attention, hidden, positions: (hidden, hidden, hidden))
    with pytest.raises(ValueError, match=r"Attention: queries must have the shape \[1,2,heads,D\]"):
        ckv.nnx.compressed(toy, ckv.Full(), attention=flat)
    with pytest.raises(ValueError, match="no attention under the name 'mixer'"):
        ckv.nnx.compressed(toy, ckv.Full(), attention=ckv.nnx.Layout(attention="mixer"))
    small = ckv.nnx.compressed(toy, ckv.Full(), max_positions=64)
    with pytest.raises(ValueError, match="exceed the model's 64 positions"):
        small.generate([prompt(1, 60)], max_new_tokens=8)
    cache, _ = small.prefill(np.asarray([PROMPTS[0]]), np.asarray([48]), max_new_tokens=2)
    for step in (lambda ids: small.decode_step(cache, ids[0]), lambda ids: small.extend(cache, ids, np.asarray([1]))):
        with pytest.raises(ValueError, match="allowed are 0 to 60"):
            step(np.asarray([[61]]))


class _LikeGemma4(nnx.Module):
    """What tunix's Gemma 4 has in common with its Gemma 3, as `apply_rope` above; it rotates parts of heads."""

    rope_base_frequency, rope_scale_factor, rope_proportion, head_dim = 1e6, 1.0, 0.25, 8

    def attn_vec_einsum(self, x: Any) -> Any:
        return x


@pytest.mark.wrong_arguments
def test_arguments_of_other_kinds_are_refused(toy):
    with pytest.raises(ValueError, match=r"model must be a flax\.nnx\.Module, got 'demo'"):
        ckv.nnx.compressed("demo", ckv.Full())
    with pytest.raises(ValueError, match="method must be an object"):
        ckv.nnx.compressed(toy, ckv.Full)
    with pytest.raises(ValueError, match=r"attention must be an nnx\.Layout or None"):
        ckv.nnx.compressed(toy, ckv.Full(), attention="attn")
    for wrong in ("</s>", 5, ["</s>"]):
        with pytest.raises(ValueError, match=r"eos_ids must be a list of token ids, got "):
            ckv.nnx.compressed(toy, ckv.Full(), eos_ids=wrong)


def test_without_flax_a_sentence_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("clusterkv_jax.nnx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax.nnx", None)
    with pytest.raises(ValueError, match=r"needs the package 'flax\.nnx': pip install 'clusterkv-jax\[flax\]'"):
        importlib.import_module("clusterkv_jax.nnx")
