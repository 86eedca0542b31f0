"""The MLP of a layer, gated or not."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.blocks.config import ModelConfig
from clusterkv_jax.blocks.gpu import TOKENS, check_few, check_numbers, rows_of
from clusterkv_jax.blocks.linear import linears
from clusterkv_jax.blocks.norm import split_pre_norm
from clusterkv_jax.blocks.residual import add_output
from clusterkv_jax.kernels.row_products import row_products
from clusterkv_jax.kernels.row_products.reference import GATES
from clusterkv_jax.runtime.dispatch import LeftToXLA, dispatch
from clusterkv_jax.runtime.sharding import apart, ways

INTO = ("up", "gate")  # the products that an MLP begins with
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "mish": jax.nn.mish,
}


@jax.named_scope("mlp")
def mlp(
    layer: dict[str, Any], config: ModelConfig, hidden: Float[Array, "B T M"], entering: Float[Array, "B T M"]
) -> Float[Array, "B T M"]:
    """Hidden states and what the layer's MLP adds to them, of those that enter it."""
    weights = layer["mlp"]
    into = [weights[name] for name in INTO if name in weights]
    inner = hidden_units(weights, config.activation, *split_pre_norm(layer, "mlp", config, entering, *into))
    return add_output(layer, "mlp", config, hidden, inner)


def hidden_units(
    weights: dict[str, Any], activation: str, x: Float[Array, "B T M"], times: Float[Array, "B T 1"] | None = None
) -> Float[Array, "B T F"]:
    """What enters the last product of an MLP, or of an expert that every token goes through.

    `times` is what the products of x are multiplied with.
    """
    return dispatch("mlp", {"gpu": _few_tokens, "xla": _reference}, None, weights, activation, x, times)


def _reference(weights: dict[str, Any], activation: str, x: Array, times: Array | None) -> Float[Array, "B T F"]:
    act = ACTIVATIONS[activation]
    names = [name for name in INTO if name in weights]
    biases = [weights.get(f"{name}_bias") for name in names]
    up, *gates = linears(x, [weights[name] for name in names], biases=biases, times=times)
    return act(gates[0]) * up if gates else act(up)


def _few_tokens(weights: dict[str, Any], activation: str, x: Array, times: Array | None) -> Float[Array, "B T F"]:
    """On a GPU: both products and the gate in one launch."""
    check_numbers(weights["up"], weights.get("gate"))
    if "gate" not in weights or "gate_bias" in weights or activation not in GATES:
        raise LeftToXLA("Only products that a gate follows, without biases, have a kernel.")
    check_few(x, x.shape[-1], weights["up"].shape[1] // ways("mlp"))

    def run(x: Array, gate: Array, up: Array) -> tuple[Array, ...]:
        return (row_products(rows_of(x), gate, None, up, gate=activation).reshape(*x.shape[:2], -1),)

    operands = [(x, TOKENS), *((weights[name], (None, "mlp")) for name in ("gate", "up"))]
    result = (*x.shape[:2], weights["up"].shape[1]), ("batch", None, "mlp")
    return apart(run, operands, [result])[0]
