"""A decoder in NumPy and float64 that reads published configurations and tensors itself: what ours is compared with.

It goes head by head, and by the words of the papers and of transformers; nothing of it is shared with the library.
"""

import math
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def reference_logits(published: dict[str, Any], tensors: Tensors, tokens: list[int]) -> np.ndarray:
    """Logits of every position, [N, V]."""
    eps, after = published["rms_norm_eps"], published["model_type"] == "olmo2"
    x = tensors["model.embed_tokens.weight"][tokens] * published.get("embedding_multiplier", 1.0)
    share = published.get("residual_multiplier", 1.0)
    for layer in range(published["num_hidden_layers"]):
        weights = {
            name.removeprefix(f"model.layers.{layer}."): tensor.astype(np.float64) for name, tensor in tensors.items()
        }

        def norm(name: str, x: np.ndarray, weights: Tensors = weights) -> np.ndarray:
            return _rms(x, weights[f"{name}_layernorm.weight"], eps)

        if after:
            x = x + norm("post_attention", _attention(published, weights, x))
            x = x + norm("post_feedforward", _mlp(weights, x))
        else:
            x = x + share * _attention(published, weights, norm("input", x))
            x = x + share * _mlp(weights, norm("post_attention", x))
    table = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return _rms(x, tensors["model.norm.weight"], eps) @ table.T / published.get("logits_scaling", 1.0)


def _rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def _mlp(weights: Tensors, x: np.ndarray) -> np.ndarray:
    if "mlp.gate_up_proj.weight" in weights:
        gate, up = np.split(x @ weights["mlp.gate_up_proj.weight"].T, 2, axis=-1)
    else:
        gate, up = (x @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ weights["mlp.down_proj.weight"].T


def _attention(published: dict[str, Any], weights: Tensors, x: np.ndarray) -> np.ndarray:
    heads, kv_heads = published["num_attention_heads"], published["num_key_value_heads"]
    dim = published["hidden_size"] // heads
    if "self_attn.qkv_proj.weight" in weights:
        fused = x @ weights["self_attn.qkv_proj.weight"].T
        q, k, v = np.split(fused, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    else:
        q, k, v = (x @ weights[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    if "self_attn.q_norm.weight" in weights:
        q = _rms(q, weights["self_attn.q_norm.weight"], published["rms_norm_eps"])
        k = _rms(k, weights["self_attn.k_norm.weight"], published["rms_norm_eps"])
    scale = published.get("attention_multiplier", dim**-0.5)
    hidden = np.triu(np.full((len(x), len(x)), -np.inf), 1)
    parts = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        query = _rotated(published, q[:, head * dim : (head + 1) * dim])
        key = _rotated(published, k[:, group * dim : (group + 1) * dim])
        scores = query @ key.T * scale + hidden
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        parts.append(weight / weight.sum(axis=-1, keepdims=True) @ v[:, group * dim : (group + 1) * dim])
    return np.concatenate(parts, axis=-1) @ weights["self_attn.o_proj.weight"].T


def _rotated(published: dict[str, Any], x: np.ndarray) -> np.ndarray:
    length, dim = len(x), int(x.shape[-1] * published.get("partial_rotary_factor", 1.0))
    frequencies, longer = _frequencies(published, dim)
    angles = np.arange(length)[:, None] * frequencies[None]
    a, b, rest = np.split(x, [dim // 2, dim], axis=-1)
    cos, sin = longer * np.cos(angles), longer * np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _frequencies(published: dict[str, Any], dim: int) -> tuple[np.ndarray, float]:
    theta = published.get("rope_theta", 10000.0)
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    scaling = published.get("rope_scaling") or {}
    match scaling.get("rope_type"):
        case "longrope":
            original = published["original_max_position_embeddings"]
            ratio = published["max_position_embeddings"] / original
            return plain / np.asarray(scaling["long_factor"]), math.sqrt(1 + math.log(ratio) / math.log(original))
        case "yarn":
            original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

            def pair(turns: float) -> float:
                """The pair of dimensions that turns so often within the original length."""
                return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

            first, last = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
            slow = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
            return (1 - slow) * plain + slow * plain / factor, 0.1 * math.log(factor) + 1
    return plain, 1.0
