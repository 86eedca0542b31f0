"""The table of families: tests go through it, and docs/reference/models.md is made of it."""

from typing import Any

from tests.support.checkpoint_files import FAMILIES, LLAMA

# One small configuration of each family, for what every family does.
PUBLISHED = {"llama": LLAMA} | FAMILIES
# What is of texts in models of texts and images.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}
# Families whose decoder is another one's: their files are compared with transformers, the rest is tested there.
SAME_AS = WRAPPERS | {
    "chatglm": "glm",
    "ernie4_5": "glm",
    "exaone4": "smollm3",
    "gemma": "gemma2",
    "granitemoehybrid": "granite",
    "helium": "glm",
    "ministral": "mistral",
    "olmo3": "olmo2",
    "seed_oss": "llama",
}
# Families each of whose ideas another one has too: ordinary runs leave most of their tests to ARGS="-m exhaustive".
COVERED = (SAME_AS.keys() - PUBLISHED.keys()) | {"llama4_text", "qwen2_moe"}

# Sizes of a head in what is published of a family: kernels of libraries take some and not others.
HEAD_DIMS = {
    "cohere2": (128,),
    "ernie4_5": (128,),
    "exaone4": (64, 128),
    "gemma": (256,),
    "gemma2": (128, 256),
    "gemma3_text": (128, 256),
    "glm": (128,),
    "glm4": (128,),
    "glm4_moe": (128,),
    "gpt_oss": (64,),
    "granite": (64, 128),
    "granitemoehybrid": (64, 128),
    "helium": (128,),
    "llama": (64, 128),
    "llama4_text": (128,),
    "ministral": (128,),
    "ministral3": (128,),
    "mistral": (128,),
    "mixtral": (128,),
    "olmo2": (128,),
    "olmo3": (128,),
    "opt": (64, 80, 128),
    "phi3": (96, 128),
    "qwen2": (64, 128),
    "qwen2_moe": (128,),
    "qwen3": (128,),
    "qwen3_moe": (128,),
    "seed_oss": (128,),
    "smollm3": (128,),
}

_SMALL = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # The usual 0.02 leaves attention flat in so small a model: any position code would pass.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 8.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 16.0, "original_max_position_embeddings": 64}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.3, 2.0, 4.0, 9.0, 25.0],
    "original_max_position_embeddings": 32,
}
_OPT = {
    "vocab_size": 151,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "init_std": 0.2,
    "eos_token_id": None,
}
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 16, "sliding_window": 50, "tie_word_embeddings": True}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_OLMO3_ROPES = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e5}}
_GRANITE4 = {
    "layer_types": ["attention"] * 2,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 56,
    "mamba_n_heads": 4,
}
# Limits that some gates and ups reach in so small a model.
_GPT_OSS = {
    "head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "sliding_window": 40,
    "swiglu_limit": 2.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
_GLM = {"head_dim": 32, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
_MOE = {"head_dim": 32, "moe_intermediate_size": 48}
# What is compared with transformers: name -> (model_type, what differs from a small configuration).
_PARITY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama2-32k": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "tinyllama": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "smollm2": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-6}),
    "qwen2.5-tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-moe": ("qwen3_moe", _MOE | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3-moe-shares": ("qwen3_moe", _MOE | {"num_experts": 6, "num_experts_per_tok": 2}),
    "qwen3-moe-dense": (
        "qwen3_moe",
        _MOE | {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm": ("glm", {**_GLM, "eos_token_id": [1, 2]}),
    "glm4": ("glm4", {**_GLM, "eos_token_id": [3, 4]}),
    "opt": ("opt", {}),
    "granite": ("granite", GRANITE | {"tie_word_embeddings": True}),
    "granite-biases": ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-6}),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen2.5-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "llama-yarn": (
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": _YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0.7},
        },
    ),
    "llama-yarn-mscale": ("llama", {"rope_parameters": _YARN | {"mscale": 1.2, "mscale_all_dim": 0.8}}),
    "phi3": ("phi3", {"sliding_window": 1024}),
    "phi3-4k": ("phi3", {"sliding_window": 100}),
    "mistral-v0.1": ("mistral", {"sliding_window": 64}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 33}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3-moe-window": (
        "qwen3_moe",
        _MOE | {"num_experts": 4, "num_experts_per_tok": 2, "use_sliding_window": True, "sliding_window": 70},
    ),
    "gemma2": ("gemma2", _GEMMA | {"attn_logit_softcapping": 4.0, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", _GEMMA | {"num_hidden_layers": 7, "rope_parameters": _GEMMA3_ROPES}),
    "gpt-oss": ("gpt_oss", _GPT_OSS),
    "gemma1": ("gemma", {"head_dim": 24}),
    "ministral": (
        "ministral",
        {"head_dim": 24, "sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo3": ("olmo3", {"sliding_window": 50, "num_hidden_layers": 4, "rope_parameters": _OLMO3_ROPES}),
    "seed-oss": ("seed_oss", {"head_dim": 24, "mlp_bias": True}),
    "ernie4.5": ("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "helium": ("helium", {"head_dim": 16, "attention_bias": True}),
    "granite4": ("granitemoehybrid", GRANITE | _GRANITE4),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "head_dim": 24}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 50, "num_hidden_layers": 3},
    ),
    "exaone4": ("exaone4", {"sliding_window": 50, "sliding_window_pattern": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 50,
        },
    ),
    "glm4.5": (
        "glm4_moe",
        _MOE
        | {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 24,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "cohere2": ("cohere2", {"sliding_window": 50, "num_hidden_layers": 4, "logit_scale": 0.2, "attention_bias": True}),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 56,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "floor_scale": 50,
            "attn_scale": 0.3,
        },
    ),
    "phi4-mini": (
        "phi3",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 32, "tie_word_embeddings": True},
    ),
}

PARITY = {
    name: {"model_type": kind, **(_OPT if kind == "opt" else _SMALL), **changes}
    for name, (kind, changes) in _PARITY.items()
}
