"""From tokens to hidden states, and from hidden states to logits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.config import ModelConfig
from clusterkv_jax.blocks.linear import linear
from clusterkv_jax.blocks.norm import norm
from clusterkv_jax.blocks.quantised_linear import partitions
from clusterkv_jax.kernels.weight_codes import QuantisedWeights, output_numbers
from clusterkv_jax.runtime.sharding import ambient_mesh, take_rows


def number_dtype(params: dict[str, Any]) -> Any:
    """The type of parameters that are not in codes, in which keys and values are."""
    table = params["embed"]
    return params["final_norm"]["scale"].dtype if isinstance(table, QuantisedWeights) else table.dtype


@jax.named_scope("embedding")
def embed(
    params: dict[str, Any], config: ModelConfig, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Float[Array, "B T M"]:
    """Token embeddings, plus the learned positions of a model that has them. Ids must be in 0..V-1."""
    table, dtype = params["embed"], number_dtype(params)
    if isinstance(table, QuantisedWeights):
        mesh = ambient_mesh()
        specs = None if mesh is None else partitions(table, mesh)
        hidden = take_rows(table, tokens, partial(output_numbers, dtype=dtype), specs)
    else:
        hidden = take_rows(table, tokens)
    if config.embedding_scale != 1:
        hidden = hidden * config.embedding_scale
    if config.rope is None:
        hidden = hidden + params["positions"][positions + config.learned_position_offset]
    return hidden


@jax.named_scope("head")
def unembed(params: dict[str, Any], config: ModelConfig, hidden: Float[Array, "... M"]) -> Float[Array, "... V"]:
    """Final norm and vocabulary logits, float32 whatever the type of the parameters."""
    table = params["embed"] if config.tie_embeddings else params["lm_head"]
    logits = linear(norm(params["final_norm"], config, hidden), table, (1,), dtype=jnp.float32)
    logits = logits if config.logit_scale == 1 else logits * config.logit_scale
    return logits if config.logit_cap is None else config.logit_cap * jnp.tanh(logits / config.logit_cap)
