"""GLM-4-9B, as published (`model_type: chatglm`) and in the `-hf` layout (`model_type: glm`), GLM-4-0414 and GLM-4.5.

GLM-4.5 (`glm4_moe`, 2025, arXiv:2508.06471) has experts that a sigmoid scores, and one for all tokens. GLM-4-0414
(`glm4`) has norms on both sides of each block. Half of each head's dimensions is rotated, in interleaved pairs. The
published files fuse queries, keys and values, both layouts fuse the MLP's gate and up projections. GLM team, 2024
(arXiv:2406.12793).
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, structs

from clusterkv_jax.models import llama, qwen
from clusterkv_jax.models.config import ModelConfig, Rope
from clusterkv_jax.models.hf_config import decoder, experts, family_and_tokens
from clusterkv_jax.models.hf_fields import (
    Decoder,
    Epsilon,
    ExpertCount,
    Heads,
    Layers,
    Positions,
    Published,
    Size,
    Sparse,
    declared,
)
from clusterkv_jax.models.hf_rope import rope

HF_WEIGHTS = llama.WEIGHTS | {
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_up_proj.weight",
    "layers.*.mlp.up": "model.layers.*.mlp.gate_up_proj.weight",
}

WEIGHTS_0414 = HF_WEIGHTS | {
    "layers.*.attention_out_norm.scale": "model.layers.*.post_self_attn_layernorm.weight",
    "layers.*.mlp_out_norm.scale": "model.layers.*.post_mlp_layernorm.weight",
}

MOE_WEIGHTS = qwen.MOE_WEIGHTS | {
    "layers.*.experts.choice_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.shared_mlp.gate": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "layers.*.shared_mlp.up": "model.layers.*.mlp.shared_experts.up_proj.weight",
    "layers.*.shared_mlp.down": "model.layers.*.mlp.shared_experts.down_proj.weight",
}
# What predicts several tokens at once: a layer behind the last one.
OF_MORE_TOKENS = ("model.layers.{layers}.",)

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


class File(Decoder, kw_only=True):
    """The fields of transformers' GlmConfig and Glm4Config."""

    default_eos = (151329, 151336, 151338)

    num_key_value_heads: Heads | None = 2
    head_dim: Size | None = 128
    max_position_embeddings: Positions = 131072
    rms_norm_eps: Epsilon = 1.5625e-07
    attention_bias: bool = True
    pad_token_id: int | None = 151329


class MoeFile(Sparse, kw_only=True):
    """The fields of transformers' Glm4MoeConfig."""

    default_experts = 128
    # Experts in groups, of which few are looked at, are no published model's.
    assumed: ClassVar = {**Sparse.assumed, "n_group": (1,), "topk_group": (1,)}
    without_effect = Sparse.without_effect | {"num_mtp_layers"}

    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Positions = 131072
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    moe_intermediate_size: Size = 1408
    num_experts_per_tok: ExpertCount = 8
    n_routed_experts: ExpertCount = 128
    n_shared_experts: ExpertCount = 1
    routed_scaling_factor: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    first_k_dense_replace: Annotated[int, Meta(ge=0, le=1024)] = 1
    norm_topk_prob: bool = True


class ChatFile(Published, kw_only=True):
    """The fields of the first GLM-4's own configuration class that its decoder depends on."""

    assumed: ClassVar = {
        **Published.assumed,
        "rmsnorm": (True,),
        "post_layer_norm": (True,),
        "multi_query_attention": (True,),
        "original_rope": (True,),
        "add_bias_linear": (False,),
        "apply_residual_connection_post_layernorm": (False,),
    }

    padded_vocab_size: Size
    hidden_size: Size
    ffn_hidden_size: Size
    num_layers: Layers
    num_attention_heads: Heads
    multi_query_group_num: Heads
    kv_channels: Size
    seq_length: Positions
    rope_ratio: Annotated[float, Meta(ge=1e-3, le=1e6)] = 1.0
    layernorm_epsilon: Epsilon = 1e-5
    add_qkv_bias: bool = False
    tie_word_embeddings: bool = False


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: glm` configuration."""
    file = declared(published, File, where)
    if file.eos_token_id is None:  # transformers takes it for a file that says nothing
        file.eos_token_id = UNSET
    fields = decoder(file)
    return ModelConfig(
        **fields, rope=rope(file, fields["head_dim"], fraction=0.5, interleaved=True), qkv_bias=file.attention_bias
    )


def from_glm4(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: glm4` configuration."""
    return replace(from_hf(published, where), norm_place="both")


def from_moe(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: glm4_moe` configuration."""
    file = declared(published, MoeFile, where)
    fields = decoder(file)
    mixture = experts(
        structs.replace(file, num_experts=file.n_routed_experts),
        file.moe_intermediate_size,
        normalize=file.norm_topk_prob,
        dense_layers=tuple(range(min(file.first_k_dense_replace, file.num_hidden_layers))),
        sigmoid=True,
        choice_bias=True,
        scale=file.routed_scaling_factor,
        shared_size=file.moe_intermediate_size * file.n_shared_experts,
    )
    rotations = rope(file, fields["head_dim"], fraction=0.5)
    return ModelConfig(
        **fields, rope=rotations, qk_norm=file.use_qk_norm, qkv_bias=file.attention_bias, experts=mixture
    )


def from_chatglm(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: chatglm` configuration of the GLM-4 generation."""
    file = declared(published, ChatFile, where)
    return ModelConfig(
        vocab_size=file.padded_vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.ffn_hidden_size,
        num_layers=file.num_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=file.multi_query_group_num,
        head_dim=file.kv_channels,
        max_positions=file.seq_length,
        rope=Rope(10000.0 * file.rope_ratio, file.kv_channels // 2, interleaved=True),
        norm_eps=file.layernorm_epsilon,
        qkv_bias=file.add_qkv_bias,
        tie_embeddings=file.tie_word_embeddings,
        **family_and_tokens(file, file.padded_vocab_size),
    )
