"""Llama 2, 3 and 3.1, TinyLlama, SmolLM2; the tensor names that Mistral, Qwen and GLM (`-hf`) took over.

Touvron et al., 2023 (arXiv:2307.09288); Grattafiori et al., 2024 (arXiv:2407.21783).
"""

from typing import Any

from clusterkv_jax.models.config import LinearScaling, Llama3Scaling, ModelConfig
from clusterkv_jax.models.hf_config import Decoder, Positions, decoder, rope
from clusterkv_jax.schema import checked

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


class _Llama(Decoder, kw_only=True):
    max_position_embeddings: Positions = 2048
    mlp_bias: bool = False


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: llama` configuration."""
    file = checked(published, _Llama, where)
    fields = decoder(file)
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `from_hf`, in the style of transformers 4, which version 5 reads too."""
    assert config.rope is not None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling_to_hf(config.rope.scaling),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
        "pad_token_id": config.pad_id,
        "torch_dtype": config.dtype,
    }


def _scaling_to_hf(scaling: LinearScaling | Llama3Scaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
