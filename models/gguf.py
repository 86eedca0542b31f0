"""What GGUF files say of a model: its published configuration, and where its parameters lie among their tensors.

Files are those that llama.cpp's converter writes. It names architectures, settings and tensors in its own way, stores
rows of queries and keys by pairs where its rotations turn neighbours, and Gemma's norms with their 1 added.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from clusterkv_jax.models.hf_fields import ExpertCount, Heads, Layers, Positions, Size
from clusterkv_jax.storage.schema import checked, shown

# general.architecture -> model_type. Mistral's models are `llama` there, as Mixtral's are, with experts; OLMo 3's are
# `olmo2`, with windows.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "chatglm": "glm",
    "glm4": "glm4",
    "gpt-oss": "gpt_oss",
    "smollm3": "smollm3",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
}
# Factors of rotations, which are tensors there and a part of the configuration here.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Tokens that end a turn, whatever the file says of them.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
EMBED, _HEAD = "token_embd.weight", "output.weight"
_ROTATED_BY_PAIRS = ("llama", "mixtral", "granite", "smollm3")
_NORMS_WITH_ONE = ("gemma", "gemma2", "gemma3_text")
_NORMS_BEHIND_ATTENTION = ("gpt_oss", "seed_oss")  # is what it calls those before the MLP

_WEIGHTS = {
    "embed": EMBED,
    "layers.*.attention_norm.scale": "blk.*.attn_norm.weight",
    "layers.*.attention.q": "blk.*.attn_q.weight",
    "layers.*.attention.k": "blk.*.attn_k.weight",
    "layers.*.attention.v": "blk.*.attn_v.weight",
    "layers.*.attention.o": "blk.*.attn_output.weight",
    "layers.*.attention.q_bias": "blk.*.attn_q.bias",
    "layers.*.attention.k_bias": "blk.*.attn_k.bias",
    "layers.*.attention.v_bias": "blk.*.attn_v.bias",
    "layers.*.attention.o_bias": "blk.*.attn_output.bias",
    "layers.*.attention.q_norm": "blk.*.attn_q_norm.weight",
    "layers.*.attention.k_norm": "blk.*.attn_k_norm.weight",
    "layers.*.attention.sink_logits": "blk.*.attn_sinks.weight",
    "layers.*.attention_out_norm.scale": "blk.*.post_attention_norm.weight",
    "layers.*.mlp_norm.scale": "blk.*.ffn_norm.weight",
    "layers.*.mlp_out_norm.scale": "blk.*.post_ffw_norm.weight",
    "layers.*.mlp.gate": "blk.*.ffn_gate.weight",
    "layers.*.mlp.up": "blk.*.ffn_up.weight",
    "layers.*.mlp.down": "blk.*.ffn_down.weight",
    "layers.*.mlp.gate_bias": "blk.*.ffn_gate.bias",
    "layers.*.mlp.up_bias": "blk.*.ffn_up.bias",
    "layers.*.mlp.down_bias": "blk.*.ffn_down.bias",
    "layers.*.experts.router": "blk.*.ffn_gate_inp.weight",
    "layers.*.experts.router_bias": "blk.*.ffn_gate_inp.bias",
    **{
        f"layers.*.experts.{part}{end}": f"blk.*.ffn_{part}_exps.{{expert}}.{kind}"
        for part in ("gate", "up", "down")
        for end, kind in (("", "weight"), ("_bias", "bias"))
    },
    "final_norm.scale": "output_norm.weight",
    "lm_head": _HEAD,
}
_FUSED_ATTENTION = {
    f"layers.*.attention.{part}{end}": f"blk.*.attn_qkv.{kind}"
    for end, kind in (("", "weight"), ("_bias", "bias"))
    for part in ("q", "k", "v")
}
_FUSED_MLP = {f"layers.*.mlp.{part}": "blk.*.ffn_up.weight" for part in ("gate", "up")}


class _Stated(Struct, kw_only=True, rename=lambda name: name.replace("__", ".")):
    """What is read of an architecture's settings, such as `llama.attention.head_count`."""

    context_length: Positions
    embedding_length: Size
    block_count: Layers
    feed_forward_length: Size | None = None
    attention__head_count: Heads
    attention__head_count_kv: Heads | None = None
    attention__key_length: Size | None = None
    attention__value_length: Size | None = None
    attention__layer_norm_rms_epsilon: float
    attention__sliding_window: int | None = None
    attention__sliding_window_pattern: Annotated[list[bool], Meta(max_length=1024)] | int | None = None
    attention__scale: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    expert_count: int = 0
    expert_used_count: ExpertCount | None = None
    expert_feed_forward_length: Size | None = None
    rope__dimension_count: Size | None = None
    rope__freq_base: float = 10000.0
    rope__scaling__type: str | None = None
    rope__scaling__factor: float | None = None
    rope__scaling__original_context_length: Positions | None = None
    rope__scaling__attn_factor: float | None = None
    rope__scaling__yarn_attn_factor: float | None = None
    rope__scaling__yarn_beta_fast: float | None = None
    rope__scaling__yarn_beta_slow: float | None = None


class _Tokens(Struct, rename=lambda name: f"tokenizer.ggml.{name}"):
    tokens: list[str] = []
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    padding_token_id: int | None = None


def published(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, list[float]], where: str
) -> dict[str, Any]:
    """The configuration of a file of these tensors as Hugging Face publishes it; errors call the file `where`.

    `factors` are the numbers of the tensors `FACTORS`.

    Raises ValueError, in one sentence, for what is missing, of another type, or not read.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        raise ValueError(
            f"general.architecture {shown(repr(architecture))} is not supported; allowed: {', '.join(MODEL_TYPES)}."
        )
    if len(shapes.get(EMBED, ())) != 2:
        raise ValueError(f"{where} holds no table {EMBED!r}.")
    prefix = f"{architecture}."
    settings = {key.removeprefix(prefix): x for key, x in metadata.items() if key.startswith(prefix)}
    stated = checked(settings, _Stated, where)
    head_dim = stated.attention__key_length or max(1, stated.embedding_length // stated.attention__head_count)
    if stated.attention__value_length not in (None, head_dim):
        raise ValueError(
            f"Values of {stated.attention__value_length} dimensions are not read; allowed: {head_dim}, as keys have."
        )
    model_type = "mixtral" if architecture == "llama" and stated.expert_count else MODEL_TYPES[architecture]
    if model_type == "olmo2" and stated.attention__sliding_window:
        model_type = "olmo3"
    common = {
        "model_type": model_type,
        "hidden_size": stated.embedding_length,
        "intermediate_size": stated.feed_forward_length or stated.expert_feed_forward_length,
        "num_hidden_layers": stated.block_count,
        "num_attention_heads": stated.attention__head_count,
        "num_key_value_heads": stated.attention__head_count_kv or stated.attention__head_count,
        "head_dim": head_dim,
        "max_position_embeddings": stated.context_length,
        "rms_norm_eps": _decimal(stated.attention__layer_norm_rms_epsilon),
        "attention_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & shapes.keys()),
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "vocab_size": shapes[EMBED][0],
        "tie_word_embeddings": _HEAD not in shapes,
        **_rotations(model_type, stated, head_dim, factors),
        **_ids(metadata, architecture, where),
    }
    return common | _of_family(model_type, stated, head_dim, shapes)


def _of_family(
    model_type: str, stated: _Stated, head_dim: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """What only some families have. Raises ValueError for a window where the family has none."""
    window = stated.attention__sliding_window or None
    experts = {"num_local_experts": stated.expert_count, "num_experts_per_tok": stated.expert_used_count}
    match model_type:
        case "gemma2" | "gemma3_text":
            # The largest of either scales by the mean width of its heads, which no file says.
            largest = stated.block_count == {"gemma2": 46, "gemma3_text": 62}[model_type]
            return {
                "sliding_window": window,
                "query_pre_attn_scalar": stated.embedding_length // stated.attention__head_count
                if largest
                else head_dim,
                "attn_logit_softcapping": stated.attn_logit_softcapping,
                "final_logit_softcapping": stated.final_logit_softcapping,
            }
        case "phi3":
            original = stated.rope__scaling__original_context_length or stated.context_length
            return {"sliding_window": window, "original_max_position_embeddings": original}
        case "gpt_oss":
            return {"sliding_window": window, "intermediate_size": stated.expert_feed_forward_length, **experts}
        case "olmo3" | "exaone4":
            pattern = stated.attention__sliding_window_pattern
            types = [
                "sliding_attention" if slides else "full_attention"
                for slides in (pattern if isinstance(pattern, list) else ())
            ]
            return {"sliding_window": window, "layer_types": types or None}
        case _ if window is not None:
            raise ValueError(f"A window of {window} tokens is not read of models of the type {model_type!r}.")
        case "granite":
            scales = {
                "attention_multiplier": stated.attention__scale,
                "embedding_multiplier": stated.embedding_scale,
                "residual_multiplier": stated.residual_scale,
                "logits_scaling": stated.logit_scale,
            }
            return {name: _decimal(scale) for name, scale in scales.items() if scale is not None}
        case "qwen3_moe":
            layers = range(stated.block_count)
            dense = [number for number in layers if f"blk.{number}.ffn_gate_inp.weight" not in shapes]
            of_experts = {"moe_intermediate_size": stated.expert_feed_forward_length, "norm_topk_prob": True}
            return {**experts, **of_experts, "mlp_only_layers": dense}
        case "mixtral":
            return {"sliding_window": None, **experts}
        case "seed_oss":
            return {"attention_out_bias": "blk.0.attn_output.bias" in shapes}
        case "ernie4_5":
            return {"use_bias": "blk.0.attn_q.bias" in shapes}
    return {}


def _rotations(model_type: str, stated: _Stated, head_dim: int, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": _decimal(stated.rope__freq_base)}
    if stated.rope__dimension_count not in (None, head_dim):
        found["partial_rotary_factor"] = stated.rope__dimension_count / head_dim
    every, long, short = (factors.get(name) for name in FACTORS)
    scaling: dict[str, Any] | None = None
    if every is not None or long is not None:
        # One list for all texts has no factor of attention: Llama 3.1's.
        scaling = {
            "rope_type": "longrope",
            "long_factor": every or long,
            "short_factor": every or short or long,
            "attention_factor": 1.0 if every is not None else stated.rope__scaling__attn_factor,
            "original_max_position_embeddings": stated.rope__scaling__original_context_length or stated.context_length,
        }
    elif stated.rope__scaling__type not in (None, "none"):
        scaling = {
            "rope_type": stated.rope__scaling__type,
            "factor": stated.rope__scaling__factor,
            "original_max_position_embeddings": stated.rope__scaling__original_context_length,
            "attention_factor": stated.rope__scaling__yarn_attn_factor,
            "beta_fast": stated.rope__scaling__yarn_beta_fast,
            "beta_slow": stated.rope__scaling__yarn_beta_slow,
            "truncate": False if model_type == "gpt_oss" else None,
        }
    if scaling is not None:
        found["rope_scaling"] = {name: x for name, x in scaling.items() if x is not None}
    return found


def _ids(metadata: Mapping[str, Any], architecture: str, where: str) -> dict[str, Any]:
    """The ids of special tokens: a text ends with the end that the file names, and with those of a turn."""
    stated = checked(dict(metadata), _Tokens, where)
    # In gpt-oss's format it ends a message, and another one may follow.
    texts = [text for text in _ENDS if not (architecture == "gpt-oss" and text == "<|end|>")]
    numbers = {text: number for number, text in enumerate(stated.tokens) if text in texts}
    ends = [stated.eos_token_id, stated.eot_token_id, stated.eom_token_id, *numbers.values()]
    return {
        "bos_token_id": stated.bos_token_id,
        "eos_token_id": list(dict.fromkeys(number for number in ends if number is not None)),
        "pad_token_id": stated.padding_token_id,
    }


def weights(model_type: str, names: Collection[str]) -> dict[str, str]:
    """The table of a model's parameters in a file of these tensors, as `hf_weights.layout` takes it."""
    table = dict(_WEIGHTS)
    if "blk.0.attn_qkv.weight" in names:
        table |= _FUSED_ATTENTION
    if "blk.0.ffn_gate.weight" not in names:
        table |= _FUSED_MLP
    if model_type in _NORMS_BEHIND_ATTENTION:
        table["layers.*.mlp_norm.scale"] = "blk.*.post_attention_norm.weight"
    return table


def pairs_of(name: str, published: Mapping[str, Any]) -> int | None:
    """The heads of a tensor whose rows are stored by pairs, None for every other tensor."""
    if published["model_type"] not in _ROTATED_BY_PAIRS:
        return None
    part = name.split(".")[2:3]
    counts = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return published[counts[part[0]]] if part and part[0] in counts else None


def added_to(name: str, published: Mapping[str, Any]) -> float:
    """What was added to a tensor's numbers: to the scales of norms where the model adds it itself."""
    return 1.0 if published["model_type"] in _NORMS_WITH_ONE and name.endswith("norm.weight") else 0.0


def _decimal(x: float) -> float:
    """The shortest decimal that is this number in float32, which files hold: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(x)))
