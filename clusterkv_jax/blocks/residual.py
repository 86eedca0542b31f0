"""The way back into the hidden states: a block's last product, and what is added of it."""

import math
from typing import Any

from jaxtyping import Array, Float

from clusterkv_jax.blocks.config import ModelConfig
from clusterkv_jax.blocks.gpu import TOKENS, check_few, check_numbers, rows_of
from clusterkv_jax.blocks.linear import linear
from clusterkv_jax.blocks.norm import post_norm
from clusterkv_jax.kernels.row_products import row_products
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.runtime.dispatch import dispatch
from clusterkv_jax.runtime.sharding import apart, devices_along

# A block's last product, and the logical axis along which devices split its inputs.
LAST = {"attention": ("o", "heads"), "mlp": ("down", "mlp")}


def add_output(
    layer: dict[str, Any], block: str, config: ModelConfig, hidden: Float[Array, "B T M"], x: Float[Array, "B T *inner"]
) -> Float[Array, "B T M"]:
    """Hidden states and what a block, "attention" or "mlp", adds to them: its last product, bias, norm and scale."""
    name, split = LAST[block]
    weights, bias = layer[block][name], layer[block].get(f"{name}_bias")
    if config.norm_place == "before" and config.residual_scale == 1:
        # A bias is added to what is there already, not behind the product that is waited for.
        return row_parallel(x, weights, split, onto=hidden if bias is None else hidden + bias[None, None])
    out = row_parallel(x, weights, split)
    return hidden + post_norm(layer, block, config, out if bias is None else out + bias[None, None])


def row_parallel(
    x: Float[Array, "B T *inner"],
    weights: Float[Array, "*inner M"] | QuantisedWeights,
    split: str,
    onto: Float[Array, "B T M"] | None = None,
) -> Float[Array, "B T M"]:
    """`linear` of inputs that devices split along the axis `split`, and add up; added to `onto`."""
    return dispatch("row_parallel", {"gpu": _few_tokens, "xla": _reference}, None, x, weights, split, onto)


def _reference(x: Array, weights: Any, split: str, onto: Array | None) -> Array:
    y = linear(x, weights, tuple(range(len(weights.shape) - 1)))
    return y if onto is None else onto + y


def _few_tokens(x: Array, weights: Any, split: str, onto: Array | None) -> Array:
    """On a GPU: one launch, in which each device adds its share of `onto`, if that is exact."""
    check_numbers(weights)
    inner: Any = (split, *(None,) * (x.ndim - 3))
    devices = devices_along(("batch", None, *inner), x.shape, 2)
    check_few(x, math.prod(weights.shape[:-1]) // devices, weights.shape[-1])
    if onto is not None and devices.bit_count() > 1:
        return onto + _few_tokens(x, weights, split, None)

    def run(x: Array, weights: Array, onto: Array | None) -> tuple[Array, ...]:
        wide = weights.reshape(-1, weights.shape[-1])
        y = row_products(rows_of(x), wide, None if onto is None else rows_of(onto), share=1 / devices)
        return (y.reshape(*x.shape[:2], -1),)

    operands = [(x, ("batch", None, *inner)), (weights, (*inner, None)), (onto, TOKENS)]
    return apart(run, operands, [((*x.shape[:2], weights.shape[-1]), TOKENS)], summed=2)[0]
