"""Models of google-tunix: its own sampler's greedy tokens, and with a method those of our model of the same weights."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.models.config import ModelConfig, Rope
from tests.support.methods import every_method, named
from tests.support.tiny import prompt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports
    pytest.importorskip("tunix", reason="compares with google-tunix: pip install google-tunix", exc_type=ImportError)
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler  # pyright: ignore[reportMissingImports]
    from tunix.models.gemma import model as gemma  # pyright: ignore[reportMissingImports]
    from tunix.models.gemma3 import model as gemma3  # pyright: ignore[reportMissingImports]
    from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]

# tunix mixes ranks, and calls what flax warns of.
pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, HALF = 61, ckv.Budget(ratio=0.5)
SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
# Its sampler takes 0 for padding, wherever it stands. With random weights a rounding can decide which rows stay; of the
# DECIDED prompts it decides none, whatever the method.
PROMPTS, DECIDED = (
    [[max(token, 1) for token in prompt(seed, length)] for seed, length in ((first, 200), (first + 1, 133))]
    for first in (1, 109)
)
METHODS = [
    *(method for method in every_method(HALF) if "scores" not in method.inputs(0)),
    ckv.Compactor(HALF, sinks=2, recent=2, chunk=16),
    ckv.KVzip(HALF, chunk=64, instruction=((3, 5), (7, 1, 4), (2,))),
    ckv.Quest(HALF, page=4, min_pages=2, dense_layers=0),
    ckv.ClusterKV(HALF, sinks=2, tokens_per_cluster=4, interval=4, interval_clusters=2, dense_layers=0),
    ckv.InfiniGen(HALF, partial_ratio=0.5, dense_layers=0),
]


ROUNDED = "These answers hang on roundings, which differ between two models: ask about other prompts."


class Ids:
    """A tokenizer of numbers; tunix asks for these five."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return VOCAB + 1

    def pad_id(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def _loose():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def model_of(name: str) -> Any:
    rngs = nnx.Rngs(0)
    common = {"vocab_size": VOCAB, "norm_eps": 1e-6, "rope_theta": 1_000_000}
    match name:
        case "qwen3":
            model = qwen3.Qwen3(qwen3.ModelConfig(**SIZES, **common), rngs=rngs)
        case "qwen3-tied":
            model = qwen3.Qwen3(qwen3.ModelConfig(**SIZES, **common, use_tied_embedding=True), rngs=rngs)
        case "qwen2":
            model = qwen2.Qwen2(qwen2.ModelConfig(**SIZES, **common), rngs=rngs)
        case "llama3":
            model = llama3.Llama3(llama3.ModelConfig(**SIZES, **common), rngs=rngs)
        case "gemma3":
            rest = {"sliding_window_size": 16, "global_base_frequency": 1_000_000, "global_scale_factor": 8.0}
            sizes = SIZES | {"num_layers": 7, "param_dtype": jnp.float32}
            model = gemma3.Gemma3(gemma3.ModelConfig(**sizes, num_embed=VOCAB, **rest), rngs=rngs)
        case _:
            heads = {"num_kv_heads": {"gemma": 4, "gemma2": 2, "gemma-gqa": 2, "gemma-mqa": 1}[name]}
            rest = {"final_logit_softcap": 30.0, "use_post_attn_norm": True, "use_post_ffw_norm": True}
            kinds = [gemma.AttentionType.GLOBAL] * 2
            if name == "gemma2":
                kinds[0] = gemma.AttentionType.LOCAL_SLIDING
                rest |= {"attn_logits_soft_cap": 2.0, "sliding_window_size": 16}
            config = gemma.ModelConfig(**SIZES | heads, num_embed=VOCAB, attention_types=kinds, **rest)
            model = gemma.Gemma(config, rngs=rngs)
    rng = np.random.default_rng(0)  # tunix starts MLPs with zeros

    def draw(x: Any) -> Any:
        array = rng.normal(scale=0.3, size=x.shape) + (x.ndim == 1)
        if VOCAB in x.shape:
            array[(slice(None),) * x.shape.index(VOCAB) + (0,)] = 0.0  # so that padding is never the likeliest token
        return jnp.asarray(array, jnp.float32)

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


MODELS = ("qwen3", "qwen3-tied", "qwen2", "llama3", "gemma", "gemma-gqa", "gemma-mqa", "gemma2", "gemma3")


@pytest.mark.parametrize("name", MODELS)
def test_full_gives_the_tokens_of_its_sampler(name):
    model, new = model_of(name), 64
    kv_heads = getattr(model.config, "num_kv_heads")  # noqa: B009  (one of several configurations)
    sampler = Sampler(model, Ids(), CacheConfig(512, len(model.layers), kv_heads, SIZES["head_dim"]))
    # Its sampler pads on the left to a power of two, and counts its windows from there.
    prompts = [PROMPTS[0][:128], PROMPTS[1][:64]] if name in ("gemma2", "gemma3") else PROMPTS
    result = ckv.nnx.compressed(model, ckv.Full()).generate(prompts, max_new_tokens=new)
    for text, tokens in zip(prompts, result.tokens, strict=True):
        own = sampler([Ids().decode(text)], max_generation_steps=new, temperature=0.0).tokens[0]
        assert tokens == [int(token) for token in own]
    assert len({token for tokens in result.tokens for token in tokens}) > 4


def ours(name: str, model: Any) -> ckv.Model:
    """The same weights in a model of ours."""

    def first(x):
        return jnp.transpose(x.w[...], (1, 2, 0))

    def layer(x: Any) -> dict[str, Any]:
        attention = {part: first(getattr(x.attn, f"{part}_proj")) for part in "qkv"} | {"o": x.attn.o_proj.w[...]}
        if name == "qwen2":
            heads = {"q": 4, "k": 2, "v": 2}
            biases = {f"{p}_bias": getattr(x.attn, f"{p}_bias")[...].reshape(n, -1) for p, n in heads.items()}
            attention |= biases
        if "qwen3" in name:
            attention |= {"q_norm": x.attn.q_norm.w[...], "k_norm": x.attn.k_norm.w[...]}
        return {
            "attention_norm": {"scale": x.input_layernorm.w[...]},
            "attention": attention,
            "mlp_norm": {"scale": x.post_attention_layernorm.w[...]},
            "mlp": {part: getattr(x.mlp, f"{part}_proj").kernel[...] for part in ("gate", "up", "down")},
        }

    tied = name == "qwen3-tied"
    params = {
        "embed": model.embedder.input_embedding[...],
        "layers": tuple(map(layer, model.layers)),
        "final_norm": {"scale": model.final_norm.w[...]},
    } | ({} if tied else {"lm_head": model.lm_head.w[...].T})
    kinds = {"qkv_bias": name == "qwen2", "qk_norm": "qwen3" in name, "tie_embeddings": tied}
    config = ModelConfig("llama", VOCAB, 32, 64, 2, 4, 2, 8, 1024, Rope(1e6, 8), norm_eps=1e-6, **kinds)
    return ckv.Model(params, config, tokenizer=None, mesh=None, name=name)


def nudged(model: ckv.Model, seed: int) -> ckv.Model:
    """The model with weights that are off by a few roundings."""
    rng = np.random.default_rng(seed)

    def off(x):
        return x * jnp.asarray(1 + 2e-7 * rng.standard_normal(x.shape), x.dtype)

    return dataclasses.replace(model, params=jax.tree.map(off, model.params))


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen2", "llama3"])
def test_a_method_gives_the_tokens_of_our_own_model(name, method):
    model, asked = model_of(name), {"questions": [prompt(23, 5), prompt(24, 3)], "max_new_tokens": 32}
    own = ours(name, model)
    expected = ckv.generate(own, DECIDED, method=method, **asked)
    for seed in (0, 1):
        assert ckv.generate(nudged(own, seed), DECIDED, method=method, **asked).tokens == expected.tokens, ROUNDED
    result = ckv.nnx.compressed(model, method, max_positions=1024).generate(DECIDED, **asked)
    assert result.tokens == expected.tokens
    assert result.stats.kept_rows == expected.stats.kept_rows
    assert len({token for tokens in result.tokens for token in tokens}) > 4


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen2", "llama3"])
def test_what_a_method_keeps_changes_these_answers(name):
    own, asked = ours(name, model_of(name)), {"questions": [prompt(23, 5), prompt(24, 3)], "max_new_tokens": 32}
    full = ckv.generate(own, DECIDED, method=ckv.Full(), **asked).tokens
    for method in METHODS[:3]:
        assert ckv.generate(own, DECIDED, method=method, **asked).tokens != full


def test_it_runs_under_nnx_jit():
    small = ckv.nnx.compressed(model_of("qwen3"), ckv.SnapKV(HALF, window=4))
    expected = small.generate([PROMPTS[0]], max_new_tokens=2).tokens[0]
    read = nnx.jit(lambda small, tokens, lengths: small.prefill(tokens, lengths, max_new_tokens=2))
    step = nnx.jit(lambda small, cache, token: small.decode_step(cache, token))
    cache, logits = read(small, jnp.asarray([PROMPTS[0]]), jnp.asarray([200]))
    token = logits.argmax(axis=-1).astype(jnp.int32)
    assert [int(token[0]), int(step(small, cache, token)[1][0].argmax())] == expected


@pytest.mark.parametrize(("name", "windows"), [("gemma2", 1), ("gemma3", 6)])
def test_windows_are_no_method_s(name, windows):
    """And a window that is one token shorter, or a missing cap, is another model."""
    small = ckv.nnx.compressed(model_of(name), ckv.SnapKV(HALF, window=4))
    stats = small.generate(PROMPTS, max_new_tokens=4).stats
    assert len(stats.window_rows) == windows
    assert {rows for layer in stats.window_rows for heads in layer for rows in heads} == {16}
    assert stats.kept_rows[0] == [[100, 100], [66, 66]]
    full = ckv.nnx.compressed(model_of(name), ckv.Full())
    _, logits = full.prefill(np.asarray([PROMPTS[0]]), np.asarray([200]), max_new_tokens=1)
    changes = [{"window": 15}, {"soft_cap": 4.0}]
    for change in changes:
        other = dataclasses.replace(full.config, **change)
        _, wrong = ckv.prefill(full.params, other, ckv.Full(), np.asarray([PROMPTS[0]]), np.asarray([200]))
        assert float(jnp.abs(wrong - logits).max()) > 1e-3


def test_layers_that_cap_otherwise_are_refused():
    model = model_of("gemma2")
    model.layers[0].attn.attn_logits_soft_cap = None
    with pytest.raises(ValueError, match=r"Gemma: all layers need the same cap of scores, got \[2.0, None\]"):
        ckv.nnx.compressed(model, ckv.Full())
