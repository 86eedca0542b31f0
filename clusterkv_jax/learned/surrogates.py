"""KVzap (2601.07891): scores that are predicted from what enters the attention, without queries or attention.

A surrogate is fitted to the logarithm of KVzip+ scores, layer by layer. It works in the prompt as while decoding.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.few_tokens import few
from clusterkv_jax.runtime.checks import check_array
from clusterkv_jax.runtime.dispatch import platform
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import on_one_device

HIGHEST = jax.lax.Precision.HIGHEST
IN_FLOAT32 = 3  # bfloat16 numbers whose sum is a float32 number
MANY = 8192  # tokens, by estimate: of fewer, a product for their scores takes no longer than weights put side by side
FEW_OUTPUTS = 32  # KV heads: every token reads their weights for itself where one launch takes few tokens


@own_settings()
def surrogate(
    weights: Float[Array, "M K"], bias: Float[Array, " K"], hidden: Float[Array, "B N M"]
) -> Float[Array, "B K N"]:
    """Linear surrogate of a layer: hidden @ weights + bias, in float32, on the scale of a logarithm.

    Args:
        weights: a column per KV head.
        bias: a number per KV head.
        hidden: what enters the layer's attention, after its input norm.

    Returns:
        scores, more is more; no row is protected, and equal tokens tie in layer 0.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_array("hidden", hidden, "B,N,M")
    check_layer("weights", weights, "bias", bias, hidden.shape[-1])
    return jnp.swapaxes(affine(hidden, weights, bias), 1, 2)


@own_settings()
def surrogate_mlp(
    inner_weights: Float[Array, "M F"],
    inner_bias: Float[Array, " F"],
    weights: Float[Array, "F K"],
    bias: Float[Array, " K"],
    hidden: Float[Array, "B N M"],
) -> Float[Array, "B K N"]:
    """Surrogate with one inner layer of F units (M / 8 in the paper) and the exact GELU; otherwise as `surrogate`."""
    check_array("hidden", hidden, "B,N,M")
    check_layer("inner_weights", inner_weights, "inner_bias", inner_bias, hidden.shape[-1])
    check_layer("weights", weights, "bias", bias, inner_weights.shape[1])
    inner = jax.nn.gelu(affine(hidden, inner_weights, inner_bias), approximate=False)
    return jnp.swapaxes(affine(inner, weights, bias), 1, 2)


def predicted_scores(parameters: dict[str, Array], hidden: Float[Array, "B N M"]) -> Float[Array, "B K N"]:
    """Scores by a layer's surrogate, linear or with an inner layer, its arrays under the names of the arguments."""
    return (surrogate_mlp if "inner_weights" in parameters else surrogate)(**parameters, hidden=hidden)


def affine(x: Float[Array, "B N I"], weights: Float[Array, "I O"], bias: Float[Array, " O"]) -> Float[Array, "B N O"]:
    """x @ weights + bias in float32.

    Matrix units take bfloat16 numbers as they are, so there the weights come in parts: no float32 copy of x is made.
    """
    weights, bias = weights.astype(jnp.float32), bias.astype(jnp.float32)
    if few(x) and bias.size <= FEW_OUTPUTS:
        return in_one_launch(x, weights, bias)
    if x.dtype == jnp.bfloat16 and platform() != "cpu":
        product = in_parts(x, weights)
    else:
        product = jnp.einsum("bni,io->bno", x.astype(jnp.float32), weights, precision=HIGHEST)
    return product + bias[None, None]


def in_one_launch(
    x: Float[Array, "B N I"], weights: Float[Array, "I O"], bias: Float[Array, " O"]
) -> Float[Array, "B N O"]:
    """The same of few tokens: XLA sums each row of a GPU's memory in one launch, and columns in two.

    A loop of steps turns the weights once, before it begins. A sum begins with its bias, which needs no launch then.
    """
    rows = with_layout_constraint(weights.T, Layout((0, 1)))
    products = x.astype(jnp.float32)[:, :, None] * rows[None, None]
    first = ordinals(weights.shape[0], 4) == 0
    return jnp.sum(jnp.where(first, products + bias[None, None, :, None], products), axis=-1)


def in_parts(x: Float[Array, "B N I"], weights: Float[Array, "I O"]) -> Float[Array, "B N O"]:
    """The product in float32 of bfloat16 numbers and float32 weights."""
    products = jnp.einsum("bni,pio->bnpo", x, jnp.stack(parts_of(weights)), preferred_element_type=jnp.float32)
    return jnp.sum(products, axis=2)


def parts_of(weights: Float[Array, "I O"]) -> list[Float[Array, "I O"]]:
    """The three bfloat16 numbers whose sum a float32 weight is."""
    parts, rest = [], weights
    for _ in range(IN_FLOAT32):
        # A cast there and back would be dropped.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return parts


def beside_keys(config: ModelConfig, parameters: dict[str, Array], hidden: Float[Array, "B T M"]) -> bool:
    """Whether one product makes the keys and the scores of these tokens: of many in bfloat16, on one GPU, by a linear
    surrogate, in a model without a decoder of its own.

    A product for the scores alone reads all hidden states. One for both writes and reads its keys in float32, which
    takes as many bytes if the keys are half as wide as the states.
    """
    plain = config.decoder is None and "inner_weights" not in parameters and hidden.dtype == jnp.bfloat16
    many = platform() == "gpu" and on_one_device() and hidden.shape[0] * hidden.shape[1] >= MANY
    narrow = 2 * config.num_kv_heads * config.head_dim <= config.hidden_size
    aligned = config.num_kv_heads % 4 == 0  # rows of whole 16 bytes
    return plain and many and narrow and aligned


def keys_and_scores(
    keys: Float[Array, "K D M"], parameters: dict[str, Array], entering: Float[Array, "B T M"]
) -> tuple[Float[Array, "B T K D"], Float[Array, "B K T"]]:
    """The projection of keys with these weights, and `predicted_scores`, of bfloat16 states as in `in_parts`."""
    weights, bias = (parameters[name].astype(jnp.float32) for name in ("weights", "bias"))
    check_layer("weights", weights, "bias", bias, entering.shape[-1])
    rows = keys.reshape(-1, keys.shape[-1])
    # Transposed by slices, which takes no launch of its own.
    transposed = jnp.concatenate([weights[None, :, head] for head in range(weights.shape[1])])
    together = jnp.concatenate([rows, *parts_of(transposed)])
    products = jnp.einsum("btm,om->bto", entering, together, preferred_element_type=jnp.float32)
    projected = products[..., : len(rows)].astype(keys.dtype).reshape(*entering.shape[:2], *keys.shape[:2])
    scores = jnp.sum(products[..., len(rows) :].reshape(*entering.shape[:2], IN_FLOAT32, -1), axis=2)
    return projected, jnp.swapaxes(scores + bias[None, None], 1, 2)


def check_layer(name: str, weights: Array, bias_name: str, bias: Array, inputs: int) -> None:
    """Raise ValueError unless the weights take so many inputs and have as many outputs as the bias."""
    if weights.shape != (inputs, *bias.shape):
        raise ValueError(
            f"{name} must be [{inputs}, outputs] with as many outputs as {bias_name}, "
            f"got {weights.shape} and {bias.shape}."
        )
