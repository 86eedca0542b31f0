"""One decoder for all families: pure functions over a pytree of parameters, in the order in which a token meets them.

The pytree is made of plain dicts: `embed`, `positions` (learned positions only), `layers` (a tuple, one dict a layer),
`final_norm` and `lm_head` (untied only). Attention weights keep their heads as a dimension, so heads can be sharded.
A model computes in the type of its parameters; norms, RoPE, softmax and logits are float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.blocks import moe as mixtures
from clusterkv_jax.blocks.causal_attention import causal_attention
from clusterkv_jax.blocks.rope import cosines_and_sines, turn
from clusterkv_jax.models import few_tokens
from clusterkv_jax.models.config import Experts, ModelConfig
from clusterkv_jax.runtime.sharding import take_rows

Params = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "mish": jax.nn.mish,
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape, logical axes (one name or None per dimension) and initializer `(key, shape, dtype) -> array`."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable[..., Array]


# --- parameters: the one place that knows their shapes and logical axes ---


def abstract(config: ModelConfig) -> Params:
    """The parameters' pytree with a TensorSpec in every place; initialisation, sharding and loading derive from it.

    Logical axes: vocab, model, heads, kv_heads, head_dim, mlp, experts, positions.
    """
    vocab = TensorSpec(
        (config.vocab_size, config.hidden_size), ("vocab", "model"), initializers.normal(config.hidden_size**-0.5)
    )
    specs: Params = {
        "embed": vocab,
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
    experts = config.experts_of(number)
    return {
        "attention": _abstract_attention(config),
        **{f"{block}_{norm}": _abstract_norm(config) for block in ("attention", "mlp") for norm in norms},
        **({"mlp": _abstract_mlp(config)} if experts is None else {"experts": _abstract_experts(config, experts)}),
    }


def _abstract_norm(config: ModelConfig) -> Params:
    specs = {"scale": TensorSpec((config.hidden_size,), ("model",), _scale_init(config))}
    if config.norm == "layer":
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
    if config.qk_norm:
        for name in ("q", "k"):
            of = slice(0 if config.qk_norm_whole else 1, 2)
            specs[f"{name}_norm"] = TensorSpec(specs[name].shape[of], specs[name].axes[of], _scale_init(config))
    return specs


def _abstract_mlp(config: ModelConfig) -> Params:
    m, f = config.hidden_size, config.intermediate_size
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
    return {name: TensorSpec(shape, mixtures.AXES[name], inits.get(name, into)) for name, shape in shapes.items()}


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


# --- the decoder ---


def _or_of_decoder(function: Function) -> Function:
    """The function, or the method of its name where the configuration has a decoder that was written elsewhere."""

    @wraps(function)
    def call(weights: Params, config: ModelConfig, *args: Any, **options: Any) -> Any:
        if config.decoder is None:
            return function(weights, config, *args, **options)
        return getattr(config.decoder, function.__name__)(weights, *args, **options)

    result: Any = call
    return result


@_or_of_decoder
@jax.named_scope("embedding")
def embed(
    params: Params, config: ModelConfig, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Float[Array, "B T M"]:
    """Token embeddings, plus the learned positions of a model that has them. Ids must be in 0..V-1."""
    hidden = take_rows(params["embed"], tokens)
    if config.embedding_scale != 1:
        hidden = hidden * config.embedding_scale
    if config.rope is None:
        hidden = hidden + params["positions"][positions + config.learned_position_offset]
    return hidden


@_or_of_decoder
def attention_input(layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """What enters a layer's attention: the hidden states after the layer's input norm, if it has one."""
    return _entering(layer, "attention", config, hidden)


def stored_attention_input(layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """`attention_input`, of few tokens as it lies in memory: whoever reads it besides has none to make."""
    if config.decoder is not None or not few_tokens.few(hidden):
        return attention_input(layer, config, hidden)
    return jax.lax.optimization_barrier(attention_input(layer, config, hidden))


@_or_of_decoder
def qkv(
    layer: Params,
    config: ModelConfig,
    hidden: Float[Array, "B T M"],
    positions: Int[Array, "B T"],
    projected: Float[Array, "B T K D"] | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
    """A layer's queries, keys and values: norm, projections, biases, QK norm, RoPE.

    Keys come out rotated: that is what a cache stores. Queries are such that attention divides their products with keys
    by sqrt(D), whatever the model's scale. `projected` is the projection of keys without their biases, where the caller
    has made it: of more tokens than kernels take.
    """
    return _heads(layer, config, hidden, positions, projected, None)[:3]


def qkv_and_scores(
    layer: Params, config: ModelConfig, hidden: Float[Array, "1 1 M"], positions: Int[Array, "1 1"]
) -> tuple[Float[Array, "1 1 H D"], Float[Array, "1 1 K D"], Float[Array, "1 1 K D"], Float[Array, "1 1 K"]]:
    """`qkv` of a token that a kernel `scores`, and what the layer's surrogate says of it, float32."""
    q, k, v, scores = _heads(layer, config, hidden, positions, None, layer["surrogate"])
    assert scores is not None
    return q, k, v, scores


@jax.named_scope("attention/project")
def _heads(
    layer: Params,
    config: ModelConfig,
    hidden: Float[Array, "B T M"],
    positions: Int[Array, "B T"],
    projected: Float[Array, "B T K D"] | None,
    surrogate: Params | None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"], Float[Array, "B T K"] | None]:
    weights, scores = layer["attention"], None
    by_kernel = few_tokens.multiplies(config, hidden)
    assert projected is None or not by_kernel
    if by_kernel:
        norm = layer["attention_norm"] if few_tokens.normalises(config, hidden) else None
        x = attention_input(layer, config, hidden) if norm is None else hidden
        q, k, v, scores = few_tokens.heads(weights, config, x, positions, norm, surrogate)
    else:
        x = attention_input(layer, config, hidden)
        product = lambda name: _einsum("btm,hdm->bthd", x, weights[name])  # noqa: E731
        q, k, v = product("q"), product("k") if projected is None else projected, product("v")
        q, k, v = (_with_bias(y, weights, name) for name, y in zip("qkv", (q, k, v), strict=True))
    if few_tokens.turns(config, q):
        q, k = few_tokens.turned(weights, config, q, k, positions)
    elif not (by_kernel and few_tokens.turns_along(config)):
        if config.qk_norm:
            q, k = _rms(weights["q_norm"], config, q), _rms(weights["k_norm"], config, k)
        if config.rope is not None:
            angles = cosines_and_sines(positions, config.rope)
            q, k = turn(q, *angles, config.rope), turn(k, *angles, config.rope)
    if config.attention_scale is not None:
        q = q * (config.attention_scale * math.sqrt(config.head_dim))
    return q, k, v, scores


def sink_logits(layer: Params, config: ModelConfig) -> Float[Array, " H"] | None:
    """The logit that each head's softmax has beside those of the rows, None for a model without."""
    return layer["attention"]["sink_logits"] if config.sink_logits else None


@_or_of_decoder
def finish(
    layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"], attended: Float[Array, "B T H D"]
) -> Float[Array, "B T M"]:
    """The rest of a layer after attention: output projection, residual, and the MLP block with its residual."""
    weights = layer["attention"]
    with jax.named_scope("attention/output"):
        if few_tokens.adds(config, hidden):
            hidden = few_tokens.projected(attended, weights["o"], "heads", hidden)
        else:
            product = _down(config, "bthd,hdm->btm", attended, weights["o"], "heads", hidden)
            hidden = hidden + _leaving(layer, "attention", config, _with_bias(product, weights, "o"))
    with jax.named_scope("mlp"):
        experts, logits = layer.get("experts"), None
        if few_tokens.normalises(config, hidden):
            router = _router_of_kernel(experts, config, hidden)
            x, logits = few_tokens.normed(layer["mlp_norm"], config, hidden, router)
        else:
            x = _entering(layer, "mlp", config, hidden)
        if config.experts is not None and experts is not None:
            return hidden + _leaving(layer, "mlp", config, _mixture(experts, config, config.experts, x, logits))
        inner = _inner(layer["mlp"], config, x)
        if few_tokens.adds(config, hidden):
            return few_tokens.projected(inner, layer["mlp"]["down"], "mlp", hidden)
        product = _down(config, "btf,fm->btm", inner, layer["mlp"]["down"], "mlp", hidden)
        return hidden + _leaving(layer, "mlp", config, _with_bias(product, layer["mlp"], "down"))


@_or_of_decoder
@jax.named_scope("head")
def unembed(params: Params, config: ModelConfig, hidden: Float[Array, "... M"]) -> Float[Array, "... V"]:
    """Final norm and vocabulary logits, float32 whatever the type of the parameters."""
    table = params["embed"] if config.tie_embeddings else params["lm_head"]
    x = _norm(params["final_norm"], config, hidden)
    logits = _einsum("...m,vm->...v", x, table, preferred_element_type=jnp.float32)
    logits = logits if config.logit_scale == 1 else logits * config.logit_scale
    return logits if config.logit_cap is None else config.logit_cap * jnp.tanh(logits / config.logit_cap)


def forward(
    params: Params, config: ModelConfig, tokens: Int[Array, "B N"], *, remat: bool = False
) -> Float[Array, "B N V"]:
    """Logits of every position under causal attention, in sliding layers within their window: the reference without any
    cache, and training.

    `remat` recomputes each layer in the backward pass instead of keeping its activations.
    """
    return unembed(params, config, forward_hidden(params, config, tokens, remat=remat))


def forward_hidden(
    params: Params, config: ModelConfig, tokens: Int[Array, "B N"], *, remat: bool = False
) -> Float[Array, "B N M"]:
    """`forward` before the logits, for losses that take the vocabulary in pieces."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    step = jax.checkpoint(_layer_over_prompt, static_argnums=1) if remat else _layer_over_prompt
    hidden = embed(params, config, tokens, positions)
    for number, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{number}"):
            hidden = step(layer, config.of_layer(number), hidden, positions)
    return hidden


@partial(jax.jit, static_argnames=("config",))
def _layer_over_prompt(
    layer: Params, config: ModelConfig, hidden: Float[Array, "B N M"], positions: Int[Array, "B N"]
) -> Float[Array, "B N M"]:
    """One layer without a cache. Equal layers are traced once."""
    q, k, v = qkv(layer, config, hidden, positions)
    sinks = sink_logits(layer, config)
    attended = causal_attention(q, k, v, window=config.window, soft_cap=config.soft_cap, sink_logits=sinks)
    return finish(layer, config, hidden, attended)


# --- parts ---


def _einsum(formula: str, x: Array, weights: Array, **options: Any) -> Array:
    # Accelerators multiply float32 in fewer bits unless told otherwise; whoever loads float32 wants float32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(formula, x, weights, precision=precision, **options)


def _down(
    config: ModelConfig, formula: str, x: Array, weights: Array, split: str, hidden: Float[Array, "B T M"]
) -> Float[Array, "B T M"]:
    """Heads or inner states back in the width of the hidden states."""
    if few_tokens.multiplies(config, hidden):
        return few_tokens.projected(x, weights, split)
    return _einsum(formula, x, weights)


def _with_bias(x: Array, weights: Params, name: str) -> Array:
    bias = weights.get(f"{name}_bias")
    return x if bias is None else x + jnp.expand_dims(bias, tuple(range(x.ndim - bias.ndim)))


def _router_of_kernel(experts: Params | None, config: ModelConfig, hidden: Float[Array, "B T M"]) -> Array | None:
    """What makes the logits of a token's experts along with its norm, where a kernel takes it through them."""
    if config.experts is None or experts is None or not few_tokens.mixes(config, config.experts, hidden, experts):
        return None
    return experts["router"]


def _mixture(
    weights: Params, config: ModelConfig, experts: Experts, x: Float[Array, "B T M"], logits: Array | None
) -> Array:
    """What a layer's experts give; the router's logits are here where a kernel made them."""
    if not few_tokens.mixes(config, experts, x, weights):
        return mixtures.mixture(weights, experts, ACTIVATIONS[config.activation], x)
    if logits is None:
        logits = _einsum("btm,em->bte", x, weights["router"], preferred_element_type=jnp.float32)
    return few_tokens.mixture(weights, experts, x, logits)


def _inner(weights: Params, config: ModelConfig, x: Float[Array, "B T M"]) -> Float[Array, "B T F"]:
    """The inner states of an MLP."""
    if few_tokens.multiplies(config, x) and few_tokens.gates(config):
        return few_tokens.gated(weights, config, x)
    activation = ACTIVATIONS[config.activation]
    up = _with_bias(_einsum("btm,mf->btf", x, weights["up"]), weights, "up")
    if not config.gated_mlp:
        return activation(up)
    return activation(_with_bias(_einsum("btm,mf->btf", x, weights["gate"]), weights, "gate")) * up


def _entering(layer: Params, block: str, config: ModelConfig, hidden: Array) -> Array:
    """What a layer's attention or MLP is given."""
    return hidden if config.norm_place == "after" else _norm(layer[f"{block}_norm"], config, hidden)


def _leaving(layer: Params, block: str, config: ModelConfig, out: Array) -> Array:
    """What a layer's attention or MLP adds to the hidden states."""
    if config.norm_place != "before":
        out = _norm(layer[f"{block}_out_norm"], config, out)
    return out if config.residual_scale == 1 else out * config.residual_scale


def _norm(weights: Params, config: ModelConfig, x: Array) -> Array:
    return _rms(weights["scale"], config, x) if config.norm == "rms" else _layer(weights, config.norm_eps, x)


def _rms(scale: Array, config: ModelConfig, x: Array) -> Array:
    """Over as many dimensions as the scale has."""
    wide = x.astype(jnp.float32)
    axes = tuple(range(-scale.ndim, 0))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=axes, keepdims=True) + config.norm_eps)
    # An offset is added in float32: bfloat16 could not hold 1 + a small scale.
    return (wide * (config.norm_offset + _along(scale, x))).astype(x.dtype)


def _layer(weights: Params, eps: float, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (wide * _along(weights["scale"], x) + _along(weights["bias"], x)).astype(x.dtype)


def _along(scale: Array, x: Array) -> Array:
    """A scale along the last dimensions of x, in float32."""
    return scale.astype(jnp.float32).reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
