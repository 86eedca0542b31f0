"""What the families' `config.json` files share, in the style of transformers 4 and of transformers 5.

Every function takes the parsed file. What the decoder cannot do is a ValueError that names the value and what it can.
"""

from typing import Any

from clusterkv_jax.models.config import LinearScaling, Llama3Scaling, Rope

_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def require(published: dict[str, Any], key: str) -> Any:
    """The value of a key that has no sensible default."""
    if published.get(key) is None:
        raise ValueError(f"config.json lacks {key!r}, which a {published.get('model_type')!r} model needs.")
    return published[key]


def size(published: dict[str, Any], key: str) -> int:
    """A required size; anything but a positive integer is a ValueError."""
    value = require(published, key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json sets {key} = {value!r}; allowed: a positive integer.")
    return value


def demand(published: dict[str, Any], key: str, allowed: Any, default: Any) -> None:
    """Raise ValueError unless `key` (or its default) has the one value that the decoder implements."""
    value = published.get(key, default)
    if value != allowed:
        raise ValueError(f"config.json sets {key} = {value!r}, which is not supported; allowed: {allowed!r}.")


def decoder(published: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields that every Llama-like family names alike, RoPE excepted."""
    heads = size(published, "num_attention_heads")
    return {
        "family": published["model_type"],
        "vocab_size": size(published, "vocab_size"),
        "hidden_size": size(published, "hidden_size"),
        "intermediate_size": size(published, "intermediate_size"),
        "num_layers": size(published, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": published.get("num_key_value_heads") or heads,
        "head_dim": published.get("head_dim") or size(published, "hidden_size") // heads,
        "max_positions": size(published, "max_position_embeddings"),
        "norm_eps": published.get("rms_norm_eps", 1e-6),
        "activation": activation(published.get("hidden_act", "silu")),
        "tie_embeddings": published.get("tie_word_embeddings", False),
        **tokens_and_dtype(published),
    }


def tokens_and_dtype(published: dict[str, Any]) -> dict[str, Any]:
    """The special token ids and the published type, as ModelConfig fields."""
    dtype = published.get("dtype") or published.get("torch_dtype") or "float32"
    return {
        "bos_id": published.get("bos_token_id"),
        "eos_ids": token_ids(published.get("eos_token_id")),
        "pad_id": published.get("pad_token_id"),
        "dtype": dtype.removeprefix("torch."),
    }


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """End-of-text ids: files hold one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def activation(name: str) -> str:
    """Our name of an activation function."""
    if name not in _ACTIVATION_NAMES:
        raise ValueError(f"Activation {name!r} is not supported; allowed: {', '.join(_ACTIVATION_NAMES)}.")
    return _ACTIVATION_NAMES[name]


def rope(published: dict[str, Any], head_dim: int, *, fraction: float = 1.0, interleaved: bool = False) -> Rope:
    """RoPE from `rope_theta` and `rope_scaling` (transformers 4) or from `rope_parameters` (transformers 5).

    `fraction` of the head's dimensions is rotated unless the file says otherwise.
    """
    parameters = {
        key: published[key]
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        if published.get(key) is not None
    }
    parameters |= published.get("rope_scaling") or {}
    parameters |= published.get("rope_parameters") or {}
    return Rope(
        theta=float(parameters.get("rope_theta", 10000.0)),
        dim=int(head_dim * parameters.get("partial_rotary_factor", fraction)),
        interleaved=interleaved,
        scaling=_scaling(parameters),
    )


def _scaling(parameters: dict[str, Any]) -> LinearScaling | Llama3Scaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(float(parameters["factor"]))
            case "llama3":
                return Llama3Scaling(
                    float(parameters["factor"]),
                    float(parameters["low_freq_factor"]),
                    float(parameters["high_freq_factor"]),
                    int(parameters["original_max_position_embeddings"]),
                )
    except KeyError as missing:
        raise ValueError(f"RoPE scaling {kind!r} in config.json lacks {missing}.") from None
    raise ValueError(f"RoPE scaling {kind!r} is not supported; allowed: default, linear, llama3.")


def reject_sliding_window(published: dict[str, Any], *, window: int | None, active: bool) -> None:
    """Raise ValueError if attention would be cut to a window; `window` and `active` are the family's defaults."""
    window = published.get("sliding_window", window)
    active = published.get("use_sliding_window", active)
    positions = published["max_position_embeddings"]
    if active and window is not None and window < positions:
        raise ValueError(
            f"sliding_window = {window} is not supported; allowed: null, or at least "
            f"max_position_embeddings = {positions}."
        )
