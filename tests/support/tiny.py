"""A tiny random model, without a tokenizer: enough for every property of decoding."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import clusterkv_jax as ckv
from clusterkv_jax.models.config import ModelConfig, Rope
from clusterkv_jax.models.transformer import TensorSpec, abstract

VOCAB = 61


def random_params(config: ModelConfig) -> dict[str, Any]:
    """Norms of one and weights large enough that greedy tokens vary; `init` would compile its generators."""
    rng, scale = np.random.default_rng(0), 3 / math.sqrt(config.hidden_size)

    def draw(spec: TensorSpec) -> jax.Array:
        array = np.ones(spec.shape) if len(spec.shape) == 1 else scale * rng.standard_normal(spec.shape)
        return jnp.asarray(array, jnp.float32)

    return jax.tree.map(draw, abstract(config))


@functools.cache
def tiny(kv_heads: int = 2, layers: int = 2, eos: tuple[int, ...] = ()) -> ckv.Model:
    """Two layers, four query heads, 256 positions, and a random surrogate of scores."""
    config = ModelConfig("llama", VOCAB, 32, 64, layers, 4, kv_heads, 8, 256, Rope(1e4, 8), eos_ids=eos)
    params, rng = random_params(config), np.random.default_rng(1)
    shapes = {"weights": (config.hidden_size, kv_heads), "bias": (kv_heads,)}
    surrogates = [
        {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
        for _ in range(layers)
    ]
    params["layers"] = tuple(
        {**layer, "surrogate": each} for layer, each in zip(params["layers"], surrogates, strict=True)
    )
    return ckv.Model(params=params, config=config, tokenizer=None, mesh=None, name="tiny")


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()
