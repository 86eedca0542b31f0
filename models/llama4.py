"""Llama 4 (Scout, Maverick), texts alone: one expert a token and one for all, layers that do not rotate (Meta, 2025).

Queries of layers that do not rotate are longer the farther they stand; the others have norms without scales. Those see
the tokens of a chunk alone: texts of one chunk are read, and no longer ones.
"""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig, QueryScaling
from clusterkv_jax.models.hf_config import decoder, experts, unrotated
from clusterkv_jax.models.hf_fields import (
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
    refuse,
)
from clusterkv_jax.models.hf_multimodal import Multimodal as WithImages
from clusterkv_jax.models.hf_multimodal import text_config
from clusterkv_jax.models.hf_rope import rope

_MLP = "model.layers.*.feed_forward."
WEIGHTS = {name: tensor.replace(".mlp.", ".feed_forward.") for name, tensor in llama.WEIGHTS.items()} | {
    "layers.*.experts.router": _MLP + "router.weight",
    "layers.*.experts.gate": _MLP + "experts.gate_up_proj[{expert}]",
    "layers.*.experts.up": _MLP + "experts.gate_up_proj[{expert}]",
    "layers.*.experts.down": _MLP + "experts.down_proj[{expert}]",
    "layers.*.shared_mlp.gate": _MLP + "shared_expert.gate_proj.weight",
    "layers.*.shared_mlp.up": _MLP + "shared_expert.up_proj.weight",
    "layers.*.shared_mlp.down": _MLP + "shared_expert.down_proj.weight",
}
_Numbers = Annotated[list[int], Meta(max_length=1024)]


class File(Sparse, kw_only=True):
    """The fields of transformers' Llama4TextConfig; an entry of `no_rope_layers` is 0 for a layer without rotations."""

    default_eos, default_experts = 2, 16
    assumed: ClassVar = {**Published.assumed, "num_experts_per_tok": (1,)}
    without_effect = Sparse.without_effect | {"router_jitter_noise"}

    intermediate_size_mlp: Size = 16384
    num_key_value_heads: Heads | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Positions = 131072
    rms_norm_eps: Epsilon = 1e-5
    num_experts_per_tok: ExpertCount = 1
    moe_layers: _Numbers | None = None
    interleave_moe_layer_step: Layers = 1
    use_qk_norm: bool = True
    no_rope_layers: _Numbers | None = None
    no_rope_layer_interval: Layers = 4
    attention_chunk_size: Positions | None = 8192
    layer_types: LayerTypes | None = None
    attn_temperature_tuning: bool = True
    floor_scale: Positions = 8192
    attn_scale: Annotated[float, Meta(ge=0, le=1e6)] = 0.1
    attention_bias: bool = False
    bos_token_id: int | None = 1


class Multimodal(WithImages, kw_only=True):
    """The fields of transformers' Llama4Config; what is of images is not read."""

    without_effect = WithImages.without_effect | {"boi_token_index", "eoi_token_index"}


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: llama4_text` configuration."""
    file = declared(published, File, where)
    fields: dict[str, Any] = decoder(file) | {"intermediate_size": file.intermediate_size_mlp}
    count, step = file.num_hidden_layers, file.interleave_moe_layer_step
    rotates = file.no_rope_layers or [(layer + 1) % file.no_rope_layer_interval for layer in range(count)]
    still = unrotated(rotates, count)
    if file.attention_chunk_size is not None and _in_chunks(file, len(still) < count):
        fields["max_positions"] = min(fields["max_positions"], file.attention_chunk_size)
    sparse = range(step - 1, count, step) if file.moe_layers is None else file.moe_layers
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"], theta=500000.0, interleaved=True),
        unrotated_layers=still,
        query_scaling=QueryScaling(file.attn_scale, file.floor_scale, 1) if _tunes(file, still) else None,
        qk_norm=file.use_qk_norm,
        qk_norm_scales=False,
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        experts=experts(
            file,
            file.intermediate_size,
            normalize=False,
            dense_layers=tuple(layer for layer in range(count) if layer not in sparse),
            sigmoid=True,
            scales_inputs=True,
            shared_size=file.intermediate_size,
        ),
    )


def from_multimodal(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The part of a `model_type: llama4` configuration that is of texts; images are not read."""
    return from_hf(*text_config(published, Multimodal, where))


def _in_chunks(file: File, some_rotate: bool) -> bool:
    """Whether some layers see a chunk alone; without types those that rotate do."""
    for layer, name in enumerate(file.layer_types or ()):
        if name not in ("full_attention", "chunked_attention"):
            refuse(f"layer_types[{layer}]", name, "full_attention", "chunked_attention")
    return some_rotate if file.layer_types is None else "chunked_attention" in file.layer_types


def _tunes(file: File, still: tuple[int, ...]) -> bool:
    """Whether there are layers whose queries grow."""
    return file.attn_temperature_tuning and bool(still)
