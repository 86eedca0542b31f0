"""gpt-oss: experts with biases and a clamped gate, a sink logit for every head, every other layer with a window.

OpenAI, 2025 (arXiv:2508.10925). Published experts are in MXFP4.
"""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ClampedSwiglu, ModelConfig
from clusterkv_jax.models.hf_config import decoder, experts, sliding
from clusterkv_jax.models.hf_fields import (
    Epsilon,
    ExpertCount,
    Heads,
    LayerTypes,
    Positions,
    Published,
    RopeParameters,
    Size,
    Sparse,
    declared,
)
from clusterkv_jax.models.hf_rope import rope

_EXPERTS = "model.layers.*.mlp.experts."
WEIGHTS = llama.WEIGHTS | {
    "layers.*.attention.sink_logits": "model.layers.*.self_attn.sinks",
    "layers.*.experts.router": "model.layers.*.mlp.router.weight",
    "layers.*.experts.router_bias": "model.layers.*.mlp.router.bias",
    "layers.*.experts.gate": _EXPERTS + "gate_up_proj[{expert}, 0::2]",
    "layers.*.experts.up": _EXPERTS + "gate_up_proj[{expert}, 1::2]",
    "layers.*.experts.down": _EXPERTS + "down_proj[{expert}]",
    "layers.*.experts.gate_bias": _EXPERTS + "gate_up_proj_bias[{expert}, 0::2]",
    "layers.*.experts.up_bias": _EXPERTS + "gate_up_proj_bias[{expert}, 1::2]",
    "layers.*.experts.down_bias": _EXPERTS + "down_proj_bias[{expert}]",
}
_Limit = Annotated[float, Meta(gt=0, le=1e6)]


class File(Sparse, kw_only=True):
    """The fields of transformers' GptOssConfig."""

    default_experts = 128
    assumed: ClassVar = {**Published.assumed, "hidden_act": ("silu",)}

    num_key_value_heads: Heads | None = 8
    head_dim: Size | None = 64
    max_position_embeddings: Positions = 131072
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = True
    sliding_window: Size | None = 128
    layer_types: LayerTypes | None = None
    num_experts_per_tok: ExpertCount = 4
    swiglu_limit: _Limit = 7.0
    swiglu_alpha: _Limit = 1.702


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: gpt_oss` configuration."""
    file = declared(published, File, where)
    if file.rope_scaling in (None, RopeParameters()) and file.rope_parameters is None:
        file.rope_scaling = RopeParameters(
            rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096
        )
    fields = decoder(file)
    turns = ["full_attention" if i % 2 else "sliding_attention" for i in range(file.num_hidden_layers)]
    return ModelConfig(
        **fields,
        **sliding(file.sliding_window, fields, turns if file.layer_types is None else file.layer_types),
        rope=rope(file, fields["head_dim"], theta=150000.0),
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        sink_logits=True,
        experts=experts(
            file, file.intermediate_size, bias=True, clamp=ClampedSwiglu(file.swiglu_limit, file.swiglu_alpha)
        ),
    )
