"""Qwen2 and Qwen2.5 (bias on queries, keys and values), Qwen3 (norm on queries and keys).

Yang et al., 2024 (arXiv:2407.10671) and 2025 (arXiv:2505.09388).
"""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import (
    Decoder,
    Heads,
    Positions,
    Size,
    decoder,
    decoder_to_hf,
    reject_sliding_window,
    rope,
)
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS
from clusterkv_jax.schema import checked


class _Qwen2(Decoder, kw_only=True):
    num_key_value_heads: Heads | None = 32
    max_position_embeddings: Positions = 32768
    sliding_window: Size | None = 4096
    use_sliding_window: bool = False


class _Qwen3(_Qwen2, kw_only=True):
    head_dim: Size | None = 128


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: qwen2` or `qwen3` configuration; an active sliding window is refused."""
    file = checked(published, _Qwen2 if published.get("model_type") == "qwen2" else _Qwen3, where)
    if file.use_sliding_window:
        reject_sliding_window(file.sliding_window, file.max_position_embeddings)
    fields = decoder(file)
    rotations = rope(file, fields["head_dim"])
    if file.model_type == "qwen2":
        return ModelConfig(**fields, rope=rotations, qkv_bias=True)
    bias = file.attention_bias
    return ModelConfig(**fields, rope=rotations, qk_norm=True, qkv_bias=bias, output_bias=bias)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `from_hf` for `model_type: qwen3`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **decoder_to_hf(config),
        "use_sliding_window": False,
        "sliding_window": None,
    }
