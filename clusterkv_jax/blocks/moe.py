"""The experts that a layer has in place of one MLP."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.blocks.config import Experts, ModelConfig
from clusterkv_jax.blocks.experts import mixture
from clusterkv_jax.blocks.gpu import check_numbers, few_on_one_device, is_one_after_rms, rows_of
from clusterkv_jax.blocks.linear import linear
from clusterkv_jax.blocks.mlp import ACTIVATIONS, hidden_units
from clusterkv_jax.blocks.norm import post_norm, pre_norm
from clusterkv_jax.blocks.residual import row_parallel
from clusterkv_jax.kernels.expert_products import expert_products
from clusterkv_jax.kernels.normed_rows import normed_rows
from clusterkv_jax.runtime.dispatch import LeftToXLA, dispatch
from clusterkv_jax.runtime.sharding import on_one_device

DTYPE = jnp.bfloat16  # that the kernel takes


@jax.named_scope("mlp")
def moe(
    layer: dict[str, Any], config: ModelConfig, hidden: Float[Array, "B T M"], entering: Float[Array, "B T M"]
) -> Float[Array, "B T M"]:
    """Hidden states and what each token's experts add to them, by the router's shares, of those that enter them."""
    out = dispatch("moe", {"gpu": _few_tokens, "xla": _reference}, None, layer, config, config.experts, entering)
    if "shared_mlp" in layer:
        out = out + _shared(layer["shared_mlp"], config, pre_norm(layer, "mlp", config, entering))
    return hidden + post_norm(layer, "mlp", config, out)


def _shared(weights: dict[str, Any], config: ModelConfig, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """What the expert adds that every token goes through, by a share where it has one."""
    out = row_parallel(hidden_units(weights, config.activation, x), weights["down"], "mlp")
    return out * jax.nn.sigmoid(linear(x, weights["share"], (1,))) if "share" in weights else out


def _reference(layer: dict[str, Any], config: ModelConfig, experts: Experts, hidden: Array) -> Array:
    x, logits = dispatch("router", {"gpu": _one_routed, "xla": _unrouted}, None, layer, config, hidden)
    return mixture(layer["experts"], experts, ACTIVATIONS[config.activation], x, logits=logits)


def _unrouted(layer: dict[str, Any], config: ModelConfig, hidden: Array) -> tuple[Array, None]:
    return pre_norm(layer, "mlp", config, hidden), None


def _one_routed(layer: dict[str, Any], config: ModelConfig, hidden: Array) -> tuple[Array, Array]:
    """On a GPU: a launch for the norm of one token and the router's logits, float32."""
    router = layer["experts"]["router"]
    if not is_one_after_rms(config, hidden) or not on_one_device() or config.parallel_blocks:
        raise LeftToXLA(f"The logits of one token behind an RMS norm of its own have a kernel, got {hidden.shape}.")
    if router.dtype != hidden.dtype:
        raise LeftToXLA(f"Logits of weights as wide as states have a kernel, got {router.dtype}.")
    norm: Any = {"eps": config.norm_eps, "offset": config.norm_offset}
    x, logits = normed_rows(rows_of(hidden), layer["mlp_norm"]["scale"], router, **norm)
    assert logits is not None
    return x.reshape(hidden.shape), logits.reshape(*hidden.shape[:2], -1)


def _few_tokens(layer: dict[str, Any], config: ModelConfig, experts: Experts, hidden: Array) -> Array:
    """On a GPU: a launch for the norm of one token and the router's logits, and two for the experts."""
    weights = layer["experts"]
    check_numbers(*(weights[name] for name in ("gate", "up", "down")))
    if config.activation != "silu" or experts.clamp is not None or experts.bias:
        raise LeftToXLA("Only experts that are gated by silu, without biases, have a kernel.")
    if experts.sigmoid or experts.scale != 1 or config.parallel_blocks:
        raise LeftToXLA("Only shares that are probabilities have a kernel, behind a norm of their own.")
    if not few_on_one_device(hidden) or not hidden.dtype == weights["up"].dtype == DTYPE:
        raise LeftToXLA(f"Experts of few tokens in bfloat16 have a kernel, got {hidden.shape} of {hidden.dtype}.")
    if is_one_after_rms(config, hidden):
        x, logits = map(rows_of, _one_routed(layer, config, hidden))
    else:
        x = rows_of(pre_norm(layer, "mlp", config, hidden))
        logits = linear(x, weights["router"], (1,), dtype=jnp.float32)
    products = weights["gate"], weights["up"], weights["down"]
    route = {"per_token": experts.per_token, "normalize": experts.normalize}
    return expert_products(x, logits, *products, **route).reshape(hidden.shape)
