"""Gemma 2 and Gemma 3 (text): norms on both sides of each block, windows in most layers, caps of scores and logits.

Gemma team, 2024 (arXiv:2408.00118) and 2025 (arXiv:2503.19786). Norms multiply by 1 + w; scales stay w, since bfloat16
would round the sum.
"""

import math
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import (
    Decoder,
    Heads,
    Ids,
    Layers,
    LayerTypes,
    Positions,
    RopeParameters,
    Size,
    Theta,
    activation,
    decoder,
    demand,
    rope,
    sliding,
)
from clusterkv_jax.schema import checked

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attention_out_norm.scale": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp_norm.scale": "model.layers.*.pre_feedforward_layernorm.weight",
    "layers.*.mlp_out_norm.scale": "model.layers.*.post_feedforward_layernorm.weight",
}
# What a model of texts and images holds for images.
OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")

_Positive = Annotated[float, Meta(gt=0, le=1e6)]


class _Gemma(Decoder, kw_only=True):
    # The defaults of a key that the file leaves out are transformers'.
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Heads = 8
    num_key_value_heads: Heads | None = 4
    head_dim: Size | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: _Positive = 256
    sliding_window: Size | None = 4096
    layer_types: LayerTypes | None = None
    final_logit_softcapping: _Positive | None = None
    attn_logit_softcapping: _Positive | None = None
    use_bidirectional_attention: bool | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: Ids = 1
    pad_token_id: int | None = 0


class _Gemma2(_Gemma, kw_only=True):
    vocab_size: Size = 256000
    max_position_embeddings: Positions = 8192
    final_logit_softcapping: _Positive | None = 30.0
    attn_logit_softcapping: _Positive | None = 50.0


class _Ropes(Struct):
    full_attention: RopeParameters | None = None
    sliding_attention: RopeParameters | None = None


class _Gemma3(_Gemma, kw_only=True):
    vocab_size: Size = 262208
    max_position_embeddings: Positions = 131072
    sliding_window_pattern: Layers = 6
    rope_theta: Theta | None = 1e6
    rope_local_base_freq: Theta = 1e4
    rope_parameters: _Ropes | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class _Multimodal(Struct):
    text_config: dict[str, Any]
    bos_token_id: int | None = 2
    eos_token_id: Ids = 1
    pad_token_id: int | None = 0


def from_gemma2(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: gemma2` configuration."""
    file = checked(published, _Gemma2, where)
    fields = _fields(published, file, pattern=2)
    return ModelConfig(**fields, rope=rope(file, fields["head_dim"]), soft_cap=file.attn_logit_softcapping)


def from_gemma3(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: gemma3_text` configuration."""
    file = checked(published, _Gemma3, where)
    demand(published, "attn_logit_softcapping", None)
    fields = _fields(published, file, pattern=file.sliding_window_pattern)
    ropes = file.rope_parameters or _Ropes()
    far = structs.replace(file, rope_parameters=ropes.full_attention)
    near = structs.replace(
        file, rope_parameters=ropes.sliding_attention, rope_scaling=None, rope_theta=file.rope_local_base_freq
    )
    whole, local = (rope(part, fields["head_dim"]) for part in (far, near))
    return ModelConfig(**fields, rope=whole, local_rope=local if fields["sliding_layers"] else None, qk_norm=True)


def from_multimodal(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The part of a `model_type: gemma3` configuration that is of texts; images are not read."""
    file = checked(published, _Multimodal, where)
    tokens = {name: getattr(file, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return from_gemma3(tokens | file.text_config | {"model_type": "gemma3"}, f"{where}, text_config")


def of_texts(name: str) -> str:
    """A tensor of a model of texts and images by its name in one of texts."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def _fields(published: dict[str, Any], file: _Gemma, pattern: int) -> dict[str, Any]:
    """What both have; every `pattern`-th layer sees every token."""
    if published.get("use_bidirectional_attention") is not None:
        demand(published, "use_bidirectional_attention", False)
    fields = decoder(file)
    bias = file.attention_bias
    turns = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(file.num_hidden_layers)]
    return fields | {
        "activation": activation(file.hidden_activation),
        "attention_scale": file.query_pre_attn_scalar**-0.5,
        "embedding_scale": math.sqrt(file.hidden_size),
        "norm_place": "both",
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "output_bias": bias,
        "logit_cap": file.final_logit_softcapping,
        **sliding(file.sliding_window, fields, turns if file.layer_types is None else file.layer_types),
    }
