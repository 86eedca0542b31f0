"""GGUF files as llama.cpp's converter writes them, of a Hugging Face configuration and its tensors."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, np.ndarray]
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "glm": "chatglm",
    "gpt_oss": "gpt-oss",
    "olmo3": "olmo2",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_OF_EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
_SCALES = {"Q4_K": ((0, 2e-3), (2, 1e-3)), "Q6_K": ((208, 5e-4),), "Q5_K": ((0, 2e-3), (2, 1e-3))}


def write(
    path: Path,
    published: dict[str, Any],
    tensors: Tensors,
    kind: str = "F32",
    extra: dict[str, Any] | None = None,
    parts: int = 1,
) -> Path:
    """A file, or `parts` of them, with matrices in the type `kind`; `extra` are keys of the tokenizer and others."""
    stored = converted(published, tensors)
    names = [path.with_name(f"{path.stem}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for number, name in enumerate([path] if parts == 1 else names):
        writer = gguf.GGUFWriter(name, ARCHITECTURES.get(published["model_type"], published["model_type"]))
        if number == 0:
            describe(writer, published, tensors)
            for key, value in (extra or {}).items():
                _add(writer, key, value)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(stored))
        for tensor, x in list(stored.items())[number::parts]:
            put(writer, tensor, x, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path if parts == 1 else names[0]


def put(writer: Any, name: str, x: np.ndarray, kind: str) -> None:
    wanted = gguf.GGMLQuantizationType[kind]
    if x.ndim < 2 or kind == "F32" or x.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        writer.add_tensor(name, np.ascontiguousarray(x, np.float32))
    elif kind in _SCALES:
        writer.add_tensor(name, _random_blocks(x.shape, kind), raw_dtype=wanted)
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(x, np.float32), wanted), raw_dtype=wanted)


def _random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Any codes, and scales of the size of weights: the package dequantises these types and does not quantise them."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(shape[0]).integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), np.uint8)
    for at, scale in _SCALES[kind]:
        raw[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return raw.reshape(*shape[:-1], -1)


def _add(writer: Any, key: str, value: Any) -> None:
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add.get(type(value), writer.add_array)(key, value)


def describe(writer: Any, published: dict[str, Any], tensors: Tensors) -> None:
    """The settings, by the names that the package gives them."""
    head_dim = published.get("head_dim") or published["hidden_size"] // published["num_attention_heads"]
    kind, ropes = published["model_type"], published.get("rope_parameters") or {}
    ropes = ropes.get("full_attention", ropes)
    writer.add_context_length(published["max_position_embeddings"])
    writer.add_embedding_length(published["hidden_size"])
    writer.add_vocab_size(published["vocab_size"])
    writer.add_block_count(published["num_hidden_layers"])
    writer.add_feed_forward_length(published["intermediate_size"])
    writer.add_head_count(published["num_attention_heads"])
    writer.add_head_count_kv(published["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(published.get("rms_norm_eps", 1e-5 if kind in ("glm", "glm4") else 1e-6))
    thetas = {"gemma3_text": 1e6, "gpt_oss": 150000.0, "mixtral": 1e6, "ernie4_5": 5e5, "smollm3": 2e6}
    default = thetas.get(kind, 10000.0)
    writer.add_rope_freq_base(ropes.get("rope_theta", default))
    part = ropes.get("partial_rotary_factor", 0.5 if kind in ("glm", "glm4") else 1.0)
    writer.add_rope_dimension_count(int(head_dim * part))
    _scaling(writer, published, ropes)
    if published.get("sliding_window") and kind in ("gemma2", "gemma3_text", "phi3", "gpt_oss"):
        writer.add_sliding_window(published["sliding_window"])
    if kind in ("olmo3", "exaone4"):
        pattern = published.get("sliding_window_pattern", 4)
        writer.add_sliding_window(published["sliding_window"])
        writer.add_sliding_window_pattern([(i + 1) % pattern != 0 for i in range(published["num_hidden_layers"])])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(published.get("attn_logit_softcapping", 50.0))
        writer.add_final_logit_softcapping(published.get("final_logit_softcapping", 30.0))
    if kind == "granite":
        writer.add_attention_scale(published["attention_multiplier"])
        writer.add_embedding_scale(published["embedding_multiplier"])
        writer.add_residual_scale(published["residual_multiplier"])
        writer.add_logit_scale(published["logits_scaling"])
    count = published.get("num_experts") or published.get("num_local_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(published["num_experts_per_tok"])
        size = published.get("moe_intermediate_size", published["intermediate_size"])
        writer.add_expert_feed_forward_length(size)
    for name in ("bos", "eos", "pad"):
        token = published.get(f"{name}_token_id")
        if isinstance(token, int):
            getattr(writer, f"add_{name}_token_id")(token)


def _scaling(writer: Any, published: dict[str, Any], ropes: dict[str, Any]) -> None:
    kind = ropes.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(ropes["factor"])
    original = ropes.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        ratio = published["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / np.log(original))))


def converted(published: dict[str, Any], tensors: Tensors) -> Tensors:
    """Tensors by llama.cpp's names, in its order of rows."""
    kind = published["model_type"]
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES.get(kind, kind))
    names = gguf.get_tensor_name_map(architecture, published["num_hidden_layers"])
    found: Tensors = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, x in tensors.items():
        if part := _EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{part[1]}.ffn_{_OF_EXPERTS[part[3]]}_exps.weight", []).append(x)
            continue
        if ".mlp.experts." in name:
            found |= _gpt_oss_experts(name, x)
            continue
        x = _changed(published, name, x)
        base, dot, end = name.rpartition(".")
        if name.endswith(".sinks"):
            base, dot, end = name, ".", "weight"
        mapped = names.get_name(base)
        assert mapped is not None, name
        found[mapped + dot + end] = x
    found |= {name: np.stack(parts) for name, parts in experts.items()}
    return found | _factors(published)


def _changed(published: dict[str, Any], name: str, x: np.ndarray) -> np.ndarray:
    kind = published["model_type"]
    if kind in ("gemma", "gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return x + 1
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if kind not in ("llama", "mistral", "mixtral", "granite", "smollm3") or heads is None:
        return x
    count = published[heads]
    return x.reshape(count, 2, len(x) // count // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _gpt_oss_experts(name: str, x: np.ndarray) -> Tensors:
    layer, last = name.split(".")[2], name.rpartition(".")[2]
    end = "bias" if last.endswith("bias") else "weight"
    x = x if end == "bias" else x.swapaxes(1, 2)
    if last.startswith("down"):
        return {f"blk.{layer}.ffn_down_exps.{end}": x}
    return {f"blk.{layer}.ffn_gate_exps.{end}": x[:, ::2], f"blk.{layer}.ffn_up_exps.{end}": x[:, 1::2]}


def _factors(published: dict[str, Any]) -> Tensors:
    ropes = published.get("rope_parameters") or {}
    if ropes.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(ropes[f"{kind}_factor"], np.float32) for kind in ("long", "short")
        }
    if ropes.get("rope_type") != "llama3":
        return {}
    dim = published.get("head_dim") or published["hidden_size"] // published["num_attention_heads"]
    lengths = 2 * np.pi * ropes["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = ropes["low_freq_factor"], ropes["high_freq_factor"]
    smooth = np.clip((ropes["original_max_position_embeddings"] / lengths - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / ropes["factor"] + smooth)).astype(np.float32)}
