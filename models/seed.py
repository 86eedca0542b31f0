"""Seed-OSS: Llama's decoder with biases on queries, keys and values (ByteDance, 2025)."""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder
from clusterkv_jax.models.hf_fields import Decoder, Heads, Positions, Size, declared
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


class File(Decoder, kw_only=True):
    """The fields of transformers' SeedOssConfig."""

    default_eos = 2
    without_effect = Decoder.without_effect | {"pretraining_tp", "residual_dropout"}

    num_key_value_heads: Heads | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Positions = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: seed_oss` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        qkv_bias=file.attention_bias,
        output_bias=file.attention_out_bias,
        mlp_bias=file.mlp_bias,
    )
