"""A layer's blocks: the same by the backends that a GPU has for few tokens, which take what they can and no more."""

import contextlib
import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.blocks import attention_in, mlp, moe, norm, qk_norm_rope, residual
from clusterkv_jax.blocks.linear import linear
from clusterkv_jax.models import decoder, registry
from clusterkv_jax.models.parameters import abstract, init
from clusterkv_jax.runtime.dispatch import LeftToXLA
from clusterkv_jax.runtime.sharding import named_mesh
from tests.support.checkpoint_files import FAMILIES
from tests.support.coded import in_int8
from tests.support.gpu_blocks import counted, take_gpu
from tests.support.tiny import tiny


@functools.cache
def one_layer(family: str):
    """The second, since a first layer may have no experts."""
    config = registry.from_hf(FAMILIES[family])
    params = init(jax.random.key(0), replace(config, num_layers=2), jnp.float32)
    return params["layers"][1], config.of_layer(1)


def through(layer, config, hidden, positions):
    """Queries, keys and values, and the rest of the layer as if the queries were what it attended to."""

    def run(layer, hidden, positions):
        q, k, v, _ = decoder.attention_in(layer, config, hidden, positions)
        return q, k, v, decoder.attention_out_and_mlp(layer, config, hidden, q)

    return jax.jit(run)(layer, hidden, positions)


def scored(layer, config, *case):
    """Queries, keys, values and scores."""
    return jax.jit(lambda layer, case: decoder.attention_in(layer, config, *case))(layer, case)


def assert_close(mine, own):
    for a, b in zip(mine, own, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_product_has_the_outputs_of_its_weights_in_their_order():
    x, weights = jax.random.normal(jax.random.key(0), (2, 3, 4, 5)), jax.random.normal(jax.random.key(1), (6, 4, 5, 7))
    bias = jnp.arange(42.0).reshape(6, 7)
    expected = np.einsum("bthd,ehdf->btef", x, weights) + np.asarray(bias)
    np.testing.assert_allclose(linear(x, weights, (1, 2), bias), expected, rtol=1e-4, atol=1e-5)
    product = linear(x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16), (1, 2), dtype=jnp.float32)
    assert product.dtype == jnp.float32


@pytest.mark.parametrize(("family", "experts"), [("qwen3", 0), ("qwen3_moe", 1)])
def test_tokens_of_models_that_fill_no_block_have_their_heads_and_experts_in_kernels(family, experts, monkeypatch):
    layer, config = one_layer(family)
    hidden = jax.random.normal(jax.random.key(1), (2, 3, config.hidden_size))
    positions = jnp.asarray([[5, 6, 7], [900, 901, 902]])
    expected = through(layer, config, hidden, positions)
    take_gpu(monkeypatch, whole=False)
    ops = (qk_norm_rope, "turned_heads"), (moe, "expert_products"), (residual, "row_products")
    heads, routed, products = (counted(monkeypatch, op) for op in ops)
    assert_close(through(layer, config, hidden, positions), expected)
    assert (len(heads), len(routed), len(products)) == (1, experts, 0)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_token_has_its_heads_and_scores_in_one_launch(family, monkeypatch):
    """After the norm that both read; heads with norms of their own are turned behind it."""
    layer, config = one_layer(family)
    hidden, positions = jax.random.normal(jax.random.key(1), (1, 1, config.hidden_size)), jnp.full((1, 1), 7)
    size = config.hidden_size, config.num_kv_heads
    linear = {"weights": jax.random.normal(jax.random.key(2), size), "bias": jnp.arange(float(config.num_kv_heads))}
    inner = {"inner_weights": jnp.eye(config.hidden_size), "inner_bias": jnp.zeros(config.hidden_size)}
    two = jnp.tile(hidden, (2, 1, 1)), jnp.tile(positions, (2, 1))
    cases = [(hidden, positions, linear), (hidden, positions, inner | linear), (*two, linear)]
    expected = [scored(layer, config, *case) for case in cases]
    take_gpu(monkeypatch, whole=True)
    calls = counted(monkeypatch, (attention_in, "head_products"))
    for case, own in zip(cases, expected, strict=True):
        assert_close(scored(layer, config, *case), own)
    assert [(args[4] is not None, args[5] is not None) for args in calls] == [
        (True, True),
        (True, False),
        (False, False),
    ]


def test_one_product_makes_keys_and_scores_of_long_prompts_in_bf16(monkeypatch):
    """Of a linear surrogate, on one GPU: elsewhere, and of few tokens, the product for scores alone stays."""
    narrow = replace(tiny(kv_heads=4).config, hidden_size=64)

    def taken(config=narrow, tokens=9000, dtype=jnp.bfloat16, **inner):
        of = partial(jax.tree.map, lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16))
        shape = config.hidden_size, config.num_kv_heads
        surrogate = {"weights": jax.ShapeDtypeStruct(shape, jnp.float32), **inner}
        surrogate["bias"] = jax.ShapeDtypeStruct(shape[1:], jnp.float32)
        hidden = jax.ShapeDtypeStruct((1, tokens, config.hidden_size), dtype)
        positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

        def run(layer, *args):
            return attention_in._on_gpu(layer, config, *args)

        calls.clear()
        with contextlib.suppress(LeftToXLA):
            jax.eval_shape(run, of(abstract(config)["layers"][0]), hidden, positions, surrogate)
        return bool(calls)

    calls = counted(monkeypatch, (attention_in, "keys_and_scores"))
    assert taken()
    assert not taken(tokens=8000)
    assert not taken(replace(narrow, hidden_size=32))
    assert not taken(replace(narrow, num_kv_heads=2))
    assert not taken(dtype=jnp.float32)
    inner = {"inner_weights": (64, 64), "inner_bias": (64,)}
    assert not taken(**{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in inner.items()})
    with jax.set_mesh(jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])):
        assert not taken()


# Each pair of a family, a mesh and a number of tokens is there; ARGS="-m exhaustive" runs the other triples.
LAYERS = [
    pytest.param(family, tokens, mesh, marks=[pytest.mark.exhaustive] * ((i + j + k) % 2))
    for i, family in enumerate(["mistral", "qwen2", "qwen3", "gemma2", "granite", "olmo2", "glm", "opt"])
    for j, mesh in enumerate([None, "model=2", "data=2,model=2"])
    for k, tokens in enumerate([1, 4])
]


@pytest.mark.parametrize(("family", "tokens", "mesh"), LAYERS)
def test_tokens_are_the_same_through_kernels(family, tokens, mesh, monkeypatch):
    """Norms before blocks, around them, behind them, of another kind; biases; heads that are turned on the way, behind
    it, in part, or not at all.
    """
    layer, config = one_layer(family)
    hidden = jax.random.normal(jax.random.key(1), (tokens, 1, config.hidden_size))
    positions = 7 + jnp.arange(tokens)[:, None]

    def token():
        size = 1 if mesh is None else 2 if mesh == "model=2" else 4
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(named_mesh(mesh, jax.devices()[:size])):
            return through(layer, config, hidden, positions)

    expected = token()
    take_gpu(monkeypatch, whole=True)
    norms = counted(monkeypatch, (norm, "normed_rows"))
    ops = (attention_in, "head_products"), (residual, "row_products"), (mlp, "row_products")
    heads, outputs, inner = (counted(monkeypatch, op) for op in ops)
    assert_close(token(), expected)
    with_norm = config.norm == "rms" and config.norm_place != "after"
    assert len(norms) == with_norm * (tokens == 1)  # that of the MLP: projections of heads make theirs along
    assert (len(heads), len(outputs), len(inner)) == (1, 2, config.gated_mlp)
    plain = family not in ("gemma2", "olmo2")
    assert all((args[2] is not None) == plain for args in outputs)  # the hidden states are added on the way


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
def test_norms_of_few_tokens_go_beside_products_with_codes(family, tokens, monkeypatch):
    """Heads with biases, norms with offsets and behind a block, experts."""
    layer, config = one_layer(family)
    layer = in_int8(layer, abstract(replace(config, num_layers=2))["layers"][1])
    hidden = jax.random.normal(jax.random.key(1), (1, tokens, config.hidden_size))
    positions = 900 + jnp.arange(tokens)[None]
    expected = through(layer, config, hidden, positions)
    take_gpu(monkeypatch, whole=True)
    assert_close(through(layer, config, hidden, positions), expected)
    q, numbers = layer["attention"]["q"], layer["attention_norm"]["scale"]
    times = [norm.split_pre_norm(layer, "attention", config, hidden, own)[1] for own in (q, numbers)]
    assert [time is None for time in times] == [False, True]


@pytest.mark.parametrize("family", ["smollm3", "ministral3", "cohere2", "glm4_moe", "llama4_text"])
def test_a_token_of_an_unusual_layer_is_the_same_through_kernels(family, monkeypatch):
    """Heads that are not turned, queries by their position, blocks side by side, an expert for every token."""
    layer, config = one_layer(family)
    hidden, positions = jax.random.normal(jax.random.key(1), (1, 1, config.hidden_size)), jnp.full((1, 1), 40)
    expected = through(layer, config, hidden, positions)
    take_gpu(monkeypatch, whole=True)
    heads, outputs = (
        counted(monkeypatch, (attention_in, "head_products")),
        counted(monkeypatch, (residual, "row_products")),
    )
    assert_close(through(layer, config, hidden, positions), expected)
    assert (len(heads), len(outputs)) == (1, 2)


@pytest.mark.parametrize(("family", "routed"), [("qwen3", 0), ("qwen3_moe", 1)])
def test_a_token_is_the_same_with_the_logits_of_a_router_from_its_norm(family, routed, monkeypatch):
    layer, config = one_layer(family)
    hidden = jax.random.normal(jax.random.key(1), (1, 1, config.hidden_size))
    attended = jax.random.normal(jax.random.key(2), (1, 1, config.num_heads, config.head_dim))

    def token():
        return jax.jit(lambda *args: decoder.attention_out_and_mlp(args[0], config, *args[1:]))(layer, hidden, attended)

    expected = token()
    take_gpu(monkeypatch, whole=False)
    calls = counted(monkeypatch, (norm, "normed_rows"), (moe, "normed_rows"))
    assert_close([token()], [expected])
    assert [args[2] is not None for args in calls] == [bool(routed)]


def served(run, *args) -> bool:
    """Whether a backend takes what it is given, whose results nobody reads."""
    try:
        jax.eval_shape(run, *args)
    except LeftToXLA:
        return False
    return True


def test_heads_that_a_kernel_cannot_turn_are_left_to_xla():
    """Without norms of their own, with one norm for all, or turned in part."""

    def turned(name):
        layer, config = one_layer(name)
        heads = [jnp.zeros((1, 1, count, config.head_dim)) for count in (config.num_heads, config.num_kv_heads)]
        positions = jnp.zeros((1, 1), jnp.int32)
        return served(lambda: qk_norm_rope._few_tokens(layer["attention"], config, *heads, positions))

    assert turned("qwen3")
    assert turned("qwen3_moe")
    assert not any(turned(name) for name in ("mistral", "qwen2", "olmo2", "glm", "opt"))


def test_experts_that_a_kernel_cannot_take_are_left_to_xla():

    def taken_in(name, tokens):
        config = registry.from_hf(FAMILIES[name])
        layer = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), abstract(replace(config, num_layers=2))
        )["layers"][1]
        config = config.of_layer(1)
        hidden = jax.ShapeDtypeStruct((1, tokens, config.hidden_size), jnp.bfloat16)
        return served(lambda layer, x: moe._few_tokens(layer, config, config.experts, x), layer, hidden)

    families = ("qwen3_moe", "mixtral", "qwen2_moe", "gpt_oss", "glm4_moe")
    taken = {name: [taken_in(name, tokens) for tokens in (1, 16, 17)] for name in families}
    served_few = {name: [True, True, False] for name in ("qwen3_moe", "mixtral", "qwen2_moe")}
    assert taken == served_few | {"gpt_oss": [False] * 3, "glm4_moe": [False] * 3}
