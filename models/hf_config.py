"""What the published configuration means for the decoder: sizes, end-of-text ids, activations, windows, experts."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from clusterkv_jax.models.config import Experts, ModelConfig
from clusterkv_jax.models.hf_fields import Decoder, Ids, Published, Sparse, refuse
from clusterkv_jax.models.hf_rope import longest_text, scaling_to_hf
from clusterkv_jax.storage.schema import shown

_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "mish": "mish",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Four times those of the largest published models: each has tensors of its own, which are looked up by name.
_MOST_EXPERTS = 2**16


def decoder(file: Decoder) -> dict[str, Any]:
    """The ModelConfig fields that every Llama-like family names alike, RoPE excepted."""
    return {
        "vocab_size": file.vocab_size,
        "hidden_size": file.hidden_size,
        "intermediate_size": file.intermediate_size,
        "num_layers": file.num_hidden_layers,
        "num_heads": file.num_attention_heads,
        "num_kv_heads": file.num_key_value_heads or file.num_attention_heads,
        "head_dim": file.head_dim or file.hidden_size // file.num_attention_heads,
        "max_positions": longest_text(file),
        "norm_eps": file.rms_norm_eps,
        "activation": activation(file.hidden_act),
        "tie_embeddings": file.tie_word_embeddings,
        **family_and_tokens(file, file.vocab_size),
    }


def decoder_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `decoder` and `rope`, in the style of transformers 4, which version 5 reads too."""
    assert config.rope is not None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling_to_hf(config.rope.scaling),
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
        "pad_token_id": config.pad_id,
        "torch_dtype": config.dtype,
    }


def family_and_tokens(file: Published, vocab_size: int) -> dict[str, Any]:
    """The family, the special token ids and the published type, as ModelConfig fields."""
    stated = file.eos_token_id
    default = [token for token in _listed(type(file).default_eos) if token < vocab_size]
    return {
        "family": file.model_type,
        "bos_id": file.bos_token_id,
        "eos_ids": end_ids(vocab_size, default if stated is UNSET else stated),
        "pad_id": file.pad_token_id,
        "dtype": (file.dtype or file.torch_dtype or "float32").removeprefix("torch."),
    }


def end_ids(vocab_size: int, *named: Ids | Sequence[int], tokenizer: int | None = None) -> tuple[int, ...]:
    """The ids that end a text: the first of `named` that are any, and the tokenizer's own.

    `named` begins with those of generation_config.json, then come those of config.json, or its family's default. An id
    that the vocabulary lacks is left out, with a warning.
    """
    first = next(filter(None, (_in_vocabulary(ids, vocab_size) for ids in named)), [])
    return tuple(dict.fromkeys([*first, *_in_vocabulary(tokenizer, vocab_size)]))


def _in_vocabulary(ids: Ids | Sequence[int], vocab_size: int) -> list[int]:
    found = []
    for token in _listed(ids):
        if 0 <= token < vocab_size:
            found.append(token)
        else:
            warnings.warn(
                f"eos_token_id = {token} is left out: it is no token of the vocabulary, 0 to {vocab_size - 1}.",
                stacklevel=2,
            )
    return found


def _listed(ids: Ids | Sequence[int]) -> Sequence[int]:
    return () if ids is None else (ids,) if isinstance(ids, int) else ids


def activation(name: str) -> str:
    """Our name of an activation function."""
    if name not in _ACTIVATION_NAMES:
        raise ValueError(f"Activation {shown(repr(name))} is not supported; allowed: {', '.join(_ACTIVATION_NAMES)}.")
    return _ACTIVATION_NAMES[name]


def sliding(
    window: int | None, fields: Mapping[str, Any], types: Sequence[str] | None = None, *, own_rotations: bool = False
) -> dict[str, Any]:
    """The window of a decoder with these fields and the layers that slide, by their types; without types all do.

    A window that is no shorter than the longest text is none, unless the layers that slide have rotations of their own.
    Raises ValueError for types of another number or name, and for layers that slide without a window.
    """
    count, longest = fields["num_layers"], fields["max_positions"]
    if types is not None:
        if len(types) != count:
            raise ValueError(f"layer_types in config.json names {len(types)} layers; allowed: {count}.")
        for layer, name in enumerate(types):
            if name not in _LAYER_TYPES:
                refuse(f"layer_types[{layer}]", name, *_LAYER_TYPES)
    layers = tuple(i for i in range(count) if types is None or types[i] == "sliding_attention")
    if window is None and types is not None and layers:
        refuse("sliding_window", None, f"a window for layer {layers[0]}, whose type is sliding_attention")
    if window is None or not layers or (window >= longest and not own_rotations):
        return {"window": None, "sliding_layers": ()}
    return {"window": min(window, longest), "sliding_layers": layers}


def sliding_but_every(pattern: int, layers: int) -> list[str]:
    """Types of layers of which every `pattern`-th sees every token."""
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]


def unrotated(rotates: Sequence[Any], layers: int) -> tuple[int, ...]:
    """The layers that do not rotate, by a list whose entries say of each whether it does.

    Raises ValueError for a list of fewer layers.
    """
    if len(rotates) < layers:
        refuse("no_rope_layers", rotates, f"a list for {layers} layers")
    return tuple(layer for layer in range(layers) if not rotates[layer])


def experts(file: Sparse, size: int, **options: Any) -> Experts:
    """The experts of a decoder, of `size` hidden units each; the number of them has two names.

    Raises ValueError where the names differ, and for more experts in all layers than are looked up in seconds.
    """
    named = {count for count in (file.num_experts, file.num_local_experts) if count is not None}
    if len(named) > 1:
        raise ValueError(
            f"config.json sets num_experts = {file.num_experts} and num_local_experts = {file.num_local_experts}; "
            "allowed: one of them, or both alike."
        )
    count = named.pop() if named else type(file).default_experts
    if count * file.num_hidden_layers > _MOST_EXPERTS:
        raise ValueError(
            f"config.json has {count} experts in each of {file.num_hidden_layers} layers (num_hidden_layers); "
            f"allowed: {_MOST_EXPERTS} in all."
        )
    return Experts(count, file.num_experts_per_tok, size, **options)
