"""A decoder's products of few tokens on a GPU, where kernels join them to what stands before and behind: decoding.

`served` says where; elsewhere, and where something else stands in between, `transformer` leaves it to XLA.
"""

import math
from typing import Any

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels import token_products as kernel
from clusterkv_jax.kernels.expert_products import expert_products
from clusterkv_jax.kernels.token_products import After, token_products
from clusterkv_jax.kernels.turned_heads import turned_heads
from clusterkv_jax.models.config import Experts, ModelConfig
from clusterkv_jax.models.rope import cosines_and_sines

Params = dict[str, Any]


def served(config: ModelConfig, hidden: Float[Array, "B T M"], weights: Array) -> bool:
    """Whether kernels multiply these tokens, after a norm that they know."""
    return config.norm == "rms" and config.norm_place != "after" and kernel.serves(hidden, weights)


def added_at_once(config: ModelConfig, hidden: Float[Array, "B T M"], weights: Params, name: str) -> bool:
    """Whether the last product of a block is added to the hidden states by the kernel that makes it."""
    plain = config.norm_place == "before" and config.residual_scale == 1 and f"{name}_bias" not in weights
    return plain and kernel.serves(hidden, weights[name])


def heads(
    layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"], positions: Int[Array, "B T"]
) -> tuple[list[Float[Array, "B T _ D"]], bool]:
    """Queries, keys and values, and whether heads are normalised and turned already."""
    weights = [layer["attention"][name] for name in ("q", "k", "v")]
    angles = _angles(config, positions)
    norm, after = _norm(layer["attention_norm"], config), After(head_dim=config.head_dim)
    options = {"across": False, "norm": norm, "after": after, "angles": None if config.qk_norm else angles}
    products = token_products(_rows(hidden), [w.reshape(-1, w.shape[2]) for w in weights], **options)
    q, k, v = (x.reshape(len(x), *w.shape[:2]) for x, w in zip(products, weights, strict=True))
    if angles is not None and config.qk_norm:
        scales = layer["attention"]["q_norm"], layer["attention"]["k_norm"]
        q, k = turned_heads(q, k, *scales, *angles, eps=config.norm_eps, offset=config.norm_offset)
    return [x.reshape(*hidden.shape[:2], *x.shape[1:]) for x in (q, k, v)], angles is not None


def gated(layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"]) -> Float[Array, "B T F"]:
    """What enters the last product of a gated MLP without biases."""
    weights, norm = [layer["mlp"][name] for name in ("gate", "up")], _norm(layer["mlp_norm"], config)
    inner = token_products(_rows(hidden), weights, across=True, norm=norm, after=After(gate=config.activation))
    return inner.reshape(*hidden.shape[:2], -1)


def added(
    hidden: Float[Array, "B T M"], inner: Float[Array, "B T ..."], weights: Float[Array, "... M"]
) -> Float[Array, "B T M"]:
    """The hidden states, and the last product of a block."""
    flat = weights.reshape(-1, weights.shape[-1])
    out = token_products(inner.reshape(-1, len(flat)), [flat], across=True, residual=_rows(hidden))
    return out.reshape(hidden.shape)


def mixture(
    layer: Params, config: ModelConfig, experts: Experts, hidden: Float[Array, "B T M"]
) -> Float[Array, "B T M"]:
    """The outputs of each token's experts, gated by silu, without biases."""
    weights, norm, rows = layer["experts"], _norm(layer["mlp_norm"], config), _rows(hidden)
    logits = token_products(rows, [weights["router"]], across=False, norm=norm, after=After(wide=True))
    products = weights["gate"], weights["up"], weights["down"]
    route = {"per_token": experts.per_token, "normalize": experts.normalize}
    return expert_products(rows, logits, *products, norm=norm, **route).reshape(hidden.shape)


def logits(
    params: Params, config: ModelConfig, table: Float[Array, "V M"], hidden: Float[Array, "B T M"]
) -> Float[Array, "B T V"]:
    """Vocabulary logits before scale and cap, float32."""
    norm = _norm(params["final_norm"], config)
    out = token_products(_rows(hidden), [table], across=False, norm=norm, after=After(wide=True))
    return out.reshape(*hidden.shape[:2], -1)


def _norm(weights: Params, config: ModelConfig) -> tuple[Array, float, float]:
    return weights["scale"], config.norm_eps, config.norm_offset


def _rows(x: Float[Array, "B T _"]) -> Float[Array, "n _"]:
    return x.reshape(math.prod(x.shape[:2]), x.shape[2])


def _angles(
    config: ModelConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "n half"], Float[Array, "n half"]] | None:
    """Cosines and sines of the tokens, where heads turn whole and nothing but their norms comes before."""
    rope = config.rope
    if rope is None or rope.interleaved or rope.dim != config.head_dim or config.qkv_bias or config.qk_norm_whole:
        return None
    cos, sin = cosines_and_sines(positions, rope)
    return _rows(cos[:, :, 0]), _rows(sin[:, :, 0])
