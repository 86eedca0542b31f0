"""The parameters of a decoder: the one place that knows their shapes, logical axes and initial numbers.

The pytree is made of plain dicts: `embed`, `positions` (learned positions only), `layers` (a tuple, one dict a layer),
`final_norm` and `lm_head` (untied only). Attention weights keep their heads as a dimension, so heads can be sharded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jaxtyping import Array, Key

from clusterkv_jax.blocks.experts import AXES
from clusterkv_jax.models.config import Experts, ModelConfig

Params = dict[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, logical axes (one name or None per dimension) and initializer `(key, shape, dtype) -> array`; whether a
    table of embeddings is the head too.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable[..., Array]
    is_head: bool = False


# Dimensions of a product's weights that are inputs: so many first ones, or the last one.
LINEAR_INPUTS = {"o": 2, "gate": 1, "up": 1, "down": 1}
LAST_IS_INPUT = ("q", "k", "v", "lm_head")


def input_axes(name: str, spec: TensorSpec) -> tuple[int, ...] | None:
    """Which dimensions of a parameter are the inputs of a product, by its own name; None for what is no product's.

    Routers are none: they choose, by few numbers. Nor is a table of embeddings that is not the head.
    """
    first = int(spec.axes[:1] == ("experts",))
    if name in LINEAR_INPUTS:
        return tuple(range(first, first + LINEAR_INPUTS[name]))
    return (len(spec.shape) - 1,) if name in LAST_IS_INPUT or spec.is_head else None


def abstract(config: ModelConfig) -> Params:
    """The parameters' pytree with a TensorSpec in every place; initialisation, sharding and loading derive from it.

    Logical axes: vocab, model, heads, kv_heads, head_dim, mlp, experts, positions.
    """
    vocab = TensorSpec(
        (config.vocab_size, config.hidden_size), ("vocab", "model"), initializers.normal(config.hidden_size**-0.5)
    )
    specs: Params = {
        "embed": replace(vocab, is_head=config.tie_embeddings),
        "layers": tuple(_abstract_layer(config, number) for number in range(config.num_layers)),
        "final_norm": _abstract_norm(config),
    }
    if config.rope is None:
        rows = config.max_positions + config.learned_position_offset
        specs["positions"] = TensorSpec((rows, config.hidden_size), ("positions", "model"), initializers.normal(0.02))
    if not config.tie_embeddings:
        specs["lm_head"] = vocab
    return specs


def _abstract_layer(config: ModelConfig, number: int) -> Params:
    norms = {"before": ["norm"], "after": ["out_norm"], "both": ["norm", "out_norm"]}[config.norm_place]
    blocks = ("attention",) if config.parallel_blocks else ("attention", "mlp")
    experts = config.experts_of(number)
    if experts is None:
        mlp = {"mlp": _abstract_mlp(config, config.intermediate_size)}
    else:
        mlp = {"experts": _abstract_experts(config, experts), **_abstract_shared(config, experts)}
    return {
        "attention": _abstract_attention(config),
        **{f"{block}_{norm}": _abstract_norm(config) for block in blocks for norm in norms},
        **mlp,
    }


def _abstract_norm(config: ModelConfig) -> Params:
    specs = {"scale": TensorSpec((config.hidden_size,), ("model",), _scale_init(config))}
    if config.norm == "layer" and config.norm_bias:
        specs["bias"] = TensorSpec((config.hidden_size,), ("model",), initializers.zeros)
    return specs


def _scale_init(config: ModelConfig) -> Callable[..., Array]:
    """Norms start as those of scale 1."""
    return initializers.constant(1 - config.norm_offset) if config.norm_offset else initializers.ones


def _abstract_attention(config: ModelConfig) -> Params:
    m, h, k, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    into, out = initializers.normal(m**-0.5), initializers.normal(_residual_scale(config, h * d))
    specs = {
        # Heads first: with few heads a device, a TPU would pad [M, H, D] to its tile and keep a second copy of it.
        "q": TensorSpec((h, d, m), ("heads", "head_dim", "model"), into),
        "k": TensorSpec((k, d, m), ("kv_heads", "head_dim", "model"), into),
        "v": TensorSpec((k, d, m), ("kv_heads", "head_dim", "model"), into),
        "o": TensorSpec((h, d, m), ("heads", "head_dim", "model"), out),
    }
    if config.qkv_bias:
        specs["q_bias"] = TensorSpec((h, d), ("heads", "head_dim"), initializers.zeros)
        specs["k_bias"] = TensorSpec((k, d), ("kv_heads", "head_dim"), initializers.zeros)
        specs["v_bias"] = TensorSpec((k, d), ("kv_heads", "head_dim"), initializers.zeros)
    if config.output_bias:
        specs["o_bias"] = TensorSpec((m,), ("model",), initializers.zeros)
    if config.sink_logits:
        specs["sink_logits"] = TensorSpec((h,), ("heads",), initializers.zeros)
    if config.qk_norm and config.qk_norm_scales:
        for name in ("q", "k"):
            of = slice(0 if config.qk_norm_whole else 1, 2)
            specs[f"{name}_norm"] = TensorSpec(specs[name].shape[of], specs[name].axes[of], _scale_init(config))
    return specs


def _abstract_mlp(config: ModelConfig, f: int) -> Params:
    m = config.hidden_size
    inputs = ("gate", "up") if config.gated_mlp else ("up",)
    specs = {name: TensorSpec((m, f), ("model", "mlp"), initializers.normal(m**-0.5)) for name in inputs}
    specs["down"] = TensorSpec((f, m), ("mlp", "model"), initializers.normal(_residual_scale(config, f)))
    if config.mlp_bias:
        specs |= {f"{name}_bias": TensorSpec((f,), ("mlp",), initializers.zeros) for name in inputs}
        specs["down_bias"] = TensorSpec((m,), ("model",), initializers.zeros)
    return specs


def _abstract_experts(config: ModelConfig, experts: Experts) -> Params:
    e, m, f = experts.count, config.hidden_size, experts.intermediate_size
    into, out = initializers.normal(m**-0.5), initializers.normal(_residual_scale(config, f))
    shapes = {"router": (e, m), "gate": (e, m, f), "up": (e, m, f), "down": (e, f, m)}
    inits = {"down": out}
    if experts.bias:
        biases = {"router_bias": (e,), "gate_bias": (e, f), "up_bias": (e, f), "down_bias": (e, m)}
        shapes, inits = shapes | biases, inits | dict.fromkeys(biases, initializers.zeros)
    if experts.choice_bias:
        shapes, inits = shapes | {"choice_bias": (e,)}, inits | {"choice_bias": initializers.zeros}
    return {name: TensorSpec(shape, AXES[name], inits.get(name, into)) for name, shape in shapes.items()}


def _abstract_shared(config: ModelConfig, experts: Experts) -> Params:
    """The expert that every token goes through, where there is one; `share` makes its share of what enters."""
    if experts.shared_size is None:
        return {}
    specs = _abstract_mlp(config, experts.shared_size)
    if experts.shared_gate:
        m = config.hidden_size
        specs["share"] = TensorSpec((1, m), (None, "model"), initializers.normal(m**-0.5))
    return {"shared_mlp": specs}


def _residual_scale(config: ModelConfig, fan_in: int) -> float:
    """GPT-2's rule: the 2 L branches that add into the residual stream together keep its variance."""
    return 1 / math.sqrt(fan_in * 2 * config.num_layers)


def init(key: Key[Array, ""], config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """Random parameters as `abstract(config)` declares them.

    Cheapest outside jit: layers share the compiled generators of their shapes.
    """
    specs, structure = jax.tree.flatten(abstract(config))
    keys = jax.random.split(key, len(specs))
    return jax.tree.unflatten(structure, [spec.init(k, spec.shape, dtype) for k, spec in zip(keys, specs, strict=True)])
