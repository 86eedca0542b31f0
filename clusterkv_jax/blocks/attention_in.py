"""From a layer's hidden states to the queries, keys and values of its attention, and what a surrogate says of them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.config import ModelConfig, QueryScaling
from clusterkv_jax.blocks.gpu import TOKENS, check_few, check_numbers, is_one_after_rms, rows_of
from clusterkv_jax.blocks.linear import linear, linears
from clusterkv_jax.blocks.norm import pre_norm, split_pre_norm
from clusterkv_jax.blocks.qk_norm_rope import qk_norm_rope, turns_halves
from clusterkv_jax.blocks.rope import cosines_and_sines
from clusterkv_jax.blocks.surrogate import Surrogate, keys_and_scores, token_scores
from clusterkv_jax.kernels.head_products import head_products
from clusterkv_jax.runtime.dispatch import LeftToXLA, dispatch
from clusterkv_jax.runtime.sharding import apart, on_one_device

LayerWeights = dict[str, Any]
Projected = tuple[
    Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"], Float[Array, "B T K"] | None
]
MANY = 8192  # tokens, by estimate: of fewer, a product for their scores takes no longer than weights put side by side
WHOLE_HEAD = 32  # numbers: a head of no multiple of it fills no block of the kernel


@jax.named_scope("attention/project")
def attention_in(
    layer: LayerWeights,
    config: ModelConfig,
    hidden: Float[Array, "B T M"],
    positions: Int[Array, "B T"],
    surrogate: Surrogate | None = None,
) -> Projected:
    """Queries, keys and values: norm, projections, biases, QK norm, RoPE; and a surrogate's scores, float32, or None.

    Keys come out rotated: that is what a cache stores. Queries are such that attention divides their products with keys
    by sqrt(D), whatever the model's scale.
    """
    backends = {"gpu": _on_gpu, "xla": _reference}
    q, k, v, scores = dispatch("attention_in", backends, None, layer, config, hidden, positions, surrogate)
    if config.attention_scale is not None:
        q = q * (config.attention_scale * math.sqrt(config.head_dim))
    if config.query_scaling is not None:
        q = q * _lengths(config.query_scaling, positions).astype(q.dtype)
    return q, k, v, scores


def _lengths(scaling: QueryScaling, positions: Int[Array, "B T"]) -> Float[Array, "B T 1 1"]:
    """How much longer queries are where they stand, float32."""
    times = (positions + scaling.first) // scaling.length
    return (1 + scaling.strength * jnp.log1p(times.astype(jnp.float32)))[..., None, None]


def _reference(
    layer: LayerWeights, config: ModelConfig, hidden: Array, positions: Array, surrogate: Surrogate | None
) -> Projected:
    weights = layer["attention"]
    own, biases = [weights[name] for name in "qkv"], [weights.get(f"{name}_bias") for name in "qkv"]
    x, times = split_pre_norm(layer, "attention", config, hidden, *own)
    q, k, v = linears(x, own, (2,), biases, times)
    q, k = qk_norm_rope(weights, config, q, k, positions)
    if surrogate is None:
        return q, k, v, None
    x = x if times is None else pre_norm(layer, "attention", config, hidden)
    return q, k, v, token_scores(surrogate, x)


def _on_gpu(
    layer: LayerWeights, config: ModelConfig, hidden: Array, positions: Array, surrogate: Surrogate | None
) -> Projected:
    check_numbers(*(layer["attention"][name] for name in "qkv"))
    if surrogate is not None and hidden.shape[0] * hidden.shape[1] >= MANY:
        return _many_with_scores(layer, config, hidden, positions, surrogate)
    return _few_tokens(layer, config, hidden, positions, surrogate)


def _many_with_scores(
    layer: LayerWeights, config: ModelConfig, hidden: Array, positions: Array, surrogate: Surrogate
) -> Projected:
    """One product makes the keys and the scores of many tokens.

    A product for the scores alone reads all hidden states. One for both writes and reads its keys in float32, which
    takes as many bytes if the keys are half as wide as the states.
    """
    narrow = 2 * config.num_kv_heads * config.head_dim <= config.hidden_size
    aligned = config.num_kv_heads % 4 == 0  # rows of whole 16 bytes
    plain = "inner_weights" not in surrogate and hidden.dtype == jnp.bfloat16 and on_one_device()
    if not (narrow and aligned and plain):
        raise LeftToXLA(f"Keys and scores by one product are of narrow keys in bfloat16, got {hidden.dtype}.")
    weights, x = layer["attention"], pre_norm(layer, "attention", config, hidden)
    q, v = (linear(x, weights[name], (2,), weights.get(f"{name}_bias")) for name in "qv")
    k, scores = keys_and_scores(weights["k"], surrogate, x)
    k = k if (bias := weights.get("k_bias")) is None else k + bias[None, None]
    q, k = qk_norm_rope(weights, config, q, k, positions)
    return q, k, v, scores


def _few_tokens(
    layer: LayerWeights, config: ModelConfig, hidden: Array, positions: Array, surrogate: Surrogate | None
) -> Projected:
    """One launch for the heads of few tokens; of one token its norm too, and what a linear surrogate says of it."""
    check_few(hidden, config.hidden_size, config.num_heads * config.head_dim)
    if config.head_dim % WHOLE_HEAD:
        raise LeftToXLA(f"Heads in multiples of {WHOLE_HEAD} have a kernel, got {config.head_dim}.")
    alone, turns = is_one_after_rms(config, hidden), turns_halves(config) and not config.qk_norm
    along = surrogate if alone and on_one_device() and "inner_weights" not in (surrogate or {}) else None
    norm = layer["attention_norm"] if alone else None
    x = hidden if alone else pre_norm(layer, "attention", config, hidden)
    q, k, v, scores = _heads(layer["attention"], config, x, positions if turns else None, norm, along)
    if not turns:
        q, k = qk_norm_rope(layer["attention"], config, q, k, positions)
    if surrogate is not None and scores is None:
        # As it lies in memory: the projections have a norm of their own.
        x = jax.lax.optimization_barrier(pre_norm(layer, "attention", config, hidden))
        scores = token_scores(surrogate, x)
    return q, k, v, scores


def _heads(
    weights: dict[str, Array],
    config: ModelConfig,
    x: Float[Array, "B T M"],
    positions: Int[Array, "B T"] | None,
    norm: dict[str, Array] | None,
    surrogate: Surrogate | None,
) -> Projected:
    """Heads with their biases, turned where there are positions, after a norm and with scores where there are such."""
    cos, sin = (None, None) if positions is None or config.rope is None else cosines_and_sines(positions, config.rope)
    options: Any = {"eps": config.norm_eps, "offset": config.norm_offset}

    def run(x: Array, *operands: Any) -> tuple[Array, ...]:
        q, k, v, *biases, cos, sin, scale, columns, bias = operands
        own = None if biases[0] is None else tuple(biases)
        angles = None if cos is None else (rows_of(cos), rows_of(sin))
        scoring = None if columns is None else (columns.T, bias)
        results = head_products(rows_of(x), (q, k, v), own, angles, scale, scoring, **options)
        return tuple(y.reshape(*x.shape[:2], *y.shape[1:]) for y in results if y is not None)

    names = [("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")]
    operands = [(x, TOKENS), *((weights[name], (axis, None, None)) for name, axis in names)]
    operands += [(weights.get(f"{name}_bias"), (axis, None)) for name, axis in names]
    operands += [(angle, ("batch", None, None, None)) for angle in (cos, sin)]
    operands += [(None if norm is None else norm["scale"], (None,))]
    for name, axes in (("weights", (None, None)), ("bias", (None,))):
        operands += [(None if surrogate is None else surrogate[name].astype(jnp.float32), axes)]
    results = [((*x.shape[:2], *weights[name].shape[:2]), ("batch", None, axis, None)) for name, axis in names]
    q, k, v, *scores = apart(run, operands, results)
    return q, k, v, scores[0] if scores else None
