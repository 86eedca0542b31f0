"""The golden model of the learned scores, and how results are compared with theirs."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.blocks.causal_attention import causal_attention
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.learned import expected
from clusterkv_jax.models import decoder, hf_weights, registry
from clusterkv_jax.models.config import ModelConfig, Rope
from tests.support.golden_files import golden

CASES = pytest.mark.parametrize("case", [0, 2])
SINKS = 4


def arrays(*inputs):
    return [jnp.asarray(x) for x in inputs]


def close(result, expected, tolerance=2e-5):
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@functools.cache
def model(case):
    """The golden model (its weights are exact in float16), and what its layers make of its tokens."""
    tensors, meta = golden(f"learned_model_case{case}")
    sizes = (meta[name] for name in ("V", "M", "F", "L", "H", "K", "D"))
    rope = Rope(meta["rope_theta"], meta["D"])
    config = ModelConfig("llama", *sizes, 4096, rope, norm_eps=meta["rms_norm_eps"], tie_embeddings=True)
    stored = hf_weights.layout(config, registry.FAMILIES["llama"].weights)
    params = jax.tree.map(lambda place: jnp.asarray(place.view(tensors[place.name].astype(np.float32))), stored)
    tokens = jnp.asarray(tensors["tokens"])
    layers, logits = jax.jit(read, static_argnums=1)(params, config, tokens)
    close(logits[:, -1], tensors["logits_last"], 1e-4)
    layers = [SimpleNamespace(**layer) for layer in layers]
    return SimpleNamespace(params=params, config=config, tokens=tokens, layers=layers, rope=rope, meta=meta)


def read(params, config, tokens):
    """What each layer makes of the tokens, and the logits."""
    positions = ordinals(tokens.shape[1], 2)
    hidden, layers = decoder.embed(params, config, tokens, positions), []
    for layer in params["layers"]:
        inputs = decoder.attention_input(layer, config, hidden)
        q, k, v, _ = decoder.attention_in(layer, config, hidden, positions)
        heads = {name: jnp.swapaxes(x, 1, 2) for name, x in (("q", q), ("k", k), ("v", v))}
        before = {f"{name}_before": expected.before_rotation(heads[name], positions, config.rope) for name in "qk"}
        layers.append({"hidden": inputs, **heads, **before, "output": layer["attention"]["o"]})
        hidden = decoder.attention_out_and_mlp(layer, config, hidden, causal_attention(q, k, v))
    return layers, decoder.unembed(params, config, hidden)


def lowest(scores, count):
    """Mask of the `count` lowest of all scores."""
    evicted = np.zeros(scores.size, bool)
    evicted[np.argsort(scores, axis=None, kind="stable")[:count]] = True
    return evicted.reshape(scores.shape)
