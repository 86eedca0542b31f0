"""Queries and keys after their own norms, turned by their positions."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.config import ModelConfig
from clusterkv_jax.blocks.gpu import few_on_one_device
from clusterkv_jax.blocks.norm import rms_norm
from clusterkv_jax.blocks.rope import cosines_and_sines, turn
from clusterkv_jax.kernels.turned_heads import turned_heads
from clusterkv_jax.runtime.dispatch import LeftToXLA, dispatch

QueriesAndKeys = tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]


def qk_norm_rope(
    weights: dict[str, Any],
    config: ModelConfig,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
) -> QueriesAndKeys:
    """Queries and keys, by head or as a whole normalised where the model does, and turned where it does."""
    backends = {"gpu": _few_tokens, "xla": _reference}
    return dispatch("qk_norm_rope", backends, None, weights, config, q, k, positions)


def _reference(weights: dict[str, Any], config: ModelConfig, q: Array, k: Array, positions: Array) -> QueriesAndKeys:
    if config.qk_norm:
        ones = jnp.ones(config.head_dim)
        q, k = (rms_norm(weights.get(name, ones), config, x) for name, x in (("q_norm", q), ("k_norm", k)))
    if config.rope is not None:
        angles = cosines_and_sines(positions, config.rope)
        q, k = turn(q, *angles, config.rope), turn(k, *angles, config.rope)
    return q, k


def turns_halves(config: ModelConfig) -> bool:
    """Whether whole heads are turned, the first half with the second: what kernels can."""
    return config.rope is not None and config.rope.dim == config.head_dim and not config.rope.interleaved


def _few_tokens(weights: dict[str, Any], config: ModelConfig, q: Array, k: Array, positions: Array) -> QueriesAndKeys:
    """On a GPU: one launch, where XLA has two for the queries and two for the keys."""
    by_head = config.qk_norm and config.qk_norm_scales and not config.qk_norm_whole and config.norm == "rms"
    rope = config.rope
    if rope is None or not by_head or config.qkv_bias or not turns_halves(config) or not few_on_one_device(q):
        raise LeftToXLA(f"Whole heads of few tokens, each by its own norm, have a kernel, got {q.shape}.")
    cos, sin = (x.reshape(-1, x.shape[-1]) for x in cosines_and_sines(positions, rope))
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k)]
    operands = rows[0], rows[1], weights["q_norm"], weights["k_norm"], cos, sin
    turned_q, turned_k = turned_heads(*operands, eps=config.norm_eps, offset=config.norm_offset)
    return turned_q.reshape(q.shape), turned_k.reshape(k.shape)
