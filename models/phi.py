"""Phi-3, Phi-3.5 and Phi-4: Llama's decoder with fused projections, LongRoPE, and rotations of a part of each head.

Microsoft, 2024 (arXiv:2404.14219, arXiv:2412.08905) and 2025 (arXiv:2503.01743).
"""

from typing import Any

from clusterkv_jax.models import llama
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, sliding
from clusterkv_jax.models.hf_fields import Decoder, Epsilon, Positions, Size, declared
from clusterkv_jax.models.hf_rope import rope

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attention.q": "model.layers.*.self_attn.qkv_proj.weight",
    "layers.*.attention.k": "model.layers.*.self_attn.qkv_proj.weight",
    "layers.*.attention.v": "model.layers.*.self_attn.qkv_proj.weight",
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_up_proj.weight",
    "layers.*.mlp.up": "model.layers.*.mlp.gate_up_proj.weight",
}


class File(Decoder, kw_only=True):
    """The fields of transformers' Phi3Config."""

    default_eos = 32000
    without_effect = Decoder.without_effect | {"resid_pdrop", "embd_pdrop"}

    max_position_embeddings: Positions = 4096
    original_max_position_embeddings: Positions | None = 4096
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Size | None = None
    bos_token_id: int | None = 1
    pad_token_id: int | None = 32000


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: phi3` configuration."""
    file = declared(published, File, where)
    fields = decoder(file)
    window = sliding(file.sliding_window, fields)
    rotations = rope(file, fields["head_dim"], fraction=1.0, types=("default", "longrope"))
    return ModelConfig(**fields, **window, rope=rotations)
