"""OLMo 2: norms of what blocks add, and of queries and keys over all heads (OLMo team, 2025, arXiv:2501.00656)."""

from typing import Any

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder
from clusterkv_jax.models.hf_fields import Decoder, Epsilon, Positions, declared
from clusterkv_jax.models.hf_rope import rope

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attention_out_norm.scale": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp_out_norm.scale": "model.layers.*.post_feedforward_layernorm.weight",
}


class File(Decoder, kw_only=True):
    """The fields of transformers' Olmo2Config."""

    default_eos = 50279

    max_position_embeddings: Positions = 2048
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    pad_token_id: int | None = 1


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: olmo2` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        norm_place="after",
        qk_norm=True,
        qk_norm_whole=True,
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
    )
