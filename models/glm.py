"""GLM-4-9B, as published (`model_type: chatglm`) and in the `-hf` layout (`model_type: glm`).

Half of each head's dimensions is rotated, in interleaved pairs. The published files fuse queries, keys and values,
both layouts fuse the MLP's gate and up projections. GLM team, 2024 (arXiv:2406.12793).
"""

from typing import Any

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig, Rope
from clusterkv_jax.models.hf_config import decoder, demand, rope, size, tokens_and_dtype

HF_WEIGHTS = llama.WEIGHTS | {
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_up_proj.weight",
    "layers.*.mlp.up": "model.layers.*.mlp.gate_up_proj.weight",
}

CHATGLM_WEIGHTS = {
    "embed": "transformer.embedding.word_embeddings.weight",
    "layers.*.attention_norm.scale": "transformer.encoder.layers.*.input_layernorm.weight",
    "layers.*.attention.q": "transformer.encoder.layers.*.self_attention.query_key_value.weight",
    "layers.*.attention.k": "transformer.encoder.layers.*.self_attention.query_key_value.weight",
    "layers.*.attention.v": "transformer.encoder.layers.*.self_attention.query_key_value.weight",
    "layers.*.attention.q_bias": "transformer.encoder.layers.*.self_attention.query_key_value.bias",
    "layers.*.attention.k_bias": "transformer.encoder.layers.*.self_attention.query_key_value.bias",
    "layers.*.attention.v_bias": "transformer.encoder.layers.*.self_attention.query_key_value.bias",
    "layers.*.attention.o": "transformer.encoder.layers.*.self_attention.dense.weight",
    "layers.*.mlp_norm.scale": "transformer.encoder.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp.gate": "transformer.encoder.layers.*.mlp.dense_h_to_4h.weight",
    "layers.*.mlp.up": "transformer.encoder.layers.*.mlp.dense_h_to_4h.weight",
    "layers.*.mlp.down": "transformer.encoder.layers.*.mlp.dense_4h_to_h.weight",
    "final_norm.scale": "transformer.encoder.final_layernorm.weight",
    "lm_head": "transformer.output_layer.weight",
}


def from_hf(published: dict[str, Any]) -> ModelConfig:
    """Translate a `model_type: glm` configuration."""
    published = {"head_dim": 128, "max_position_embeddings": 131072, "num_key_value_heads": 2, **published}
    fields = decoder({"rms_norm_eps": 1.5625e-07, **published})
    return ModelConfig(
        **fields,
        rope=rope(published, fields["head_dim"], fraction=0.5, interleaved=True),
        qkv_bias=published.get("attention_bias", True),
    )


def from_chatglm(published: dict[str, Any]) -> ModelConfig:
    """Translate a `model_type: chatglm` configuration of the GLM-4 generation."""
    for key, allowed in {
        "rmsnorm": True,
        "post_layer_norm": True,
        "multi_query_attention": True,
        "original_rope": True,
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
    }.items():
        demand(published, key, allowed, default=allowed)
    heads, head_dim = size(published, "num_attention_heads"), size(published, "kv_channels")
    return ModelConfig(
        family="chatglm",
        vocab_size=size(published, "padded_vocab_size"),
        hidden_size=size(published, "hidden_size"),
        intermediate_size=size(published, "ffn_hidden_size"),
        num_layers=size(published, "num_layers"),
        num_heads=heads,
        num_kv_heads=size(published, "multi_query_group_num"),
        head_dim=head_dim,
        max_positions=size(published, "seq_length"),
        rope=Rope(10000.0 * published.get("rope_ratio", 1), head_dim // 2, interleaved=True),
        norm_eps=published.get("layernorm_epsilon", 1e-5),
        qkv_bias=published.get("add_qkv_bias", False),
        tie_embeddings=published.get("tie_word_embeddings", False),
        **tokens_and_dtype(published),
    )
