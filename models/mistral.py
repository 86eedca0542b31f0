"""Mistral 7B: Llama's decoder, in v0.1 with a sliding window in every layer (Jiang et al., 2023, arXiv:2310.06825)."""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, sliding
from clusterkv_jax.models.hf_fields import Decoder, Heads, LayerTypes, Positions, Published, Size, declared
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


class File(Decoder, kw_only=True):
    """The fields of transformers' MistralConfig, and the types of layers, with which it reads a file as Ministral's."""

    default_eos = 2
    assumed = Published.assumed

    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Positions = 131072
    sliding_window: Size | None = 4096
    layer_types: LayerTypes | None = None
    bos_token_id: int | None = 1


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: mistral` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    window = sliding(file.sliding_window, fields, file.layer_types)
    return ModelConfig(**fields, **window, rope=rope(file, fields["head_dim"]))
