"""Qwen2 and Qwen2.5 (bias on queries, keys and values), Qwen3 (norm on queries and keys), Qwen3 with experts.

Yang et al., 2024 (arXiv:2407.10671) and 2025 (arXiv:2505.09388).
"""

from typing import Annotated, Any

from msgspec import Meta

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import Experts, ModelConfig
from clusterkv_jax.models.hf_config import (
    Decoder,
    ExpertCount,
    Heads,
    Layers,
    LayerTypes,
    Positions,
    Size,
    decoder,
    decoder_to_hf,
    rope,
    sliding,
)
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS
from clusterkv_jax.schema import checked

MOE_WEIGHTS = llama.WEIGHTS | {
    "layers.*.experts.router": "model.layers.*.mlp.gate.weight",
    "layers.*.experts.gate": "model.layers.*.mlp.experts.{expert}.gate_proj.weight",
    "layers.*.experts.up": "model.layers.*.mlp.experts.{expert}.up_proj.weight",
    "layers.*.experts.down": "model.layers.*.mlp.experts.{expert}.down_proj.weight",
}


class _Qwen2(Decoder, kw_only=True):
    num_key_value_heads: Heads | None = 32
    max_position_embeddings: Positions = 32768
    sliding_window: Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0, le=2**16)] = 28
    layer_types: LayerTypes | None = None


class _Qwen3(_Qwen2, kw_only=True):
    head_dim: Size | None = 128


class _Qwen3Moe(_Qwen2, kw_only=True):
    num_key_value_heads: Heads | None = 4
    decoder_sparse_step: Layers = 1
    mlp_only_layers: Annotated[list[int], Meta(max_length=1024)] | None = None
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    num_experts_per_tok: ExpertCount = 8
    # The name in published files, and the one that transformers 5 writes.
    num_experts: ExpertCount | None = None
    num_local_experts: ExpertCount = 128


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: qwen2` or `qwen3` configuration."""
    file = checked(published, _Qwen2 if published.get("model_type") == "qwen2" else _Qwen3, where)
    fields = decoder(file)
    late = [
        "sliding_attention" if i >= file.max_window_layers else "full_attention" for i in range(fields["num_layers"])
    ]
    fields |= sliding(
        file.sliding_window if file.use_sliding_window else None,
        fields,
        late if file.layer_types is None else file.layer_types,
    )
    rotations = rope(file, fields["head_dim"])
    if file.model_type == "qwen2":
        return ModelConfig(**fields, rope=rotations, qkv_bias=True)
    bias = file.attention_bias
    return ModelConfig(**fields, rope=rotations, qk_norm=True, qkv_bias=bias, output_bias=bias)


def from_moe(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: qwen3_moe` configuration."""
    file = checked(published, _Qwen3Moe, where)
    fields = decoder(file)
    fields |= sliding(file.sliding_window if file.use_sliding_window else None, fields)
    single, step = set(file.mlp_only_layers or ()), file.decoder_sparse_step
    dense = (number for number in range(file.num_hidden_layers) if number in single or (number + 1) % step)
    experts = Experts(
        file.num_experts or file.num_local_experts,
        file.num_experts_per_tok,
        file.moe_intermediate_size,
        normalize=file.norm_topk_prob,
        dense_layers=tuple(dense),
    )
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        qk_norm=True,
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        experts=experts,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `from_hf` for `model_type: qwen3`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **decoder_to_hf(config),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "layer_types": [
            "sliding_attention" if layer in config.sliding_layers else "full_attention"
            for layer in range(config.num_layers)
        ],
    }
