"""Helium 1: Llama's decoder with interleaved rotations (Kyutai, 2025)."""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder
from clusterkv_jax.models.hf_fields import Decoder, Epsilon, Heads, Positions, Size, declared
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


class File(Decoder, kw_only=True):
    """The fields of transformers' HeliumConfig."""

    default_eos = 2

    num_key_value_heads: Heads | None = 20
    head_dim: Size | None = 128
    max_position_embeddings: Positions = 4096
    rms_norm_eps: Epsilon = 1e-8
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 1
    pad_token_id: int | None = 3


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: helium` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    rotations = rope(file, fields["head_dim"], theta=100000.0, interleaved=True)
    return ModelConfig(**fields, rope=rotations, qkv_bias=file.attention_bias, mlp_bias=file.mlp_bias)
