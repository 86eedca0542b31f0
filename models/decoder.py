"""One decoder for all families: pure functions over a pytree of parameters (`models.parameters`), made of `blocks`.

A model computes in the type of its parameters; norms, RoPE, softmax and logits are float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks import attention_in as projections
from clusterkv_jax.blocks import embedding
from clusterkv_jax.blocks.attention_out import attention_out
from clusterkv_jax.blocks.causal_attention import causal_attention
from clusterkv_jax.blocks.mlp import mlp
from clusterkv_jax.blocks.moe import moe
from clusterkv_jax.blocks.norm import pre_norm
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.elsewhere import or_written_elsewhere
from clusterkv_jax.models.parameters import Params

embed = or_written_elsewhere(embedding.embed)
attention_in = or_written_elsewhere(projections.attention_in)
unembed = or_written_elsewhere(embedding.unembed)


@or_written_elsewhere
def attention_input(layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """What enters a layer's attention: the hidden states after the layer's input norm, if it has one."""
    return pre_norm(layer, "attention", config, hidden)


@or_written_elsewhere
def attention_out_and_mlp(
    layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"], attended: Float[Array, "B T H D"]
) -> Float[Array, "B T M"]:
    """The rest of a layer after its attention: output projection, and the MLP or the experts, with their residuals."""
    out, block = attention_out(layer, config, hidden, attended), moe if "experts" in layer else mlp
    return block(layer, config, out, hidden if config.parallel_blocks else out)


def sink_logits(layer: Params, config: ModelConfig) -> Float[Array, " H"] | None:
    """The logit that each head's softmax has beside those of the rows, None for a model without."""
    return layer["attention"]["sink_logits"] if config.sink_logits else None


@partial(jax.jit, static_argnames=("config",))
def decoder_layer(
    layer: Params, config: ModelConfig, hidden: Float[Array, "B N M"], positions: Int[Array, "B N"]
) -> Float[Array, "B N M"]:
    """One layer over a prompt, without a cache. Equal layers are traced once."""
    q, k, v, _ = attention_in(layer, config, hidden, positions)
    sinks = sink_logits(layer, config)
    attended = causal_attention(q, k, v, window=config.window, soft_cap=config.soft_cap, sink_logits=sinks)
    return attention_out_and_mlp(layer, config, hidden, attended)


def forward_hidden(
    params: Params, config: ModelConfig, tokens: Int[Array, "B N"], *, remat: bool = False
) -> Float[Array, "B N M"]:
    """Hidden states of every position, in sliding layers within their window: the reference without any cache, and
    training.

    `remat` recomputes each layer in the backward pass instead of keeping its activations.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    step = jax.checkpoint(decoder_layer, static_argnums=1) if remat else decoder_layer
    hidden = embed(params, config, tokens, positions)
    for number, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{number}"):
            hidden = step(layer, config.of_layer(number), hidden, positions)
    return hidden


def forward(
    params: Params, config: ModelConfig, tokens: Int[Array, "B N"], *, remat: bool = False
) -> Float[Array, "B N V"]:
    """Logits of every position: `forward_hidden` and `unembed`."""
    return unembed(params, config, forward_hidden(params, config, tokens, remat=remat))
