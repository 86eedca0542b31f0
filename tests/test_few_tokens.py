"""Few tokens through kernels: the decoder's own parts, whichever way they are taken."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import decoding
from clusterkv_jax.cache import WindowCache, from_tokens, quantised
from clusterkv_jax.kernels.expert_layer import pallas_gpu
from clusterkv_jax.kernels.normed_rows import normed_rows
from clusterkv_jax.kernels.pending import Pending, pending
from clusterkv_jax.kernels.split_product import split_product
from clusterkv_jax.methods import by_head, layer_launch
from clusterkv_jax.models import few_tokens, registry, transformer
from clusterkv_jax.sharding import named_mesh
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
    in_parts = tokens == 1 and mesh is None and few_tokens.projects(config, hidden)
    assert len(taken) == 3 + few_tokens.gates(config) - in_parts


@pytest.mark.parametrize(
    ("family", "split", "routed"), [("qwen3", 1, 0), ("qwen3_moe", 1, 1), ("granite", 1, 0), ("gemma2", 0, 0)]
)
def test_a_token_is_the_same_with_what_kernels_take_along(family, split, routed, monkeypatch):
    """An output projection in parts, which the norm behind it adds up; a router's logits, which that norm makes."""
    layer, config = one_layer(family)
    hidden = jax.random.normal(jax.random.key(1), (1, 1, config.hidden_size))
    attended = jax.random.normal(jax.random.key(2), (1, 1, config.num_heads, config.head_dim))
    token = lambda: transformer.finish(layer, config, hidden, attended)  # noqa: E731
    expected, parts, routers = token(), [], []
    monkeypatch.setattr(few_tokens, "platform", lambda: "gpu")
    assert not few_tokens.projects(config, hidden)  # narrower than a block of the kernel
    assert not few_tokens.multiplies(config, hidden)
    monkeypatch.setattr(few_tokens, "WHOLE", 8)
    monkeypatch.setattr(few_tokens, "mixes", lambda *args: True)
    monkeypatch.setattr(
        few_tokens, "split_product", lambda *args, **options: parts.append(1) or split_product(*args, **options)
    )

    def normed(x, added, scale, weights, **options):
        routers.extend([] if weights is None else [1])
        return normed_rows(x, added, scale, weights, **options)

    monkeypatch.setattr(few_tokens, "normed_rows", normed)
    np.testing.assert_allclose(token(), expected, rtol=1e-4, atol=1e-5)
    assert (len(parts), len(routers)) == (split, routed)


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


def _moe():
    config = replace(registry.from_hf(FAMILIES["qwen3_moe"]), num_layers=2)
    return transformer.init(jax.random.key(0), config, jnp.float32), config


@pytest.mark.parametrize("by_heads", [True, False])
@pytest.mark.parametrize("in_a_row", [True, False])
def test_steps_are_the_same_where_a_launch_takes_whole_layers(by_heads, in_a_row, monkeypatch):
    """Heads of unequal budgets, and a layer without groups; behind a layer of another kind, and of the same."""
    config = replace(registry.from_hf(FAMILIES["qwen3_moe"]), num_layers=4)
    params = transformer.init(jax.random.key(0), config, jnp.float32)
    heads = config.num_kv_heads
    shares = tuple(tuple(1.0 + (head + layer) % 2 for head in range(heads)) for layer in range(4)) if by_heads else None
    method = ckv.CentroidKV(ckv.Budget(ratio=0.5, shares=shares), sinks=2, recent=4, chunk=16)
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (1, 48), 0, config.vocab_size))
    cache, _ = ckv.prefill(params, config, method, tokens, np.array([48]), max_new_tokens=4)

    def steps():
        after, _ = decoding.decode_step(params, config, method, cache, jnp.array([3]))
        return decoding.decode_step(params, config, method, after, jnp.array([5]))

    expected, taken, op = steps(), [], few_tokens.expert_layer
    monkeypatch.setattr(few_tokens, "expert_layer", lambda *args, **o: taken.append(1) or op(*args, **o))
    takes = lambda *args: "experts" in args[0] and (in_a_row or not isinstance(args[-1], Pending))  # noqa: E731
    monkeypatch.setattr(layer_launch, "takes", takes)
    monkeypatch.setattr(by_head, "platform", lambda: "gpu")
    jax.clear_caches()  # of layers that were traced without
    result = steps()
    assert len(taken) >= 1 + in_a_row
    for new, old in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-4)
    jax.clear_caches()


def test_a_launch_takes_one_token_through_a_layer_of_plain_experts_alone(monkeypatch):
    params, config = _moe()
    layer = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["layers"][1])
    hidden = jnp.zeros((1, 1, config.hidden_size), jnp.bfloat16)
    assert not few_tokens.takes_layer(layer, config, hidden)
    monkeypatch.setattr(few_tokens, "platform", lambda: "gpu")
    monkeypatch.setattr(few_tokens, "WHOLE", 1)
    assert few_tokens.takes_layer(layer, config, hidden)
    assert few_tokens.takes_layer(layer, config, pending(hidden[0, 0], 2))
    assert not few_tokens.takes_layer(layer, config, jnp.tile(hidden, (2, 1, 1)))
    assert not few_tokens.takes_layer(layer, config, jnp.tile(hidden, (1, 2, 1)))
    assert not few_tokens.takes_layer(layer, config, hidden.astype(jnp.float32))
    assert not few_tokens.takes_layer({"mlp": layer["experts"]}, config, hidden)
    others = [{"sink_logits": True}, {"residual_scale": 0.5}, {"norm_place": "both"}, {"norm": "layer"}]
    others += [{"experts": None}, {"output_bias": True}, {"activation": "gelu"}, {"attention_scale": 0.5}]
    others += [{"qk_norm": False}, {"qk_norm_whole": True}, {"qkv_bias": True}, {"rope": None}, {"soft_cap": 3.0}]
    others += [{"experts": replace(config.experts, bias=True)}, {"rope": replace(config.rope, interleaved=True)}]
    for changes in others:
        assert not few_tokens.takes_layer(layer, replace(config, **changes), hidden), changes


def test_a_launch_takes_plain_rows_of_methods_that_ask_nothing_before_attention(monkeypatch):
    params, config = _moe()
    layer = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["layers"][1])
    hidden = jnp.zeros((1, 1, config.hidden_size), jnp.bfloat16)
    keys = jnp.zeros((1, config.num_kv_heads, 64, config.head_dim), jnp.bfloat16)
    rows, asked = from_tokens(keys, keys, jnp.array([3])), []
    monkeypatch.setattr(few_tokens, "platform", lambda: "gpu")
    monkeypatch.setattr(few_tokens, "WHOLE", 1)
    monkeypatch.setattr(pallas_gpu, "refusal", lambda *args: asked.append(args))
    plain, recalls = ckv.CentroidKV(ckv.Budget(ratio=0.5)), ckv.ClusterKV(ckv.Budget(tokens=32))
    takes = lambda rows, state=None, needs=(), method=plain, in_common=True: layer_launch.takes(  # noqa: E731
        layer, config, method, frozenset(needs), in_common, rows, (state,), hidden
    )
    assert not takes(rows)  # of a CPU
    monkeypatch.setattr(by_head, "platform", lambda: "gpu")
    assert takes(rows)
    plan, types, slots = asked[-1]
    assert (plan.kv_heads, plan.width, plan.experts) == (config.num_kv_heads, config.hidden_size, config.experts.count)
    assert ({str(x) for x in types}, slots) == ({"bfloat16"}, [64])
    takes(replace(rows, keys=keys.astype(jnp.float32)))
    assert {str(x) for x in asked[-1][1]} == {"bfloat16", "float32"}  # which the kernel then refuses
    assert not takes(quantised(rows, "int8"))
    assert not takes(rows, {"scores": jnp.zeros(keys.shape[:3])})
    assert not takes(rows, {"labels": jnp.zeros(keys.shape[:3])}, method=recalls)  # by a step of its own
    assert not takes(WindowCache(rows, 32))
    assert not takes(rows, in_common=False)
    assert not takes(rows, needs={"scores"})
    assert not takes(rows, needs={"lookahead"})
    monkeypatch.setattr(pallas_gpu, "refusal", lambda *_: "takes other shapes")
    assert not takes(rows)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([4, 4, 4], [True, True, True]),
        ([4, 9, 4], [True, False, True]),  # the last layer's launch is behind that of the next step's first
        ([4, 9, 9, 20], [False, True, True, False]),
        ([4, 9, 4, 9], [False, False, False, False]),
        ([4], [True]),
    ],
)
def test_a_launch_is_for_layers_of_which_a_neighbour_has_rows_of_the_same_shapes(shares, expected):
    """Shares of the first head of each layer; the second one has 4."""
    of_heads = tuple((float(share), 4.0) for share in shares)
    config = replace(registry.from_hf(FAMILIES["qwen3_moe"]), num_layers=len(shares), num_kv_heads=2)
    params = transformer.init(jax.random.key(0), config, jnp.float32)
    method = ckv.CentroidKV(ckv.Budget(ratio=0.5, shares=of_heads), sinks=1, recent=1, chunk=16)
    tokens = np.zeros((1, 80), np.int32)
    cache, _ = ckv.prefill(params, config, method, tokens, np.array([80]), reserve=300)
    assert layer_launch.in_common(cache) == expected
