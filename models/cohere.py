"""Cohere 2 (Command R7B, Command A): attention and MLP side by side behind one norm (Cohere, 2024 and 2025).

Layers with a window rotate queries and keys, the others do not.
"""

from typing import Annotated, Any

from msgspec import Meta

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, sliding, sliding_but_every, unrotated
from clusterkv_jax.models.hf_fields import (
    Decoder,
    Epsilon,
    Layers,
    LayerTypes,
    Positions,
    Published,
    Size,
    declared,
    refuse,
)
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


class File(Decoder, kw_only=True):
    """The fields of transformers' Cohere2Config."""

    default_eos = 255001
    assumed = Published.assumed

    max_position_embeddings: Positions = 8192
    layer_norm_eps: Epsilon = 1e-5
    logit_scale: Annotated[float, Meta(gt=0, le=1e6)] = 0.0625
    attention_bias: bool = False
    sliding_window: Size | None = 4096
    sliding_window_pattern: Layers = 4
    layer_types: LayerTypes | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 5
    pad_token_id: int | None = 0


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: cohere2` configuration."""
    file = declared(published, File, where)
    fields: dict[str, Any] = decoder(file) | {"norm_eps": file.layer_norm_eps}
    if fields["head_dim"] != file.hidden_size // file.num_attention_heads:
        refuse("head_dim", file.head_dim, file.hidden_size // file.num_attention_heads)
    types, count = file.layer_types, file.num_hidden_layers
    if types is None:
        types = (
            sliding_but_every(file.sliding_window_pattern, count) if file.sliding_window else ["full_attention"] * count
        )
    return ModelConfig(
        **fields,
        **sliding(file.sliding_window, fields, types),
        rope=rope(file, fields["head_dim"], interleaved=True),
        unrotated_layers=unrotated([name == "sliding_attention" for name in types], count),
        norm="layer",
        norm_bias=False,
        parallel_blocks=True,
        logit_scale=file.logit_scale,
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
    )
