"""Mistral 7B v0.2 and v0.3: Llama's decoder without a sliding window (Jiang et al., 2023, arXiv:2310.06825)."""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, reject_sliding_window, rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


def from_hf(published: dict[str, Any]) -> ModelConfig:
    """Translate a `model_type: mistral` configuration; v0.1's sliding window is refused."""
    # The defaults of a key that the file leaves out are transformers'.
    published = {"max_position_embeddings": 131072, "num_key_value_heads": 8, **published}
    reject_sliding_window(published, window=4096, active=True)
    fields = decoder(published)
    return ModelConfig(**fields, rope=rope(published, fields["head_dim"]))
