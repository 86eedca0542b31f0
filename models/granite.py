"""Granite 3: Llama's decoder with multipliers of embeddings, attention, what blocks add, and logits (IBM, 2024).

Granite 4 without experts and state-space layers is the same, by other names (IBM, 2025).
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder
from clusterkv_jax.models.hf_fields import Decoder, LayerTypes, Positions, Published, Size, declared, refuse
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS

WEIGHTS_4 = WEIGHTS | {
    "layers.*.mlp.gate": "model.layers.*.shared_mlp.input_linear.weight",
    "layers.*.mlp.up": "model.layers.*.shared_mlp.input_linear.weight",
    "layers.*.mlp.down": "model.layers.*.shared_mlp.output_linear.weight",
}
_Multiplier = Annotated[float, Meta(ge=1e-6, le=1e6)]


class File(Decoder, kw_only=True):
    """The fields of transformers' GraniteConfig."""

    default_eos = 2

    max_position_embeddings: Positions = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: _Multiplier = 1.0
    attention_multiplier: _Multiplier = 1.0
    residual_multiplier: _Multiplier = 1.0
    logits_scaling: _Multiplier = 1.0
    bos_token_id: int | None = 1


class File4(File, kw_only=True):
    """The fields of transformers' GraniteMoeHybridConfig, of models that are no hybrids."""

    assumed: ClassVar = {**Published.assumed, "output_router_logits": (False,)}
    # Of experts and of state-space layers, and there are neither.
    without_effect = File.without_effect | {
        *("num_experts_per_tok", "router_aux_loss_coef", "time_step_limit"),
        *(f"mamba_{part}" for part in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size")),
        *("mamba_conv_bias", "mamba_proj_bias"),
    }

    shared_intermediate_size: Size = 1024
    layer_types: LayerTypes | None = None
    num_local_experts: int | None = 8
    position_embedding_type: str | None = None


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: granite` configuration."""
    return _config(declared(published, File, where))


def from_granite4(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: granitemoehybrid` configuration whose layers all attend, to one MLP each."""
    file = declared(published, File4, where)
    types, count = file.layer_types, file.num_hidden_layers
    if types not in (["attention"] * count, ["full_attention"] * count):
        refuse("layer_types", types, f"'attention' for each of {count} layers")
    if file.num_local_experts != 0:
        refuse("num_local_experts", file.num_local_experts, 0)
    if file.position_embedding_type != "rope":
        refuse("position_embedding_type", file.position_embedding_type, "'rope'")
    return replace(_config(file), intermediate_size=file.shared_intermediate_size)


def _config(file: File) -> ModelConfig:
    fields = decoder(file)
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
        embedding_scale=file.embedding_multiplier,
        attention_scale=file.attention_multiplier,
        residual_scale=file.residual_multiplier,
        logit_scale=1 / file.logits_scaling,
    )
