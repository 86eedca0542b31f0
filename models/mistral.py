"""Mistral 7B: Llama's decoder, in v0.1 with a sliding window in every layer (Jiang et al., 2023, arXiv:2310.06825)."""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import Decoder, Heads, Positions, Size, decoder, rope, sliding
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS
from clusterkv_jax.schema import checked


class _Mistral(Decoder, kw_only=True):
    # The defaults of a key that the file leaves out are transformers'.
    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Positions = 131072
    sliding_window: Size | None = 4096


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: mistral` configuration."""
    file = checked(published, _Mistral, where)
    fields = decoder(file)
    window = sliding(file.sliding_window, fields)
    return ModelConfig(**fields, **window, rope=rope(file, fields["head_dim"]))
