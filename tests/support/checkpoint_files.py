"""Checkpoint folders of random tensors, written as Hugging Face writes them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from clusterkv_jax.models import hf_weights as weights
from clusterkv_jax.models import registry

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_GLM = {**LLAMA, "model_type": "glm", "head_dim": 8}
_CHATGLM = {
    "model_type": "chatglm",
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_layers": 2,
    "num_attention_heads": 4,
    "multi_query_group_num": 2,
    "kv_channels": 8,
    "padded_vocab_size": 64,
    "seq_length": 128,
    "add_qkv_bias": True,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
# The first layer has one MLP.
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "head_dim": 8,
    "hidden_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 12,
}
FAMILIES = {
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    "granite": {**LLAMA, "model_type": "granite", "logits_scaling": 8.0},
    "olmo2": {**LLAMA, "model_type": "olmo2"},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 24},
    "gemma3_text": {
        **LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
    },
    "phi3": {**LLAMA, "model_type": "phi3"},
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "glm": _GLM,
    "glm4": {**_GLM, "model_type": "glm4"},
    "chatglm": _CHATGLM,
    "llama4_text": {
        **LLAMA,
        "model_type": "llama4_text",
        "head_dim": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 0],
        "floor_scale": 16,
    },
    "cohere2": {**LLAMA, "model_type": "cohere2", "sliding_window": 24, "sliding_window_pattern": 2},
    "ministral3": {
        **LLAMA,
        "model_type": "ministral3",
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2_moe": {**QWEN3_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40},
    "glm4_moe": {
        **{name: value for name, value in QWEN3_MOE.items() if name != "num_experts"},
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "smollm3": {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0]},
    "opt": OPT,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def random_tensors(published: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Every tensor that a checkpoint of this configuration holds."""
    config, rng = registry.from_hf(published), np.random.default_rng(0)
    stored = weights.layout(config, registry.FAMILIES[config.family].weights)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in weights.file_shapes(stored).items()}


def write(folder: Path, published: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 0) -> Path:
    """A Hugging Face folder: one file, or `shards` files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published))
    if not shards:
        save_file(tensors, folder / SINGLE)
        return folder
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(names):
        save_file(dict(list(tensors.items())[i::shards]), folder / file)
    places = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return folder


def assert_holds(params: Any, published: dict[str, Any], tensors: dict[str, np.ndarray], dtype: Any) -> None:
    """Each parameter is the tensor that the layout names, cast once."""
    config = registry.from_hf(published)
    stored = weights.layout(config, registry.FAMILIES[config.family].weights)
    for place, leaf in zip(jax.tree.leaves(stored), jax.tree.leaves(params), strict=True):
        assert leaf.dtype == dtype
        if isinstance(place, weights.StoredStack):
            wanted = np.stack([part.view(tensors[part.name]) for part in place.parts])
        else:
            wanted = place.view(tensors[place.name])
        np.testing.assert_array_equal(np.asarray(leaf), wanted.astype(dtype))


def same(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b))
