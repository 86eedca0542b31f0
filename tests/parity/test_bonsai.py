"""Qwen3 of bonsai, from its repository: the greedy tokens of its own cache, and those of our model of its weights."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.models.config import ModelConfig, Rope
from tests.support.tiny import prompt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports
    reason = "compares with bonsai: a checkout of its repository on PYTHONPATH"
    bonsai: Any = pytest.importorskip("bonsai.models.qwen3.modeling", reason=reason, exc_type=ImportError)
    from flax import nnx

# bonsai mixes ranks and dtypes.
pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, HALF = 61, ckv.Budget(ratio=0.5)
PROMPT = list(prompt(1, 200))
METHODS = (ckv.SnapKV(HALF, window=4), ckv.CentroidKV(HALF, sinks=2, recent=4), ckv.ChunkKV(HALF, chunk=4, window=4))


@pytest.fixture(autouse=True)
def _loose():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def model():
    sizes = {"num_layers": 2, "emb_dim": 32, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    rotations = {"rope_theta": 1_000_000, "rope_scaling_factor": 8.0, "local_rope_theta": 1e4}
    config = bonsai.ModelConfig(**sizes, **rotations, vocab_size=VOCAB, norm_eps=1e-6, tie_word_embeddings=False)
    model, rng = bonsai.Qwen3(config, rngs=nnx.Rngs(0)), np.random.default_rng(0)

    def draw(x):
        return jnp.asarray(rng.normal(scale=0.3, size=x.shape) + (x.ndim == 1), jnp.float32)

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


def test_full_gives_the_tokens_of_its_own_cache(model):
    new, own, tokens = 48, [], jnp.asarray([PROMPT])
    cache = bonsai.init_cache(model.config, 1, len(PROMPT), new, jnp.float32)
    for _ in range(new):
        logits, cache = bonsai.forward(model, cache, tokens, -1)  # no token is padding
        own.append(int(logits[0].argmax()))
        tokens = jnp.asarray([own[-1:]])
    assert ckv.nnx.compressed(model, ckv.Full()).generate([PROMPT], max_new_tokens=new).tokens[0] == own
    assert len(set(own)) > 4


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_method_gives_the_tokens_of_our_own_model(model, method):
    asked: dict[str, Any] = {"questions": [prompt(3, 5)], "max_new_tokens": 32}
    expected = ckv.generate(ours(model), [PROMPT], method=method, **asked)
    result = ckv.nnx.compressed(model, method, max_positions=1024).generate([PROMPT], **asked)
    assert result.tokens == expected.tokens
    assert result.stats.kept_rows == expected.stats.kept_rows


def ours(model: Any) -> ckv.Model:
    """The same weights in a model of ours."""

    def layer(x: Any) -> dict[str, Any]:
        first = {part: jnp.transpose(getattr(x.attn, f"{part}_proj").kernel[...], (1, 2, 0)) for part in "qkv"}
        norms = {"q_norm": x.attn.q_norm.scale[...], "k_norm": x.attn.k_norm.scale[...]}
        return {
            "attention_norm": {"scale": x.input_layernorm.scale[...]},
            "attention": first | {"o": x.attn.o_proj.kernel[...]} | norms,
            "mlp_norm": {"scale": x.post_attention_layernorm.scale[...]},
            "mlp": {part: getattr(x.mlp, f"{part}_proj").kernel[...] for part in ("gate", "up", "down")},
        }

    params = {
        "embed": model.embedder.embedding[...],
        "layers": tuple(map(layer, model.layers)),
        "final_norm": {"scale": model.final_norm.scale[...]},
        "lm_head": model.lm_head.kernel[...].T,
    }
    config = ModelConfig(
        "llama", VOCAB, 32, 64, 2, 4, 2, 8, 1024, Rope(1e6, 8), norm_eps=1e-6, qk_norm=True, tie_embeddings=False
    )
    return ckv.Model(params, config, tokenizer=None, mesh=None, name="bonsai")
