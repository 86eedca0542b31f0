"""A decoder in NumPy and float64 that reads published configurations and tensors itself: what ours is compared with.

It goes head by head, and by the words of the papers and of transformers; nothing of it is shared with the library.
"""

import math
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def reference_logits(published: dict[str, Any], tensors: Tensors, tokens: list[int]) -> np.ndarray:
    """Logits of every position, [N, V]."""
    eps, family = published["rms_norm_eps"], published["model_type"]
    gemma = family.startswith("gemma")
    if gemma:  # norms multiply by one more than what is stored
        tensors = {name: x + 1.0 if "norm" in name else x for name, x in tensors.items()}
    scale = math.sqrt(published["hidden_size"]) if gemma else published.get("embedding_multiplier", 1.0)
    x = tensors["model.embed_tokens.weight"][tokens] * scale
    share = published.get("residual_multiplier", 1.0)
    for layer in range(published["num_hidden_layers"]):
        weights = {
            name.removeprefix(f"model.layers.{layer}."): tensor.astype(np.float64) for name, tensor in tensors.items()
        }

        def norm(name: str, x: np.ndarray, weights: Tensors = weights) -> np.ndarray:
            return _rms(x, weights[f"{name}_layernorm.weight"], eps)

        own = _of_layer(published, layer)
        if gemma:
            x = x + norm("post_attention", _attention(own, weights, norm("input", x)))
            x = x + norm("post_feedforward", _mlp(weights, norm("pre_feedforward", x), gelu=True))
        elif family == "olmo2":
            x = x + norm("post_attention", _attention(own, weights, x))
            x = x + norm("post_feedforward", _mlp(weights, x))
        else:
            x = x + share * _attention(own, weights, norm("input", x))
            mlp = _experts if family == "gpt_oss" else lambda _, *args: _mlp(*args)
            x = x + share * mlp(published, weights, norm("post_attention", x))
    table = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    logits = _rms(x, tensors["model.norm.weight"], eps) @ table.T / published.get("logits_scaling", 1.0)
    return _capped(logits, published.get("final_logit_softcapping"))


def _of_layer(published: dict[str, Any], layer: int) -> dict[str, Any]:
    """What the file says of a layer: whether it slides, and how it is rotated then."""
    pattern = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": published.get("sliding_window_pattern")}.get(
        published["model_type"]
    )
    if pattern is not None and (layer + 1) % pattern == 0:
        return published | {"sliding_window": None}
    if "rope_local_base_freq" in published:
        return published | {"rope_theta": published["rope_local_base_freq"], "rope_scaling": None}
    return published


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def _mlp(weights: Tensors, x: np.ndarray, *, gelu: bool = False) -> np.ndarray:
    if "mlp.gate_up_proj.weight" in weights:
        gate, up = np.split(x @ weights["mlp.gate_up_proj.weight"].T, 2, axis=-1)
    else:
        gate, up = (x @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    if gelu:
        inner = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        inner = gate / (1 + np.exp(-gate))
    return (inner * up) @ weights["mlp.down_proj.weight"].T


def _experts(published: dict[str, Any], weights: Tensors, x: np.ndarray) -> np.ndarray:
    """Of gpt-oss, token by token: the best experts, and a softmax over their logits alone."""
    stack = {name.removeprefix("mlp.experts."): tensor for name, tensor in weights.items() if "experts" in name}
    out = np.zeros_like(x)
    for token, row in zip(x, out, strict=True):
        logits = weights["mlp.router.weight"] @ token + weights["mlp.router.bias"]
        best = np.argsort(-logits)[: published["num_experts_per_tok"]]
        shares = np.exp(logits[best] - logits[best].max())
        for share, expert in zip(shares / shares.sum(), best, strict=True):
            both = token @ stack["gate_up_proj"][expert] + stack["gate_up_proj_bias"][expert]
            limit = published["swiglu_limit"]
            gate, up = np.minimum(both[::2], limit), np.clip(both[1::2], -limit, limit)
            inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            row += share * (inner @ stack["down_proj"][expert] + stack["down_proj_bias"][expert])
    return out


def _attention(published: dict[str, Any], weights: Tensors, x: np.ndarray) -> np.ndarray:
    heads, kv_heads = published["num_attention_heads"], published["num_key_value_heads"]
    dim = published.get("head_dim", published["hidden_size"] // heads)
    if "self_attn.qkv_proj.weight" in weights:
        fused = x @ weights["self_attn.qkv_proj.weight"].T
        q, k, v = np.split(fused, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    else:
        q, k, v = (
            x @ weights[f"self_attn.{name}_proj.weight"].T + weights.get(f"self_attn.{name}_proj.bias", 0.0)
            for name in "qkv"
        )
    if "self_attn.q_norm.weight" in weights:
        shape = (len(x), -1) if published["model_type"] == "olmo2" else (len(x), -1, dim)
        norms = [(weights[f"self_attn.{name}_norm.weight"], published["rms_norm_eps"]) for name in "qk"]
        q, k = (_rms(y.reshape(shape), *norm) for y, norm in zip((q, k), norms, strict=True))
        q, k = q.reshape(len(x), -1), k.reshape(len(x), -1)
    scale = published.get("query_pre_attn_scalar", dim) ** -0.5
    scale = published.get("attention_multiplier", scale)
    ahead = np.arange(len(x))[:, None] - np.arange(len(x))
    hidden = np.where((ahead >= 0) & (ahead < (published.get("sliding_window") or len(x))), 0.0, -np.inf)
    parts = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        query = _rotated(published, q[:, head * dim : (head + 1) * dim])
        key = _rotated(published, k[:, group * dim : (group + 1) * dim])
        scores = _capped(query @ key.T * scale, published.get("attn_logit_softcapping")) + hidden
        if "self_attn.sinks" in weights:  # a row more, whose value is zero
            scores = np.pad(scores, ((0, 0), (0, 1)), constant_values=weights["self_attn.sinks"][head])
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weight = (weight / weight.sum(axis=-1, keepdims=True))[:, : len(x)]
        parts.append(weight @ v[:, group * dim : (group + 1) * dim])
    out = np.concatenate(parts, axis=-1) @ weights["self_attn.o_proj.weight"].T
    return out + weights.get("self_attn.o_proj.bias", 0.0)


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
        case "linear":
            return plain / scaling["factor"], 1.0
        case "longrope":
            original = published["original_max_position_embeddings"]
            ratio = published["max_position_embeddings"] / original
            return plain / np.asarray(scaling["long_factor"]), math.sqrt(1 + math.log(ratio) / math.log(original))
        case "yarn":
            original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

            def pair(turns: float) -> float:
                """The pair of dimensions that turns so often within the original length."""
                return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

            first, last = pair(32), pair(1)
            if scaling.get("truncate", True):
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, dim - 1)
            slow = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
            return (1 - slow) * plain + slow * plain / factor, 0.1 * math.log(factor) + 1
    return plain, 1.0
