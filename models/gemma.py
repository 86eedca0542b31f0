"""Gemma 2 and Gemma 3 (text): norms on both sides of each block, windows in most layers, caps of scores and logits.

Gemma team, 2024 (arXiv:2408.00118) and 2025 (arXiv:2503.19786). Norms multiply by 1 + w; scales stay w, since bfloat16
would round the sum.
"""

import math
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, Struct, structs

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import activation, decoder, sliding
from clusterkv_jax.models.hf_fields import (
    Decoder,
    Heads,
    Layers,
    LayerTypes,
    Positions,
    Published,
    RopeParameters,
    Size,
    Theta,
    declared,
)
from clusterkv_jax.models.hf_rope import rope

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attention_out_norm.scale": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.mlp_norm.scale": "model.layers.*.pre_feedforward_layernorm.weight",
    "layers.*.mlp_out_norm.scale": "model.layers.*.post_feedforward_layernorm.weight",
}
# What a model of texts and images holds for images.
OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")

_Positive = Annotated[float, Meta(gt=0, le=1e6)]


class File(Decoder, kw_only=True):
    """What Gemma's classes in transformers have in common."""

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


class _Ropes(Struct):
    full_attention: RopeParameters | None = None
    sliding_attention: RopeParameters | None = None


class File3(File, kw_only=True):
    """The fields of transformers' Gemma3TextConfig."""

    assumed: ClassVar = {**File.assumed, "attn_logit_softcapping": (None,)}

    vocab_size: Size = 262208
    max_position_embeddings: Positions = 131072
    sliding_window_pattern: Layers = 6
    rope_local_base_freq: Theta = 1e4
    rope_parameters: _Ropes | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class Multimodal(Published, kw_only=True):
    """The fields of transformers' Gemma3Config; what is of images is not read."""

    without_effect = Published.without_effect | {
        *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    }

    text_config: dict[str, Any]
    tie_word_embeddings: bool | None = True


def from_gemma2(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: gemma2` configuration."""
    file = declared(published, File2, where)
    fields = _fields(file, pattern=2)
    return ModelConfig(**fields, rope=rope(file, fields["head_dim"]), soft_cap=file.attn_logit_softcapping)


def from_gemma3(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: gemma3_text` configuration."""
    file = declared(published, File3, where)
    ropes = file.rope_parameters or _Ropes()
    far = structs.replace(file, rope_parameters=ropes.full_attention, original_max_position_embeddings=None)
    near = structs.replace(
        far, rope_parameters=ropes.sliding_attention, rope_scaling=None, rope_theta=file.rope_local_base_freq
    )
    fields = _fields(far, pattern=file.sliding_window_pattern, own_rotations=True)
    whole, local = (rope(part, fields["head_dim"], theta=1e6) for part in (far, near))
    return ModelConfig(**fields, rope=whole, local_rope=local if fields["sliding_layers"] else None, qk_norm=True)


def from_multimodal(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The part of a `model_type: gemma3` configuration that is of texts; images are not read."""
    file = declared(published, Multimodal, where)
    outer = {"model_type": "gemma3", "tie_word_embeddings": file.tie_word_embeddings or False}
    # Its ids come before those of the part, where it has any.
    ids = {name: getattr(file, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    stated = {name: value for name, value in ids.items() if value not in (None, UNSET)}
    return from_gemma3(file.text_config | outer | stated, f"{where}, text_config")


def of_texts(name: str) -> str:
    """A tensor of a model of texts and images by its name in one of texts."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def _fields(file: File, pattern: int, own_rotations: bool = False) -> dict[str, Any]:
    """What both have; every `pattern`-th layer sees every token."""
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
        **sliding(
            file.sliding_window,
            fields,
            turns if file.layer_types is None else file.layer_types,
            own_rotations=own_rotations,
        ),
    }
