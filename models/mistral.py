"""Mistral 7B: Llama's decoder, in v0.1 with a sliding window in every layer (Jiang et al., 2023, arXiv:2310.06825).

Ministral 8B has windows in some layers, Mistral Small 3.1 and later read images too.
"""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, sliding
from clusterkv_jax.models.hf_fields import Decoder, Heads, LayerTypes, Positions, Published, Size, declared, demand
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


class Multimodal(WithImages, kw_only=True):
    """The fields of transformers' Mistral3Config; what is of images is not read."""

    without_effect = WithImages.without_effect | {
        *("projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"),
    }

    tie_word_embeddings: bool | None = True


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: mistral` or `model_type: ministral` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    window = sliding(file.sliding_window, fields, file.layer_types)
    return ModelConfig(**fields, **window, rope=rope(file, fields["head_dim"]))


def from_multimodal(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The part of a `model_type: mistral3` configuration that is of texts; images are not read."""
    part, inside = text_config(published, Multimodal, where)
    demand(published.get("text_config") or {}, "model_type", "mistral")
    return from_hf(part, inside)
