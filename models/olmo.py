"""OLMo 2: norms of what blocks add, and of queries and keys over all heads (OLMo team, 2025, arXiv:2501.00656).

OLMo 3 has windows in three layers of four, and scales the rotations of the others alone.
"""

from typing import Any

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, sliding, sliding_but_every
from clusterkv_jax.models.hf_fields import (
    Decoder,
    Epsilon,
    LayerTypes,
    Positions,
    Published,
    RopesByLayer,
    Size,
    declared,
)
from clusterkv_jax.models.hf_rope import rope, ropes_by_layer

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


class File3(File, kw_only=True):
    """The fields of transformers' Olmo3Config."""

    assumed = Published.assumed

    sliding_window: Size | None = 4096
    layer_types: LayerTypes | None = None
    rope_parameters: RopesByLayer | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: olmo2` configuration."""
    file = declared(published, File, where)
    fields = _fields(file)
    return ModelConfig(**fields, rope=rope(file, fields["head_dim"]))


def from_olmo3(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: olmo3` configuration."""
    file = declared(published, File3, where)
    far, near = ropes_by_layer(file, theta=file.rope_theta)
    fields = _fields(far)
    types = sliding_but_every(4, file.num_hidden_layers) if file.layer_types is None else file.layer_types
    fields |= sliding(file.sliding_window, fields, types, own_rotations=True)
    whole, local = (rope(part, fields["head_dim"], theta=500000.0) for part in (far, near))
    return ModelConfig(**fields, rope=whole, local_rope=local if fields["sliding_layers"] else None)


def _fields(file: File) -> dict[str, Any]:
    """What both have."""
    return decoder(file) | {
        "norm_place": "after",
        "qk_norm": True,
        "qk_norm_whole": True,
        "qkv_bias": file.attention_bias,
        "output_bias": file.attention_bias,
    }
