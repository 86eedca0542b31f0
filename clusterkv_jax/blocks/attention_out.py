"""From a layer's attention back into its hidden states."""

from typing import Any

import jax
from jaxtyping import Array, Float

from clusterkv_jax.blocks.config import ModelConfig
from clusterkv_jax.blocks.residual import add_output


@jax.named_scope("attention/output")
def attention_out(
    layer: dict[str, Any], config: ModelConfig, hidden: Float[Array, "B T M"], attended: Float[Array, "B T H D"]
) -> Float[Array, "B T M"]:
    """Hidden states and the output projection of what the heads attended to."""
    return add_output(layer, "attention", config, hidden, attended)
