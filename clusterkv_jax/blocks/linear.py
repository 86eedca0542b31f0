"""Products with weights, of which there is no other in the library."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.quantised_linear import linear_of_codes
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.runtime.dispatch import matmul_precision, platform

# Tokens of a prompt that a layer projects, and takes through its MLP, at once: enough to fill any matrix unit, while
# activations of 14,336 columns in bf16 stay below a GB each.
TOKENS_AT_ONCE = 32768
TOKENS_IN_CACHES = 1024  # the same on a CPU, whose caches hold the activations of so many


@jax.named_scope("linear")
def linear(
    x: Float[Array, "..."],
    weights: Float[Array, "..."] | QuantisedWeights,
    axes: tuple[int, ...] = (0,),
    bias: Float[Array, "*outputs"] | None = None,
    *,
    dtype: Any = None,
) -> Float[Array, "..."]:
    """x [*tokens, *inputs] times weights, whose dimensions `axes` are the inputs: [*tokens, *outputs], and their bias.

    float32 is multiplied in float32. The result has the dtype of x, or the one that is given. Weights in codes are
    never whole in numbers; they know which of their dimensions are inputs.
    """
    if isinstance(weights, QuantisedWeights):
        (y,) = linear_of_codes(x, weights, dtype=dtype or x.dtype)
    else:
        inputs = tuple(range(x.ndim - len(axes), x.ndim))
        precision = matmul_precision(x.dtype)
        y = jnp.tensordot(x, weights, (inputs, axes), precision=precision, preferred_element_type=dtype)
    return _with_bias(y, bias)


@jax.named_scope("linear")
def linears(
    x: Float[Array, "..."],
    weights: Sequence[Float[Array, "..."] | QuantisedWeights],
    axes: tuple[int, ...] = (0,),
    biases: Sequence[Float[Array, "..."] | None] = (),
    times: Float[Array, "*tokens 1"] | None = None,
) -> list[Float[Array, "..."]]:
    """`linear` of x with each of these weights and its bias, if there are biases; with those in codes at once.

    `times`, float32, is what a token's products are multiplied with.
    """
    biases = biases or [None] * len(weights)
    coded = [own for own in weights if isinstance(own, QuantisedWeights)]
    if len(coded) == len(weights):
        products = linear_of_codes(x, *coded, dtype=x.dtype if times is None else times.dtype)
    else:
        products = [linear(x, own, axes) for own in weights]
    return [_with_bias(_times(y, times).astype(x.dtype), bias) for y, bias in zip(products, biases, strict=True)]


def _times(y: Float[Array, "..."], times: Float[Array, "*tokens 1"] | None) -> Float[Array, "..."]:
    return y if times is None else y * jnp.expand_dims(times, tuple(range(times.ndim, y.ndim)))


def _with_bias(y: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
    return y if bias is None else y + jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))


def ragged_linear(
    rows: Float[Array, "R inputs"], weights: Float[Array, "E inputs outputs"], sizes: Int[Array, " E"]
) -> Float[Array, "R outputs"]:
    """`linear` of rows in groups one behind the other, so many to each, with the weights of their group."""
    return jax.lax.ragged_dot(rows, weights, sizes, precision=matmul_precision(rows.dtype))


def tokens_at_once() -> int:
    """Tokens of all sequences that a layer takes at once on the device that is compiled for, attention apart."""
    return TOKENS_IN_CACHES if platform() == "cpu" else TOKENS_AT_ONCE
