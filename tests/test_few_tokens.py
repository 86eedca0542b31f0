"""Few tokens through kernels: the decoder's own parts, whichever way they are taken."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax import decoding
from clusterkv_jax.kernels.normed_rows import normed_rows
from clusterkv_jax.models import few_tokens, registry, transformer
from clusterkv_jax.runtime.sharding import named_mesh
from tests.support.checkpoint_files import FAMILIES


def one_layer(family: str):
    """The second, since a first layer may have no experts."""
    config = registry.from_hf(FAMILIES[family])
    params = transformer.init(jax.random.key(0), replace(config, num_layers=2), jnp.float32)
    return params["layers"][1], config.of_layer(1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_layer_is_the_same_with_the_ops_of_few_tokens(family, monkeypatch):
    layer, config = one_layer(family)
    hidden = jax.random.normal(jax.random.key(1), (2, 3, config.hidden_size))
    positions = jnp.asarray([[5, 6, 7], [900, 901, 902]])

    def parts():
        q, k, v = transformer.qkv(layer, config, hidden, positions)
        return q, k, v, transformer.finish(layer, config, hidden, q)

    expected = parts()
    monkeypatch.setattr(few_tokens, "turns", lambda config, q: True)
    monkeypatch.setattr(few_tokens, "mixes", lambda config, experts, x, weights: True)
    for mine, own in zip(parts(), expected, strict=True):
        np.testing.assert_allclose(mine, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_what_lies_in_memory_for_the_projections_is_what_enters_them(batch, monkeypatch):
    layer, config = one_layer("qwen3")
    hidden = jax.random.normal(jax.random.key(1), (batch, 1, config.hidden_size))
    expected = jax.jit(transformer.attention_input, static_argnums=1)(layer, config, hidden)
    monkeypatch.setattr(few_tokens, "platform", lambda: "gpu")
    stored = jax.jit(transformer.stored_attention_input, static_argnums=1)(layer, config, hidden)
    np.testing.assert_allclose(stored, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_token_has_its_heads_and_scores_in_one_launch(family, monkeypatch):
    """After the norm that both read; heads with norms of their own are turned behind it."""
    layer, config = one_layer(family)
    hidden, positions = jax.random.normal(jax.random.key(1), (1, 1, config.hidden_size)), jnp.full((1, 1), 7)
    size = config.hidden_size, config.num_kv_heads
    linear = {"weights": jax.random.normal(jax.random.key(2), size), "bias": jnp.arange(float(config.num_kv_heads))}
    token = lambda: decoding._projected(layer | {"surrogate": linear}, config, hidden, positions)  # noqa: E731
    assert not few_tokens.scores(config, linear, hidden)
    expected, calls, op = token(), [], few_tokens.head_products
    monkeypatch.setattr(few_tokens, "platform", lambda: "gpu")
    assert not few_tokens.scores(config, linear, hidden)  # of 32 bits
    for name, value in (("WHOLE", 1), ("WHOLE_HEAD", 1), ("SIXTEEN_BITS", (jnp.float32,))):
        monkeypatch.setattr(few_tokens, name, value)
    assert few_tokens.scores(config, linear, hidden)
    assert not few_tokens.scores(config, linear | {"inner_weights": linear["weights"]}, hidden)
    assert not few_tokens.scores(config, linear, jnp.tile(hidden, (2, 1, 1)))
    monkeypatch.setattr(few_tokens, "head_products", lambda *args, **o: calls.append(args) or op(*args, **o))
    for mine, own in zip(token(), expected, strict=True):
        assert mine.shape == own.shape
        np.testing.assert_allclose(mine, own, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1
    assert calls[0][5] is not None


@pytest.mark.parametrize("mesh", [None, "model=2", "data=2,model=2"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma2", "granite", "olmo2", "glm", "opt"])
def test_tokens_are_the_same_through_kernels(family, tokens, mesh, monkeypatch):
    """Norms before blocks, around them, behind them, of another kind; biases; heads that are turned on the way, behind
    it, in part, or not at all.
    """
    layer, config = one_layer(family)
    hidden = jax.random.normal(jax.random.key(1), (tokens, 1, config.hidden_size))
    positions = 7 + jnp.arange(tokens)[:, None]

    def token():
        def run(hidden):
            q, k, v = transformer.qkv(layer, config, hidden, positions)
            return q, k, v, transformer.finish(layer, config, hidden, q)

        size = 1 if mesh is None else 2 if mesh == "model=2" else 4
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(named_mesh(mesh, jax.devices()[:size])):
            return jax.jit(run)(hidden)

    expected, norms, taken = token(), [], []
    for name, calls in (("normed_rows", norms), ("head_products", taken), ("row_products", taken)):
        op = getattr(few_tokens, name)
        count = lambda *args, op=op, calls=calls, **options: calls.append(1) or op(*args, **options)  # noqa: E731
        monkeypatch.setattr(few_tokens, name, count)
    monkeypatch.setattr(few_tokens, "platform", lambda: "gpu")
    monkeypatch.setattr(few_tokens, "WHOLE", 1)
    monkeypatch.setattr(few_tokens, "WHOLE_HEAD", 1)
    monkeypatch.setattr(few_tokens, "SIXTEEN_BITS", (jnp.float32,))
    monkeypatch.setattr(few_tokens, "turns", lambda config, q: False)
    for mine, own in zip(token(), expected, strict=True):
        np.testing.assert_allclose(mine, own, rtol=1e-4, atol=1e-5)
    with_norm = config.norm == "rms" and config.norm_place != "after"
    assert len(norms) == with_norm * (tokens == 1)  # that of the MLP: projections of heads make theirs along
    assert len(taken) == 3 + few_tokens.gates(config)


@pytest.mark.parametrize(("family", "routed"), [("qwen3", 0), ("qwen3_moe", 1)])
def test_a_token_is_the_same_with_the_logits_of_a_router_from_its_norm(family, routed, monkeypatch):
    layer, config = one_layer(family)
    hidden = jax.random.normal(jax.random.key(1), (1, 1, config.hidden_size))
    attended = jax.random.normal(jax.random.key(2), (1, 1, config.num_heads, config.head_dim))
    token = lambda: transformer.finish(layer, config, hidden, attended)  # noqa: E731
    expected, routers = token(), []
    monkeypatch.setattr(few_tokens, "platform", lambda: "gpu")
    assert not few_tokens.multiplies(config, hidden)  # narrower than a block of the kernel
    monkeypatch.setattr(few_tokens, "mixes", lambda *args: True)

    def normed(x, scale, weights, **options):
        routers.extend([] if weights is None else [1])
        return normed_rows(x, scale, weights, **options)

    monkeypatch.setattr(few_tokens, "normed_rows", normed)
    np.testing.assert_allclose(token(), expected, rtol=1e-4, atol=1e-5)
    assert len(routers) == routed


def test_heads_that_a_kernel_cannot_turn_are_left_to_xla(monkeypatch):
    """Without norms of their own, with one norm for all, or turned in part."""
    monkeypatch.setattr(few_tokens, "few", lambda x: True)
    turned = {
        name: few_tokens.turns(registry.from_hf(config), jnp.zeros((1, 1, 2, 8))) for name, config in FAMILIES.items()
    }
    assert turned["qwen3"]
    assert turned["qwen3_moe"]
    assert not any(turned[name] for name in ("mistral", "qwen2", "olmo2", "glm", "opt"))


def test_experts_that_a_kernel_cannot_take_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(few_tokens, "few", lambda x: True)
    served, rows = {}, (jnp.zeros((1, 1, 8), jnp.bfloat16), {"up": jnp.zeros((1, 8, 8), jnp.bfloat16)})
    for name in ("qwen3_moe", "mixtral", "gpt_oss"):
        config = registry.from_hf(FAMILIES[name])
        served[name] = few_tokens.mixes(config, config.experts, *rows)
    assert served == {"qwen3_moe": True, "mixtral": True, "gpt_oss": False}
