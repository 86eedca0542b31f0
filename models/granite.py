"""Granite 3: Llama's decoder with multipliers of embeddings, attention, what blocks add, and logits (IBM, 2024)."""

from typing import Annotated, Any

from msgspec import Meta

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import Decoder, Positions, decoder, rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS
from clusterkv_jax.schema import checked

_Multiplier = Annotated[float, Meta(ge=1e-6, le=1e6)]


class _Granite(Decoder, kw_only=True):
    max_position_embeddings: Positions = 2048
    mlp_bias: bool = False
    embedding_multiplier: _Multiplier = 1.0
    attention_multiplier: _Multiplier = 1.0
    residual_multiplier: _Multiplier = 1.0
    logits_scaling: _Multiplier = 1.0


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: granite` configuration."""
    file = checked(published, _Granite, where)
    fields = decoder(file)
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
        embedding_scale=file.embedding_multiplier,
        attention_scale=file.attention_multiplier,
        residual_scale=file.residual_multiplier,
        logit_scale=1 / file.logits_scaling,
    )
