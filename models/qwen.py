"""Qwen2 and Qwen2.5 (bias on queries, keys and values), Qwen3 (norm on queries and keys).

Yang et al., 2024 (arXiv:2407.10671) and 2025 (arXiv:2505.09388).
"""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, reject_sliding_window, rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


def from_hf(published: dict[str, Any]) -> ModelConfig:
    """Translate a `model_type: qwen2` or `qwen3` configuration; an active sliding window is refused."""
    published = {"max_position_embeddings": 32768, "num_key_value_heads": 32, **published}
    reject_sliding_window(published, window=4096, active=False)
    if published["model_type"] == "qwen2":
        fields = decoder(published)
        return ModelConfig(**fields, rope=rope(published, fields["head_dim"]), qkv_bias=True)
    fields = decoder({"head_dim": 128, **published})
    bias = published.get("attention_bias", False)
    return ModelConfig(
        **fields, rope=rope(published, fields["head_dim"]), qk_norm=True, qkv_bias=bias, output_bias=bias
    )
