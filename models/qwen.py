"""Qwen2 and Qwen2.5 (bias on queries, keys and values), Qwen3 (norm on queries and keys), both with experts.

Yang et al., 2024 (arXiv:2407.10671) and 2025 (arXiv:2505.09388). The texts of Qwen2.5-VL and Qwen3-VL: their rotations
are of three positions, which are one and the same where there are no images.
"""

from typing import Annotated, Any

from msgspec import Meta

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import Experts, ModelConfig
from clusterkv_jax.models.hf_config import decoder, decoder_to_hf, experts, sliding
from clusterkv_jax.models.hf_fields import (
    Decoder,
    Epsilon,
    ExpertCount,
    Heads,
    Layers,
    LayerTypes,
    Positions,
    Published,
    Size,
    Sparse,
    declared,
)
from clusterkv_jax.models.hf_multimodal import Multimodal, text_config
from clusterkv_jax.models.hf_rope import ROPE_TYPES, rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS

MOE_WEIGHTS = llama.WEIGHTS | {
    "layers.*.experts.router": "model.layers.*.mlp.gate.weight",
    "layers.*.experts.gate": "model.layers.*.mlp.experts.{expert}.gate_proj.weight",
    "layers.*.experts.up": "model.layers.*.mlp.experts.{expert}.up_proj.weight",
    "layers.*.experts.down": "model.layers.*.mlp.experts.{expert}.down_proj.weight",
}


MOE2_WEIGHTS = MOE_WEIGHTS | {
    "layers.*.shared_mlp.gate": "model.layers.*.mlp.shared_expert.gate_proj.weight",
    "layers.*.shared_mlp.up": "model.layers.*.mlp.shared_expert.up_proj.weight",
    "layers.*.shared_mlp.down": "model.layers.*.mlp.shared_expert.down_proj.weight",
    "layers.*.shared_mlp.share": "model.layers.*.mlp.shared_expert_gate.weight",
}


class File(Decoder, kw_only=True):
    """The fields of transformers' Qwen2Config."""

    assumed = Published.assumed

    num_key_value_heads: Heads | None = 32
    max_position_embeddings: Positions = 32768
    sliding_window: Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0, le=2**16)] = 28
    layer_types: LayerTypes | None = None


class File3(File, kw_only=True):
    """The fields of transformers' Qwen3Config."""

    head_dim: Size | None = 128
    attention_bias: bool = False


class MoeFile(Sparse, kw_only=True):
    """The fields of transformers' Qwen3MoeConfig."""

    default_experts = 128

    num_key_value_heads: Heads | None = 4
    max_position_embeddings: Positions = 32768
    attention_bias: bool = False
    sliding_window: Size | None = 4096
    use_sliding_window: bool = False
    decoder_sparse_step: Layers = 1
    mlp_only_layers: Annotated[list[int], Meta(max_length=1024)] | None = None
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    num_experts_per_tok: ExpertCount = 8


class Moe2File(MoeFile, kw_only=True):
    """The fields of transformers' Qwen2MoeConfig."""

    default_experts = 60
    assumed = Published.assumed

    num_key_value_heads: Heads | None = 16
    qkv_bias: bool = True
    max_window_layers: Annotated[int, Meta(ge=0, le=2**16)] = 28
    layer_types: LayerTypes | None = None
    moe_intermediate_size: Size = 1408
    shared_expert_intermediate_size: Size = 5632
    num_experts_per_tok: ExpertCount = 4


class ImageFile(Multimodal, kw_only=True):
    """The fields of transformers' Qwen2_5_VLConfig and Qwen3VLConfig; what is of images is not read."""

    without_effect = Multimodal.without_effect | {
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    }


class TextFile(File, kw_only=True):
    """The fields of transformers' Qwen2_5_VLTextConfig."""

    default_eos = 151645

    num_key_value_heads: Heads | None = 8
    rms_norm_eps: Epsilon = 1e-5
    max_window_layers: Annotated[int, Meta(ge=0, le=2**16)] = 80
    bos_token_id: int | None = 151643


class TextFile3(Decoder, kw_only=True):
    """The fields of transformers' Qwen3VLTextConfig."""

    num_key_value_heads: Heads | None = 32
    head_dim: Size | None = 128
    max_position_embeddings: Positions = 128000
    attention_bias: bool = False


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: qwen2` configuration."""
    file = declared(published, File, where)
    return ModelConfig(**_fields(file), qkv_bias=True)


def from_qwen3(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: qwen3` configuration."""
    file = declared(published, File3, where)
    return ModelConfig(**_fields(file), qk_norm=True, qkv_bias=file.attention_bias, output_bias=file.attention_bias)


def from_qwen25_vl(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The part of a `model_type: qwen2_5_vl` configuration that is of texts; images are not read."""
    part, inside = text_config(published, ImageFile, where)
    file = declared(part, TextFile, inside)
    return ModelConfig(**_fields(file, theta=1e6, types=(*ROPE_TYPES, "mrope")), qkv_bias=True)


def from_qwen3_vl(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The part of a `model_type: qwen3_vl` configuration that is of texts; images are not read."""
    part, inside = text_config(published, ImageFile, where)
    file = declared(part, TextFile3, inside)
    fields, bias = decoder(file), file.attention_bias
    rotations = rope(file, fields["head_dim"], theta=500000.0, types=(*ROPE_TYPES, "mrope"))
    return ModelConfig(**fields, rope=rotations, qk_norm=True, qkv_bias=bias, output_bias=bias)


def _fields(file: File, **rotations: Any) -> dict[str, Any]:
    """What both have; without types the last layers have the window, if there is one."""
    fields = decoder(file)
    window, types = file.sliding_window if file.use_sliding_window else None, file.layer_types
    if window is not None and types is None:
        whole = min(file.max_window_layers, file.num_hidden_layers)
        types = ["full_attention"] * whole + ["sliding_attention"] * (file.num_hidden_layers - whole)
    return fields | sliding(window, fields, types) | {"rope": rope(file, fields["head_dim"], **rotations)}


def from_moe(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: qwen3_moe` configuration."""
    file = declared(published, MoeFile, where)
    fields = decoder(file)
    fields |= sliding(file.sliding_window if file.use_sliding_window else None, fields)
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        qk_norm=True,
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        experts=_experts(file),
    )


def from_qwen2_moe(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: qwen2_moe` configuration; without types every second layer has the window."""
    file = declared(published, Moe2File, where)
    fields = decoder(file)
    window, types = file.sliding_window if file.use_sliding_window else None, file.layer_types
    if types is None:
        slides = [window is not None and i % 2 == 0 and i < file.max_window_layers for i in range(fields["num_layers"])]
        types = ["sliding_attention" if one else "full_attention" for one in slides]
    return ModelConfig(
        **fields,
        **sliding(window, fields, types),
        rope=rope(file, fields["head_dim"]),
        qkv_bias=file.qkv_bias,
        experts=_experts(file, shared_size=file.shared_expert_intermediate_size, shared_gate=True),
    )


def _experts(file: MoeFile, **options: Any) -> Experts:
    """The experts of both, in the layers that have them."""
    single, step = set(file.mlp_only_layers or ()), file.decoder_sparse_step
    dense = tuple(number for number in range(file.num_hidden_layers) if number in single or (number + 1) % step)
    options |= {"normalize": file.norm_topk_prob, "dense_layers": dense}
    return experts(file, file.moe_intermediate_size, **options)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `from_qwen3`."""
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
