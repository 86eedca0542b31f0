"""Mistral 7B: Llama's decoder, in v0.1 with a sliding window in every layer (Jiang et al., 2023, arXiv:2310.06825).

Ministral 8B has windows in some layers, Ministral 3 longer queries the farther they stand. Mistral Small 3.1 and later
models read images too.
"""

from typing import Any

from clusterkv_jax.models.config import ModelConfig, QueryScaling
from clusterkv_jax.models.hf_config import decoder, sliding
from clusterkv_jax.models.hf_fields import (
    Decoder,
    Epsilon,
    Heads,
    LayerTypes,
    Positions,
    Published,
    RopeParameters,
    Size,
    declared,
    demand,
)
from clusterkv_jax.models.hf_multimodal import Multimodal as WithImages
from clusterkv_jax.models.hf_multimodal import text_config
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


class File(Decoder, kw_only=True):
    """The fields of transformers' MistralConfig and MinistralConfig, which differ in the types of layers alone."""

    default_eos = 2
    assumed = Published.assumed

    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Positions = 131072
    sliding_window: Size | None = 4096
    layer_types: LayerTypes | None = None
    bos_token_id: int | None = 1


class File3(Decoder, kw_only=True):
    """The fields of transformers' Ministral3Config."""

    default_eos = 2

    num_key_value_heads: Heads | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Positions = 262144
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Size | None = None
    bos_token_id: int | None = 1
    pad_token_id: int | None = 11


_ROPE_3 = RopeParameters(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)


class Multimodal(WithImages, kw_only=True):
    """The fields of transformers' Mistral3Config; what is of images is not read."""

    without_effect = WithImages.without_effect | {
        *("projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size")
    }

    tie_word_embeddings: bool | None = True


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: mistral` or `model_type: ministral` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    window = sliding(file.sliding_window, fields, file.layer_types)
    return ModelConfig(**fields, **window, rope=rope(file, fields["head_dim"]))


def from_ministral3(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: ministral3` configuration."""
    file = declared(published, File3, where)
    stated = file.rope_parameters or file.rope_scaling
    if stated is None:
        file.rope_parameters = stated = _ROPE_3
    fields, scaling = decoder(file), None
    if stated.llama_4_scaling_beta is not None:
        length = stated.original_max_position_embeddings or file.max_position_embeddings
        scaling = QueryScaling(stated.llama_4_scaling_beta, length)
    window = sliding(file.sliding_window, fields)
    return ModelConfig(**fields, **window, rope=rope(file, fields["head_dim"]), query_scaling=scaling)


def from_multimodal(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The part of a `model_type: mistral3` configuration that is of texts; images are not read."""
    part, inside = text_config(published, Multimodal, where)
    of_texts = published.get("text_config") or {}
    demand(of_texts, "model_type", "mistral", "ministral3")
    return (from_ministral3 if of_texts.get("model_type") == "ministral3" else from_hf)(part, inside)
