"""OPT: learned positions, LayerNorm before each block, biases, ReLU (Zhang et al., 2022, arXiv:2205.01068)."""

from typing import Any

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_config import activation, demand, size, tokens_and_dtype

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


def from_hf(published: dict[str, Any]) -> ModelConfig:
    """Translate a `model_type: opt` configuration; the post-norm 350M variant is refused."""
    hidden, heads = size(published, "hidden_size"), size(published, "num_attention_heads")
    demand(published, "do_layer_norm_before", True, default=True)
    demand(published, "_remove_final_layer_norm", False, default=False)
    demand(published, "layer_norm_elementwise_affine", True, default=True)
    if published.get("word_embed_proj_dim") is not None:
        demand(published, "word_embed_proj_dim", hidden, default=hidden)
    bias = published.get("enable_bias", True)
    return ModelConfig(
        family="opt",
        vocab_size=size(published, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size(published, "ffn_dim"),
        num_layers=size(published, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=published.get("max_position_embeddings", 2048),
        rope=None,
        norm="layer",
        activation=activation(published.get("activation_function", "relu")),
        gated_mlp=False,
        # The table's first two rows were the padding token's once and are never read.
        learned_position_offset=2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tie_embeddings=published.get("tie_word_embeddings", True),
        **tokens_and_dtype(published),
    )
