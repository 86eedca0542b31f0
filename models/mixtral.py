"""Mixtral 8x7B and 8x22B: Mistral's decoder with experts (Jiang et al., 2024, arXiv:2401.04088)."""

from typing import Any

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import Experts, ModelConfig
from clusterkv_jax.models.hf_config import (
    Decoder,
    Epsilon,
    ExpertCount,
    Heads,
    Positions,
    Size,
    Theta,
    decoder,
    rope,
    sliding,
)
from clusterkv_jax.schema import checked

WEIGHTS = llama.WEIGHTS | {
    "layers.*.experts.router": "model.layers.*.block_sparse_moe.gate.weight",
    "layers.*.experts.gate": "model.layers.*.block_sparse_moe.experts.{expert}.w1.weight",
    "layers.*.experts.up": "model.layers.*.block_sparse_moe.experts.{expert}.w3.weight",
    "layers.*.experts.down": "model.layers.*.block_sparse_moe.experts.{expert}.w2.weight",
}


class _Mixtral(Decoder, kw_only=True):
    # The defaults of a key that the file leaves out are transformers'.
    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Positions = 131072
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Theta | None = 1e6
    sliding_window: Size | None = None
    num_local_experts: ExpertCount = 8
    num_experts_per_tok: ExpertCount = 2


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: mixtral` configuration."""
    file = checked(published, _Mixtral, where)
    fields = decoder(file)
    window = sliding(file.sliding_window, fields)
    experts = Experts(file.num_local_experts, file.num_experts_per_tok, file.intermediate_size)
    return ModelConfig(**fields, **window, rope=rope(file, fields["head_dim"]), experts=experts)
