"""Granite 3: Llama's decoder with multipliers of embeddings, attention, what blocks add, and logits (IBM, 2024)."""

from typing import Annotated, Any

from msgspec import Meta

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder
from clusterkv_jax.models.hf_fields import Decoder, Positions, declared
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS

_Multiplier = Annotated[float, Meta(ge=1e-6, le=1e6)]


class File(Decoder, kw_only=True):
    """The fields of transformers' GraniteConfig."""

    default_eos = 2

    max_position_embeddings: Positions = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: _Multiplier = 1.0
    attention_multiplier: _Multiplier = 1.0
    residual_multiplier: _Multiplier = 1.0
    logits_scaling: _Multiplier = 1.0
    bos_token_id: int | None = 1


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: granite` configuration."""
    file = declared(published, File, where)
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
