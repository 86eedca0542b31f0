"""Mixtral 8x7B and 8x22B: Mistral's decoder with experts (Jiang et al., 2024, arXiv:2401.04088)."""

from typing import Any

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, experts, sliding
from clusterkv_jax.models.hf_fields import Epsilon, ExpertCount, Heads, Positions, Size, Sparse, declared
from clusterkv_jax.models.hf_rope import rope

WEIGHTS = llama.WEIGHTS | {
    "layers.*.experts.router": "model.layers.*.block_sparse_moe.gate.weight",
    "layers.*.experts.gate": "model.layers.*.block_sparse_moe.experts.{expert}.w1.weight",
    "layers.*.experts.up": "model.layers.*.block_sparse_moe.experts.{expert}.w3.weight",
    "layers.*.experts.down": "model.layers.*.block_sparse_moe.experts.{expert}.w2.weight",
}


class File(Sparse, kw_only=True):
    """The fields of transformers' MixtralConfig."""

    default_eos, default_experts = 2, 8
    # Noise for training.
    without_effect = Sparse.without_effect | {"router_jitter_noise"}

    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Positions = 131072
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Size | None = None
    num_experts_per_tok: ExpertCount = 2
    bos_token_id: int | None = 1


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: mixtral` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    window = sliding(file.sliding_window, fields)
    rotations = rope(file, fields["head_dim"], theta=1e6)
    return ModelConfig(**fields, **window, rope=rotations, experts=experts(file, file.intermediate_size))
