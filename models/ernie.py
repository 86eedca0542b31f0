"""Ernie 4.5 without experts: Llama's decoder with interleaved rotations (Baidu, 2025)."""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder
from clusterkv_jax.models.hf_fields import Decoder, Epsilon, Heads, Positions, Size, declared
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


class File(Decoder, kw_only=True):
    """The fields of transformers' Ernie4_5Config."""

    default_eos = 2

    num_key_value_heads: Heads | None = 2
    head_dim: Size | None = 128
    max_position_embeddings: Positions = 131072
    rms_norm_eps: Epsilon = 1e-5
    use_bias: bool | None = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 1
    pad_token_id: int | None = 0


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: ernie4_5` configuration."""
    file = declared(published, File, where)
    fields, bias = decoder(file), bool(file.use_bias)
    rotations = rope(file, fields["head_dim"], theta=500000.0, interleaved=True)
    return ModelConfig(**fields, rope=rotations, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
