"""Norms: of what enters a block, of what it adds, of heads, and of the last hidden states."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from clusterkv_jax.blocks.config import ModelConfig
from clusterkv_jax.blocks.gpu import few_on_one_device, is_one_after_rms
from clusterkv_jax.kernels.normed_rows import normed_rows
from clusterkv_jax.kernels.weight_codes import is_coded
from clusterkv_jax.runtime.dispatch import LeftToXLA, dispatch
from clusterkv_jax.runtime.sharding import ambient_mesh, on_one_device

Weights = dict[str, Array]


def pre_norm(
    layer: dict[str, Any], block: str, config: ModelConfig, hidden: Float[Array, "B T M"]
) -> Float[Array, "B T M"]:
    """What enters a layer's block, "attention" or "mlp": hidden states after their norm, where it stands before."""
    if config.norm_place == "after":
        return hidden
    backends = {"gpu": _one_token, "xla": norm}
    return dispatch("pre_norm", backends, None, _pre_norm_weights(layer, block, config), config, hidden)


def split_pre_norm(
    layer: dict[str, Any], block: str, config: ModelConfig, hidden: Float[Array, "B T M"], *weights: Any
) -> tuple[Float[Array, "B T M"], Float[Array, "B T 1"] | None]:
    """`pre_norm` for products with these weights alone: what is multiplied, and what products are multiplied with.

    None is nothing.
    """
    backends = {"gpu": _beside_products, "xla": _before_products}
    return dispatch("split_pre_norm", backends, None, layer, block, config, hidden, weights)


def post_norm(layer: dict[str, Any], block: str, config: ModelConfig, out: Array) -> Array:
    """What a layer's block adds to the hidden states: its output after the norm and scale that the model has there."""
    if config.norm_place != "before":
        out = norm(layer[f"{block}_out_norm"], config, out)
    return out if config.residual_scale == 1 else out * config.residual_scale


def norm(weights: Weights, config: ModelConfig, x: Float[Array, "*tokens M"]) -> Float[Array, "*tokens M"]:
    """The model's kind of norm, in float32."""
    return rms_norm(weights["scale"], config, x) if config.norm == "rms" else _layer_norm(weights, config.norm_eps, x)


def rms_norm(scale: Float[Array, "*last"], config: ModelConfig, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x by its root mean square over as many dimensions as the scale has."""
    wide = x.astype(jnp.float32)
    axes = tuple(range(-scale.ndim, 0))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=axes, keepdims=True) + config.norm_eps)
    # An offset is added in float32: bfloat16 could not hold 1 + a small scale.
    return (wide * (config.norm_offset + _broadcast_scale(scale, x))).astype(x.dtype)


def _layer_norm(weights: Weights, eps: float, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    wide = wide * _broadcast_scale(weights["scale"], x)
    return (wide + _broadcast_scale(weights["bias"], x) if "bias" in weights else wide).astype(x.dtype)


def _broadcast_scale(scale: Array, x: Array) -> Array:
    """A scale along the last dimensions of x, in float32."""
    return scale.astype(jnp.float32).reshape((1,) * (x.ndim - scale.ndim) + scale.shape)


def _pre_norm_weights(layer: dict[str, Any], block: str, config: ModelConfig) -> Weights:
    return layer["attention_norm" if config.parallel_blocks else f"{block}_norm"]


def _before_products(
    layer: dict[str, Any], block: str, config: ModelConfig, hidden: Array, weights: Any
) -> tuple[Array, None]:
    return pre_norm(layer, block, config, hidden), None


def _beside_products(
    layer: dict[str, Any], block: str, config: ModelConfig, hidden: Array, weights: Any
) -> tuple[Array, Array]:
    """On a GPU: few tokens are summed up while their products with weights in codes are made.

    Those are float32, and a launch behind them reads them anyway.
    """
    in_front = config.norm == "rms" and config.norm_place != "after"
    if not in_front or not all(map(is_coded, weights)) or not few_on_one_device(hidden):
        raise LeftToXLA(f"Only products of few tokens with weights in codes go before an RMS norm, got {hidden.shape}.")
    wide, scale = hidden.astype(jnp.float32), _pre_norm_weights(layer, block, config)["scale"]
    # As they lie in memory: in one launch with what is multiplied, the sum would be ahead of the products.
    summed = jax.lax.optimization_barrier(hidden).astype(jnp.float32)
    lengths = jax.lax.rsqrt(jnp.mean(summed**2, axis=-1, keepdims=True) + config.norm_eps)
    return (wide * (config.norm_offset + _broadcast_scale(scale, wide))).astype(hidden.dtype), lengths


def _one_token(weights: Weights, config: ModelConfig, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """On a GPU: one launch, where XLA sums the squares in another."""
    if not is_one_after_rms(config, x):
        raise LeftToXLA(f"XLA takes one launch for a {config.norm} norm of {x.shape}.")
    run: Any = partial(normed_rows, eps=config.norm_eps, offset=config.norm_offset)
    if not on_one_device():
        whole = PartitionSpec()
        run = jax.shard_map(run, mesh=ambient_mesh(), in_specs=whole, out_specs=whole, check_vma=False)
    return run(x[0], weights["scale"], None)[0][None]
