"""The decoder and its parameters under their first names."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.causal_attention import causal_attention as causal_attention
from clusterkv_jax.blocks.mlp import ACTIVATIONS as ACTIVATIONS
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.decoder import attention_in
from clusterkv_jax.models.decoder import attention_input as attention_input
from clusterkv_jax.models.decoder import attention_out_and_mlp as finish  # noqa: F401
from clusterkv_jax.models.decoder import embed as embed
from clusterkv_jax.models.decoder import forward as forward
from clusterkv_jax.models.decoder import forward_hidden as forward_hidden
from clusterkv_jax.models.decoder import sink_logits as sink_logits
from clusterkv_jax.models.decoder import unembed as unembed
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.models.parameters import TensorSpec as TensorSpec
from clusterkv_jax.models.parameters import abstract as abstract
from clusterkv_jax.models.parameters import init as init


def qkv(
    layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"], positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
    """A layer's queries, keys and values."""
    return attention_in(layer, config, hidden, positions)[:3]
