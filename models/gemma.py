"""Gemma 1; Gemma 2 and 3 (text): norms on both sides of each block, windows in most layers, caps of scores and logits.

Gemma team, 2024 (arXiv:2403.08295, arXiv:2408.00118) and 2025 (arXiv:2503.19786). Norms multiply by 1 + w; scales stay
w, since bfloat16 would round the sum.
"""

import math
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import activation, decoder, sliding, sliding_but_every
from clusterkv_jax.models.hf_fields import (
    Decoder,
    Heads,
    Layers,
    LayerTypes,
    Positions,
    Published,
    RopesByLayer,
    Size,
    Theta,
    declared,
)
from clusterkv_jax.models.hf_multimodal import Multimodal as WithImages
from clusterkv_jax.models.hf_multimodal import text_config
from clusterkv_jax.models.hf_rope import rope, ropes_by_layer

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attention_out_norm.scale": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp_norm.scale": "model.layers.*.pre_feedforward_layernorm.weight",
    "layers.*.mlp_out_norm.scale": "model.layers.*.post_feedforward_layernorm.weight",
}

_Positive = Annotated[float, Meta(gt=0, le=1e6)]


class File1(Decoder, kw_only=True):
    """The fields of transformers' GemmaConfig."""

    default_eos = 1
    assumed: ClassVar = {**Decoder.assumed, "use_bidirectional_attention": (False, None)}

    head_dim: Size | None = 256
    max_position_embeddings: Positions = 8192
    hidden_act: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    pad_token_id: int | None = 0


class File(Decoder, kw_only=True):
    """What the classes of Gemma 2 and 3 in transformers have in common."""

    default_eos = 1
    assumed: ClassVar = {**Published.assumed, "use_bidirectional_attention": (False, None)}

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
    attention_bias: bool = False
    final_logit_softcapping: _Positive | None = None
    attn_logit_softcapping: _Positive | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    pad_token_id: int | None = 0


class File2(File, kw_only=True):
    """The fields of transformers' Gemma2Config."""

    vocab_size: Size = 256000
    max_position_embeddings: Positions = 8192
    final_logit_softcapping: _Positive | None = 30.0
    attn_logit_softcapping: _Positive | None = 50.0


class File3(File, kw_only=True):
    """The fields of transformers' Gemma3TextConfig."""

    assumed: ClassVar = {**File.assumed, "attn_logit_softcapping": (None,)}

    vocab_size: Size = 262208
    max_position_embeddings: Positions = 131072
    sliding_window_pattern: Layers = 6
    rope_local_base_freq: Theta = 1e4
    rope_parameters: RopesByLayer | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class Multimodal(WithImages, kw_only=True):
    """The fields of transformers' Gemma3Config; what is of images is not read."""

    without_effect = WithImages.without_effect | {"mm_tokens_per_image", "boi_token_index", "eoi_token_index"}

    tie_word_embeddings: bool | None = True


def from_gemma(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: gemma` configuration."""
    file = declared(published, File1, where)
    fields: dict[str, Any] = decoder(file) | {"embedding_scale": math.sqrt(file.hidden_size), "norm_offset": 1.0}
    if file.hidden_act == "gelu":  # what the first files say and did not mean
        fields["activation"] = "gelu_tanh"
    bias = file.attention_bias
    return ModelConfig(**fields, rope=rope(file, fields["head_dim"]), qkv_bias=bias, output_bias=bias)


def from_gemma2(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: gemma2` configuration."""
    file = declared(published, File2, where)
    fields = _fields(file, pattern=2)
    return ModelConfig(**fields, rope=rope(file, fields["head_dim"]), soft_cap=file.attn_logit_softcapping)


def from_gemma3(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: gemma3_text` configuration."""
    file = declared(published, File3, where)
    far, near = ropes_by_layer(file, theta=file.rope_local_base_freq)
    fields = _fields(far, pattern=file.sliding_window_pattern, own_rotations=True)
    whole, local = (rope(part, fields["head_dim"], theta=1e6) for part in (far, near))
    return ModelConfig(**fields, rope=whole, local_rope=local if fields["sliding_layers"] else None, qk_norm=True)


def from_multimodal(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The part of a `model_type: gemma3` configuration that is of texts; images are not read."""
    return from_gemma3(*text_config(published, Multimodal, where))


def _fields(file: File, pattern: int, own_rotations: bool = False) -> dict[str, Any]:
    """What both have; every `pattern`-th layer sees every token."""
    fields = decoder(file)
    bias = file.attention_bias
    turns = sliding_but_every(pattern, file.num_hidden_layers)
    return fields | {
        "activation": activation(file.hidden_activation),
        "attention_scale": file.query_pre_attn_scalar**-0.5,
        "embedding_scale": math.sqrt(file.hidden_size),
        "norm_place": "both",
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "output_bias": bias,
        "logit_cap": file.final_logit_softcapping,
        **sliding(
            file.sliding_window,
            fields,
            turns if file.layer_types is None else file.layer_types,
            own_rotations=own_rotations,
        ),
    }
