"""EXAONE 4: norms of what blocks add, and of queries and keys; layers without a window do not rotate.

LG AI Research, 2025 (arXiv:2507.11407). Without windows, in the small models, every layer rotates.
"""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, sliding, sliding_but_every, unrotated
from clusterkv_jax.models.hf_fields import (
    Decoder,
    Epsilon,
    Heads,
    LayerTypes,
    Positions,
    Published,
    Size,
    declared,
    refuse,
)
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.olmo import WEIGHTS as WEIGHTS


class File(Decoder, kw_only=True):
    """The fields of transformers' Exaone4Config."""

    default_eos = 2
    assumed = Published.assumed

    num_key_value_heads: Heads | None = 32
    max_position_embeddings: Positions = 2048
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Size | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: LayerTypes | None = None
    bos_token_id: int | None = 0


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: exaone4` configuration."""
    file = declared(published, File, where)
    fields, count = decoder(file), file.num_hidden_layers
    types, pattern = file.layer_types, file.sliding_window_pattern
    if types is None and file.sliding_window is not None:
        if not isinstance(pattern, int) or pattern < 1:
            refuse("sliding_window_pattern", pattern, "a whole number of at least 1, or layer_types")
        types = sliding_but_every(pattern, count)
    fields |= sliding(file.sliding_window, fields, types if types is not None else ["full_attention"] * count)
    whole = file.sliding_window is not None
    return ModelConfig(
        **fields,
        rope=rope(file, fields["head_dim"]),
        unrotated_layers=unrotated([name == "sliding_attention" for name in types or ()], count) if whole else (),
        norm_place="after",
        qk_norm=True,
    )
