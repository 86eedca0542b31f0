"""Layers of experts: the decoder against transformers' arithmetic in NumPy, the backends, meshes, methods, what decode
reads.
"""

import math
import re
import weakref
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.blocks import experts as blocks
from clusterkv_jax.blocks.experts import mixture, route
from clusterkv_jax.checkpoints.expert_stacks import Stack
from clusterkv_jax.checkpoints.loading import CheckpointError, host_copy, load
from clusterkv_jax.models import registry
from clusterkv_jax.models.config import Experts, ModelConfig, Rope
from clusterkv_jax.models.decoder import forward
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.runtime import dispatch
from clusterkv_jax.storage.digests import whole
from tests.support.checkpoint_files import FAMILIES, QWEN3_MOE, random_tensors, same, write
from tests.support.coded import in_int8
from tests.support.numbers import relative
from tests.support.tiny import VOCAB, prompt, random_params

EXPERTS = Experts(8, 3, 24, dense_layers=(0,))
CONFIG = ModelConfig("qwen3_moe", VOCAB, 32, 64, 2, 4, 2, 8, 1024, Rope(1e4, 8), qk_norm=True, experts=EXPERTS)
jitted_forward = jax.jit(forward, static_argnums=1)


@cache
def model(experts: Experts = EXPERTS) -> ckv.Model:
    config = replace(CONFIG, experts=experts)
    return ckv.Model(params=random_params(config), config=config, tokenizer=None, mesh=None, name="experts")


def layer_weights() -> dict[str, jax.Array]:
    return model().params["layers"][1]["experts"]


def hidden(batch: int, tokens: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(tokens).standard_normal((batch, tokens, 32)), jnp.float32)


# --- the definition: transformers 5.23, modeling_qwen3_moe.py and modeling_mixtral.py, in float64 ---


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def reference_mixture(weights: Any, experts: Experts, x: np.ndarray) -> np.ndarray:
    """Token by token: softmax over all experts, the best of them, shares that add up to 1 where they are normalised."""
    router, gate, up, down = (np.asarray(weights[name], np.float64) for name in ("router", "gate", "up", "down"))
    out = np.zeros_like(x)
    for token, row in zip(x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1]), strict=True):
        odds = np.exp(router @ token - np.max(router @ token))
        odds /= odds.sum()
        best = np.argsort(-odds, kind="stable")[: experts.per_token]
        shares = odds[best] / odds[best].sum() if experts.normalize else odds[best]
        for share, expert in zip(shares, best, strict=True):
            row += share * ((silu(token @ gate[expert]) * (token @ up[expert])) @ down[expert])
    return out


def reference_logits(params: Any, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """The whole decoder for one sequence."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    n, d = len(tokens), config.head_dim
    assert config.rope is not None
    angles = np.arange(n)[:, None] * config.rope.theta ** (-np.arange(0, d, 2) / d)

    def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * scale

    def rotated(x: np.ndarray) -> np.ndarray:  # [H, N, D]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    x = params["embed"][tokens]
    for number, layer in enumerate(params["layers"]):
        weights, y = layer["attention"], rms(x, layer["attention_norm"]["scale"])
        q, k, v = (np.einsum("nm,hdm->hnd", y, weights[name]) for name in ("q", "k", "v"))
        q, k = rotated(rms(q, weights["q_norm"])), rotated(rms(k, weights["k_norm"]))
        k, v = (np.repeat(part, len(q) // len(k), axis=0) for part in (k, v))
        scores = np.where(np.tri(n, dtype=bool), np.einsum("hnd,hjd->hnj", q, k) / np.sqrt(d), -np.inf)
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        odds /= odds.sum(-1, keepdims=True)
        x = x + np.einsum("hnj,hjd,hdm->nm", odds, v, weights["o"], optimize=True)
        y, experts = rms(x, layer["mlp_norm"]["scale"]), config.experts_of(number)
        if experts is None:
            mlp = layer["mlp"]
            x = x + (silu(y @ mlp["gate"]) * (y @ mlp["up"])) @ mlp["down"]
        else:
            x = x + reference_mixture(layer["experts"], experts, y)
    return rms(x, params["final_norm"]["scale"]) @ params["lm_head"].T


@pytest.mark.parametrize("normalize", [True, False])
def test_logits_are_the_definition_s(normalize):
    """600 tokens, and a router whose shares are normalised otherwise is told from it."""
    found, other = model(replace(EXPERTS, normalize=normalize)), replace(EXPERTS, normalize=not normalize)
    tokens = np.asarray(prompt(0, 600))
    want = reference_logits(found.params, found.config, tokens)
    assert relative(jitted_forward(found.params, found.config, tokens[None])[0], want) <= 2e-5
    wrong = replace(found.config, experts=other)
    assert relative(jitted_forward(found.params, wrong, tokens[None])[0], want) > 1e-2


def test_greedy_tokens_are_the_definition_s():
    ids, found = prompt(1, 20), model()
    result = ckv.generate(found, [ids], method=ckv.Full(), max_new_tokens=64)
    got = [int(token) for token in result.tokens[0]]
    want = reference_logits(found.params, found.config, np.asarray(ids + got))[19:-1]
    np.testing.assert_array_equal(np.argmax(want, axis=-1), got)


# --- backends ---


@pytest.fixture(params=[blocks._ragged, blocks._gather, blocks._blocks])
def backend(request, monkeypatch):
    """What multiplies rows on some device, here in the place of what a CPU takes."""
    monkeypatch.setitem(blocks.BACKENDS, "xla", request.param)
    return request.param


def mixed(weights: Any, experts: Experts, x: jax.Array) -> jax.Array:
    return jax.jit(lambda *operands: mixture(operands[0], experts, jax.nn.silu, operands[1]))(weights, x)


@pytest.mark.parametrize("tokens", [1, 2, 3, 20, 301])
def test_every_backend_is_the_definition(backend, tokens):
    """From fewer rows than experts to many blocks of each."""
    x = hidden(2, tokens)
    want = reference_mixture(layer_weights(), EXPERTS, np.asarray(x, np.float64))
    assert relative(mixed(layer_weights(), EXPERTS, x), want) < 2e-6


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_read_the_codes_of_their_experts(tokens, monkeypatch):
    """Few rows on a GPU; the same as in blocks."""
    weights = in_int8(layer_weights(), abstract(CONFIG)["layers"][1]["experts"])
    x = hidden(1, tokens)
    expected = mixed(weights, EXPERTS, x)
    monkeypatch.setitem(blocks.BACKENDS, "xla", blocks._codes)
    np.testing.assert_allclose(mixed(weights, EXPERTS, x), expected, rtol=1e-4, atol=1e-6)


def test_experts_that_nobody_chose_and_one_that_all_did(backend):
    """The router's first row wins everywhere, with a share of almost 1."""
    weights, x = layer_weights(), jnp.abs(hidden(1, 40))
    router = jnp.zeros_like(weights["router"]).at[0].set(1.0)
    got = mixed({**weights, "router": router}, Experts(8, 1, 24), x)
    own = (jax.nn.silu(x @ weights["gate"][0]) * (x @ weights["up"][0])) @ weights["down"][0]
    assert relative(got, own) < 2e-6


def test_gradients(backend, monkeypatch):
    def gradient() -> Any:
        return jax.jit(jax.grad(lambda weights: jnp.sum(mixture(weights, EXPERTS, jax.nn.silu, hidden(1, 20)) ** 2)))

    found = gradient()(layer_weights())
    monkeypatch.setitem(blocks.BACKENDS, "xla", blocks._ragged)
    errors = jax.tree.map(relative, found, gradient()(layer_weights()))
    assert max(jax.tree.leaves(errors)) < 1e-5


@pytest.mark.parametrize(
    ("device", "tokens", "name"), [("gpu", 2, "_gather"), ("gpu", 3, "_blocks"), ("tpu", 3, "_ragged")]
)
def test_a_device_takes_what_is_fast_on_it(monkeypatch, device, tokens, name):
    """A GPU reads the weights of 8 experts for no more than 8 rows, 3 for each token."""
    monkeypatch.setattr(dispatch, "platform", lambda: device)
    taken = []

    def spy(name, implementation):
        return lambda *operands: (taken.append(name), implementation(*operands))[1]

    for each in ("_gather", "_blocks", "_ragged"):
        monkeypatch.setattr(blocks, each, spy(each, getattr(blocks, each)))
    monkeypatch.setitem(blocks.BACKENDS, "tpu", blocks._ragged)
    monkeypatch.setitem(blocks.BACKENDS, "xla", blocks._blocks)
    jax.eval_shape(lambda x: mixture(layer_weights(), EXPERTS, jax.nn.silu, x), hidden(1, tokens))
    assert taken == [name]


def test_the_likeliest_experts_are_chosen():
    chosen, shares = route(layer_weights()["router"], EXPERTS, hidden(2, 5))
    logits = np.einsum("btm,em->bte", hidden(2, 5), layer_weights()["router"])
    np.testing.assert_array_equal(chosen, np.argsort(-logits, axis=-1)[..., :3])
    np.testing.assert_allclose(jnp.sum(shares, axis=-1), 1, rtol=1e-6)


def test_few_tokens_have_their_experts_by_comparisons(monkeypatch):
    """On a GPU; as a sort has them, of equal scores the first, and experts that there are whatever the scores are."""
    scores = jax.random.normal(jax.random.key(0), (2, 3, 16)).at[:, :, 5].set(9).at[:, :, 9].set(9)
    expected = jax.lax.top_k(scores, 4)
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    best, chosen = blocks._best(scores, 4)
    np.testing.assert_array_equal(best, expected[0])
    np.testing.assert_array_equal(chosen, expected[1])
    assert int(jnp.max(blocks._best(jnp.full((1, 1, 16), jnp.nan), 4)[1])) < 16
    text = jax.jit(partial(blocks._best, count=4)).lower(scores).as_text()
    assert "top_k" not in text
    assert "sort" not in text


# --- what a step reads ---


def copied(x: jax.ShapeDtypeStruct) -> tuple[int, int]:
    """Of a compiled layer: the numbers of its largest array but the parameters, and the bytes of its temporaries."""
    weights = {"router": (16, 96), "gate": (16, 96, 80), "up": (16, 96, 80), "down": (16, 80, 96)}
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in weights.items()}
    experts = Experts(16, 4, 80)
    run = jax.jit(lambda *operands: mixture(operands[0], experts, jax.nn.silu, operands[1]))
    compiled = run.lower(shapes, x).compile()
    found = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    largest = max(math.prod(shape) for shape in found - set(weights.values()))
    return largest, compiled.memory_analysis().temp_size_in_bytes


def test_a_step_copies_no_weights_per_token(monkeypatch):
    """Of the compiled text: the weights of one expert at a time, where a gather takes those of all rows."""
    x, expert = jax.ShapeDtypeStruct((2, 1, 96), jnp.float32), 96 * 80
    largest, temporary = copied(x)
    assert largest <= expert
    assert temporary <= 4 * 4 * expert
    monkeypatch.setitem(blocks.BACKENDS, "xla", blocks._gather)
    assert copied(x)[0] >= 8 * expert


# --- files ---


def test_both_names_of_the_number_of_experts():
    """That of published files, and that of transformers 5."""
    published = {**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}
    newer = {key: value for key, value in published.items() if key != "num_experts"} | {"num_local_experts": 8}
    config = registry.from_hf(published)
    assert config == registry.from_hf(newer)
    assert config.experts == Experts(8, 3, 24, normalize=True, dense_layers=(0, 2, 3, 4))
    assert config.mlp_sizes == (24, 48)
    assert registry.from_hf(FAMILIES["mixtral"]).experts == Experts(4, 2, 48)
    assert registry.from_hf({**QWEN3_MOE, "norm_topk_prob": False}).experts == replace(
        Experts(8, 3, 24, dense_layers=(0,)), normalize=False
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "Experts per_token must be a whole number from 1 to count = 8, got 9."),
        ({"num_experts": 0}, "field 'num_experts': Expected int >= 1 (0)."),
        ({"mlp_only_layers": "all"}, "field 'mlp_only_layers': Expected array | null, got str ('all')."),
        ({"hidden_act": "tanh"}, "Activation 'tanh' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(ValueError, match=r".") as error:
        registry.from_hf({**QWEN3_MOE, **change})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_published_names():
    """Of Qwen3-30B-A3B and Mixtral-8x7B, whose tensors have these names and shapes."""
    names = {family: {name: x.shape for name, x in random_tensors(FAMILIES[family]).items()} for family in FAMILIES}
    qwen, mixtral = names["qwen3_moe"], names["mixtral"]
    assert qwen["model.layers.0.mlp.gate_proj.weight"] == (48, 32)
    assert qwen["model.layers.1.mlp.gate.weight"] == (8, 32)
    assert qwen["model.layers.1.mlp.experts.7.gate_proj.weight"] == (24, 32)
    assert qwen["model.layers.1.mlp.experts.7.down_proj.weight"] == (32, 24)
    assert mixtral["model.layers.1.block_sparse_moe.gate.weight"] == (4, 32)
    assert mixtral["model.layers.1.block_sparse_moe.experts.3.w2.weight"] == (32, 48)
    assert not any("mlp" in name for name in mixtral)


def test_a_missing_or_broken_expert_is_named(tmp_path):
    tensors = random_tensors(QWEN3_MOE)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors[name][3, 4] = np.inf
    with pytest.raises(CheckpointError, match=rf"^{re.escape(name)} in .* holds inf; allowed: numbers that are finite"):
        load(write(tmp_path / "broken", QWEN3_MOE, tensors))
    del tensors[name]
    with pytest.raises(CheckpointError, match=rf"lacks {re.escape(name)} \[24, 32\], which its config.json implies"):
        load(write(tmp_path / "missing", QWEN3_MOE, tensors))


class Counted:
    """A tensor in a file, which counts the maps of its kind that are alive."""

    where = "a tensor"
    alive = most = 0

    def view(self) -> np.ndarray:
        array = np.ones((5, 7), np.float32)
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        weakref.finalize(array, self.release)
        return array

    def release(self) -> None:
        Counted.alive -= 1


def test_tensors_of_a_stack_are_read_one_at_a_time():
    """The next is mapped before the last is let go."""
    stack = Stack([Counted() for _ in range(9)], whole((9, 5, 7)))
    copy = host_copy(stack[1:8, :, 2:4], np.dtype(np.float32), "cpu", "")
    np.testing.assert_array_equal(copy, np.ones((7, 5, 2)))
    assert Counted.most == 2


# --- meshes ---


def test_devices_share_every_expert(tmp_path):
    published = {**QWEN3_MOE, "vocab_size": 64}
    folder = write(tmp_path / "m", published, random_tensors(published))
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    there, alone = load(folder, mesh=mesh), load(folder)
    assert same(jax.device_get(there.params), alone.params)
    weights = there.params["layers"][1]["experts"]
    assert weights["gate"].addressable_shards[0].data.shape == (8, 32, 6)
    assert weights["down"].addressable_shards[0].data.shape == (8, 6, 32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 24)), jnp.int32)
    with jax.set_mesh(there.mesh):
        got = jitted_forward(there.params, there.config, tokens)
    assert relative(got, jitted_forward(alone.params, alone.config, tokens)) < 2e-6


# --- methods ---


@pytest.mark.parametrize("method", [ckv.Full(), ckv.CentroidKV(ckv.Budget(tokens=24), sinks=2, recent=4, chunk=16)])
def test_a_row_alone_is_the_row_in_a_batch(method):
    """Whatever experts the tokens beside it choose; and budgets are met exactly."""
    found, lengths = model(Experts(8, 3, 24)), [96, 60]
    prompts = [prompt(number, length) for number, length in enumerate(lengths)]
    together = ckv.generate(found, prompts, method=method, max_new_tokens=12)
    alone = ckv.generate(found, prompts[1:], method=method, max_new_tokens=12)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[1])
    rows = lengths if isinstance(method, ckv.Full) else [24, 24]
    assert together.stats.kept_rows == [[[count] * 2 for count in rows]] * 2
