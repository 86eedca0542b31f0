"""What a layer's surrogate says of tokens (KVzap, 2601.07891): products in float32 of what enters the attention."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from clusterkv_jax.blocks.gpu import few_on_one_device
from clusterkv_jax.blocks.linear import linear
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.runtime.dispatch import LeftToXLA, dispatch

Surrogate = dict[str, Any]
IN_FLOAT32 = 3  # bfloat16 numbers whose sum is a float32 number
FEW_OUTPUTS = 32  # KV heads: every token reads their weights for itself where one launch takes few tokens


def token_scores(surrogate: Surrogate, x: Float[Array, "B T M"]) -> Float[Array, "B T K"]:
    """Scores of tokens by a layer's surrogate, linear or with an inner layer and the exact GELU.

    Raises ValueError if the shapes do not fit.
    """
    for inner in ("inner_", "") if "inner_weights" in surrogate else ("",):
        check_layer(surrogate, inner, x.shape[-1])
        x = affine(x, surrogate[f"{inner}weights"], surrogate[f"{inner}bias"])
        x = jax.nn.gelu(x, approximate=False) if inner else x
    return x


def check_layer(surrogate: Surrogate, inner: str, inputs: int) -> None:
    """Raise ValueError unless the weights take so many inputs and have as many outputs as the bias."""
    weights, bias = surrogate[f"{inner}weights"], surrogate[f"{inner}bias"]
    if weights.shape != (inputs, *bias.shape):
        raise ValueError(
            f"{inner}weights must be [{inputs}, outputs] with as many outputs as {inner}bias, "
            f"got {weights.shape} and {bias.shape}."
        )


def affine(x: Float[Array, "B T I"], weights: Float[Array, "I O"], bias: Float[Array, " O"]) -> Float[Array, "B T O"]:
    """x @ weights + bias in float32."""
    backends = {"gpu": _on_gpu, "tpu": _in_parts, "xla": _reference}
    return dispatch("affine", backends, None, x, weights.astype(jnp.float32), bias.astype(jnp.float32))


def _reference(x: Array, weights: Array, bias: Array) -> Array:
    return linear(x.astype(jnp.float32), weights, bias=bias)


def _on_gpu(x: Array, weights: Array, bias: Array) -> Array:
    if few_on_one_device(x) and bias.size <= FEW_OUTPUTS:
        return in_one_launch(x, weights, bias)
    return _in_parts(x, weights, bias)


def _in_parts(x: Array, weights: Array, bias: Array) -> Array:
    """Matrix units take bfloat16 numbers as they are: the weights come in parts, and no float32 copy of x is made."""
    if x.dtype != jnp.bfloat16:
        raise LeftToXLA(f"Products in parts are of bfloat16, got {x.dtype}.")
    return in_parts(x, weights) + bias[None, None]


def in_one_launch(
    x: Float[Array, "B T I"], weights: Float[Array, "I O"], bias: Float[Array, " O"]
) -> Float[Array, "B T O"]:
    """`affine` of few tokens: XLA sums each row of a GPU's memory in one launch, and columns in two.

    A loop of steps turns the weights once, before it begins. A sum begins with its bias, which needs no launch then.
    """
    rows = with_layout_constraint(weights.T, Layout((0, 1)))
    products = x.astype(jnp.float32)[:, :, None] * rows[None, None]
    first = ordinals(weights.shape[0], 4) == 0
    return jnp.sum(jnp.where(first, products + bias[None, None, :, None], products), axis=-1)


def in_parts(x: Float[Array, "B T I"], weights: Float[Array, "I O"]) -> Float[Array, "B T O"]:
    """The product in float32 of bfloat16 numbers and float32 weights."""
    products = linear(x, jnp.stack(_parts_of(weights)), (1,), dtype=jnp.float32)
    return jnp.sum(products, axis=2)


def keys_and_scores(
    keys: Float[Array, "K D M"], surrogate: Surrogate, entering: Float[Array, "B T M"]
) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K"]]:
    """The projection of keys with these weights, and `token_scores` of a linear surrogate, by one product."""
    check_layer(surrogate, "", entering.shape[-1])
    weights, bias = (surrogate[name].astype(jnp.float32) for name in ("weights", "bias"))
    rows = keys.reshape(-1, keys.shape[-1])
    # Transposed by slices, which takes no launch of its own.
    transposed = jnp.concatenate([weights[None, :, head] for head in range(weights.shape[1])])
    together = jnp.concatenate([rows, *_parts_of(transposed)])
    products = linear(entering, together, (1,), dtype=jnp.float32)
    projected = products[..., : len(rows)].astype(keys.dtype).reshape(*entering.shape[:2], *keys.shape[:2])
    scores = jnp.sum(products[..., len(rows) :].reshape(*entering.shape[:2], IN_FLOAT32, -1), axis=2)
    return projected, scores + bias[None, None]


def _parts_of(weights: Float[Array, "I O"]) -> list[Float[Array, "I O"]]:
    """The three bfloat16 numbers whose sum a float32 weight is."""
    parts, rest = [], weights
    for _ in range(IN_FLOAT32):
        # A cast there and back would be dropped.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return parts
