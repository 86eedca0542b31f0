"""Llama 2, 3 and 3.1, TinyLlama, SmolLM2; the tensor names that Mistral, Qwen and GLM (`-hf`) took over.

Touvron et al., 2023 (arXiv:2307.09288); Grattafiori et al., 2024 (arXiv:2407.21783).
"""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, decoder_to_hf
from clusterkv_jax.models.hf_fields import Decoder, Positions, declared
from clusterkv_jax.models.hf_rope import rope

WEIGHTS = {
    "embed": "model.embed_tokens.weight",
    "layers.*.attention_norm.scale": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.q": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.k": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.v": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.o": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attention.q_bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.k_bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.v_bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.o_bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.mlp_norm.scale": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj.weight",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj.weight",
    "layers.*.mlp.gate_bias": "model.layers.*.mlp.gate_proj.bias",
    "layers.*.mlp.up_bias": "model.layers.*.mlp.up_proj.bias",
    "layers.*.mlp.down_bias": "model.layers.*.mlp.down_proj.bias",
    "final_norm.scale": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


class File(Decoder, kw_only=True):
    """The fields of transformers' LlamaConfig."""

    default_eos = 2
    # Slices a product that it does not change.
    without_effect = Decoder.without_effect | {"pretraining_tp"}

    max_position_embeddings: Positions = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 1


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: llama` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `from_hf`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **decoder_to_hf(config),
        "mlp_bias": config.mlp_bias,
    }
