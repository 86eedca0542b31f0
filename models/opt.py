"""OPT: learned positions, LayerNorm before each block, biases, ReLU (Zhang et al., 2022, arXiv:2205.01068)."""

from typing import Any, ClassVar

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import activation, family_and_tokens
from clusterkv_jax.models.hf_fields import Heads, Layers, Positions, Published, Size, declared, refuse

WEIGHTS = {
    "embed": "model.decoder.embed_tokens.weight",
    "positions": "model.decoder.embed_positions.weight",
    "layers.*.attention_norm.scale": "model.decoder.layers.*.self_attn_layer_norm.weight",
    "layers.*.attention_norm.bias": "model.decoder.layers.*.self_attn_layer_norm.bias",
    "layers.*.attention.q": "model.decoder.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.k": "model.decoder.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.v": "model.decoder.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.o": "model.decoder.layers.*.self_attn.out_proj.weight",
    "layers.*.attention.q_bias": "model.decoder.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.k_bias": "model.decoder.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.v_bias": "model.decoder.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.o_bias": "model.decoder.layers.*.self_attn.out_proj.bias",
    "layers.*.mlp_norm.scale": "model.decoder.layers.*.final_layer_norm.weight",
    "layers.*.mlp_norm.bias": "model.decoder.layers.*.final_layer_norm.bias",
    "layers.*.mlp.up": "model.decoder.layers.*.fc1.weight",
    "layers.*.mlp.down": "model.decoder.layers.*.fc2.weight",
    "layers.*.mlp.up_bias": "model.decoder.layers.*.fc1.bias",
    "layers.*.mlp.down_bias": "model.decoder.layers.*.fc2.bias",
    "final_norm.scale": "model.decoder.final_layer_norm.weight",
    "final_norm.bias": "model.decoder.final_layer_norm.bias",
    "lm_head": "lm_head.weight",
}


def rename(name: str) -> str:
    """Older files call `decoder.*` what newer ones call `model.decoder.*`."""
    return f"model.{name}" if name.startswith("decoder.") else name


class File(Published, kw_only=True):
    """The fields of transformers' OPTConfig."""

    default_eos = 2
    assumed: ClassVar = {
        **Published.assumed,
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    }
    without_effect = Published.without_effect | {"dropout", "layerdrop", "init_std"}

    vocab_size: Size
    hidden_size: Size
    ffn_dim: Size
    num_hidden_layers: Layers
    num_attention_heads: Heads
    max_position_embeddings: Positions = 2048
    word_embed_proj_dim: Size | None = None
    activation_function: str = "relu"
    enable_bias: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    pad_token_id: int | None = 1


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a `model_type: opt` configuration; the post-norm 350M variant is refused."""
    file = declared(published, File, where)
    if file.word_embed_proj_dim not in (None, file.hidden_size):
        refuse("word_embed_proj_dim", file.word_embed_proj_dim, file.hidden_size)
    return ModelConfig(
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.ffn_dim,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=file.num_attention_heads,
        head_dim=file.hidden_size // file.num_attention_heads,
        max_positions=file.max_position_embeddings,
        rope=None,
        norm="layer",
        activation=activation(file.activation_function),
        gated_mlp=False,
        # The table's first two rows were the padding token's once and are never read.
        learned_position_offset=2,
        qkv_bias=file.enable_bias,
        output_bias=file.enable_bias,
        mlp_bias=file.enable_bias,
        tie_embeddings=file.tie_word_embeddings,
        **family_and_tokens(file, file.vocab_size),
    )
