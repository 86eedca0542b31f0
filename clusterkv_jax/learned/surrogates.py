"""KVzap (2601.07891): scores that are predicted from what enters the attention, without queries or attention.

A surrogate is fitted to the logarithm of KVzip+ scores, layer by layer. It works in the prompt as while decoding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.blocks.surrogate import token_scores
from clusterkv_jax.runtime.checks import check_array
from clusterkv_jax.runtime.settings import own_settings


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
    return predicted_scores({"weights": weights, "bias": bias}, hidden)


def surrogate_mlp(
    inner_weights: Float[Array, "M F"],
    inner_bias: Float[Array, " F"],
    weights: Float[Array, "F K"],
    bias: Float[Array, " K"],
    hidden: Float[Array, "B N M"],
) -> Float[Array, "B K N"]:
    """Surrogate with one inner layer of F units (M / 8 in the paper) and the exact GELU; otherwise as `surrogate`."""
    inner = {"inner_weights": inner_weights, "inner_bias": inner_bias}
    return predicted_scores(inner | {"weights": weights, "bias": bias}, hidden)


@own_settings()
def predicted_scores(parameters: dict[str, Array], hidden: Float[Array, "B N M"]) -> Float[Array, "B K N"]:
    """Scores by a layer's surrogate, linear or with an inner layer, its arrays under the names of the arguments."""
    check_array("hidden", hidden, "B,N,M")
    return jnp.swapaxes(token_scores(parameters, hidden), 1, 2)
