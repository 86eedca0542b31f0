"""SmolLM3: Llama's decoder, of which every fourth layer does not rotate queries and keys (Hugging Face, 2025)."""

from typing import Annotated, Any

from msgspec import Meta

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import decoder, sliding, unrotated
from clusterkv_jax.models.hf_fields import Decoder, Heads, Layers, LayerTypes, Positions, Published, Size, declared
from clusterkv_jax.models.hf_rope import rope
from clusterkv_jax.models.llama import WEIGHTS as WEIGHTS


class File(Decoder, kw_only=True):
    """The fields of transformers' SmolLM3Config; an entry of `no_rope_layers` is 0 for a layer that does not rotate."""

    default_eos = 128001
    assumed = Published.assumed

    num_key_value_heads: Heads | None = 4
    max_position_embeddings: Positions = 32768
    use_sliding_window: bool = False
    sliding_window: Size | None = None
    no_rope_layers: Annotated[list[int], Meta(max_length=1024)] | None = None
    no_rope_layer_interval: Layers = 4
    layer_types: LayerTypes | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 128000
    pad_token_id: int | None = 128004


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: smollm3` configuration; without types the layers that do not rotate have the window."""
    file = declared(published, File, where)
    fields, count = decoder(file), file.num_hidden_layers
    rotates = file.no_rope_layers
    if rotates is None:
        rotates = [(layer + 1) % file.no_rope_layer_interval for layer in range(count)]
    still = unrotated(rotates, count)
    window, types = file.sliding_window if file.use_sliding_window else None, file.layer_types
    if window is not None and types is None:
        types = ["sliding_attention" if layer in still else "full_attention" for layer in range(count)]
    return ModelConfig(
        **fields,
        **sliding(window, fields, types),
        rope=rope(file, fields["head_dim"], theta=2e6),
        unrotated_layers=still,
        qkv_bias=file.attention_bias,
        output_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
    )
