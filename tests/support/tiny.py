"""A tiny random model, without a tokenizer: enough for every property of decoding."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import clusterkv_jax as ckv
from clusterkv_jax.decoding import extend_step
from clusterkv_jax.models.config import ClampedSwiglu, Experts, ModelConfig, Rope
from clusterkv_jax.models.parameters import TensorSpec, abstract

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
    """Two layers, four query heads, 256 positions."""
    config = ModelConfig("llama", VOCAB, 32, 64, layers, 4, kv_heads, 8, 256, Rope(1e4, 8), eos_ids=eos)
    return ckv.Model(params=random_params(config), config=config, tokenizer=None, mesh=None, name="tiny")


@functools.cache
def sliding(
    layers: int = 4, window: int = 12, pattern: int = 2, soft_cap: float | None = None, kv_heads: int = 2
) -> ckv.Model:
    """Every `pattern`-th layer sees every token, the others a window, by rotations of their own; with a surrogate."""
    places = tuple(layer for layer in range(layers) if (layer + 1) % pattern)
    slides = {"window": window, "sliding_layers": places, "local_rope": Rope(1e2, 8), "soft_cap": soft_cap}
    config = replace(tiny(kv_heads, layers).config, **slides)
    return with_surrogate(
        ckv.Model(params=random_params(config), config=config, tokenizer=None, mesh=None, name="sliding")
    )


@functools.cache
def taught(kv_heads: int = 2, layers: int = 2) -> ckv.Model:
    """The same with a random surrogate of scores."""
    return with_surrogate(tiny(kv_heads, layers))


def with_surrogate(model: ckv.Model) -> ckv.Model:
    """A model with a random surrogate of scores."""
    rng, kv_heads = np.random.default_rng(1), model.config.num_kv_heads
    shapes = {"weights": (model.config.hidden_size, kv_heads), "bias": (kv_heads,)}

    def surrogate() -> dict[str, jax.Array]:
        return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}

    layers = tuple(
        {**layer, "surrogate": surrogate()} if number in model.config.global_layers else layer
        for number, layer in enumerate(model.params["layers"])
    )
    return replace(model, params={**model.params, "layers": layers})


@functools.cache
def with_sinks(kv_heads: int = 2, layers: int = 4) -> ckv.Model:
    """gpt-oss's: every head has a sink logit of its own, every other layer a window, and all have experts."""
    experts = Experts(4, 2, 16, bias=True, clamp=ClampedSwiglu(2.0))
    plain = sliding(layers=layers, window=16, kv_heads=kv_heads)
    config = replace(plain.config, local_rope=None, sink_logits=True, experts=experts)
    params = random_params(config)
    for number, layer in enumerate(params["layers"]):
        layer["attention"]["sink_logits"] = jnp.asarray([-1.0, 0.5, 2.0, number], jnp.float32)
    return with_surrogate(ckv.Model(params=params, config=config, tokenizer=None, mesh=None, name="with sinks"))


def untied(model: ckv.Model) -> ckv.Model:
    """In the first layer equal tokens have equal scores but for rounding, which a mesh or a batch changes: there all
    are equal.
    """
    first, *others = model.params["layers"]
    if "surrogate" not in first:  # one with a window, behind which equal tokens differ
        return model
    first = first | {"surrogate": jax.tree.map(jnp.zeros_like, first["surrogate"])}
    return replace(model, params=model.params | {"layers": (first, *others)})


def calmed(model: ckv.Model, method: Any) -> ckv.Model:
    """For DropKV queries that look around: it divides by 1 - p, which is rounding where a random model sees one row."""
    if not isinstance(method, ckv.DropKV):
        return model

    def calm(name, x):
        return 0.3 * x if name in ("q", "q_bias") else x

    layers = tuple(
        {**layer, "attention": {name: calm(name, x) for name, x in layer["attention"].items()}}
        for layer in model.params["layers"]
    )
    return replace(model, params={**model.params, "layers": layers})


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()


def padded(*prompts: list[int], width: int | None = None, fill: int = VOCAB - 1) -> tuple[np.ndarray, np.ndarray]:
    """Prompts in one array, by default as wide as the longest, this id behind them; and their lengths."""
    tokens = np.full((len(prompts), width or max(map(len, prompts))), fill, np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    return tokens, np.asarray([len(ids) for ids in prompts], np.int32)


def prefill(
    method: Any, *prompts: list[int], model: Any = None, width: int | None = None, fill: int = VOCAB - 1, **options: Any
) -> Any:
    """The cache and the logits of prompts, by default of the tiny model."""
    model = model or tiny()
    return ckv.prefill(model.params, model.config, method, *padded(*prompts, width=width, fill=fill), **options)


# Programs that tests share.
STEP = jax.jit(ckv.decode_step, static_argnums=(1, 2))
EXTEND = jax.jit(extend_step, static_argnums=(1, 2))


def extend(method: Any, cache: Any, tokens: Any, counts: Any = None) -> Any:
    """The tiny model's cache and logits behind these tokens, all of them by default."""
    tokens = jnp.asarray(tokens)
    counts = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32) if counts is None else jnp.asarray(counts)
    return EXTEND(tiny().params, tiny().config, method, cache, tokens, counts)
