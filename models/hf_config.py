"""The published configuration of a decoder: which fields are read, what they may hold, what they mean for the decoder.

Both styles are read, that of transformers 4 and that of transformers 5. A family declares its file as a subclass of
`Published` or `Decoder`, with its own defaults; what the file says of other things is not looked at.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clusterkv_jax.models.config import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelConfig,
    Rope,
    Scaling,
    YarnScaling,
)
from clusterkv_jax.schema import shown

_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Counts far above those of any model, and low enough that nothing which is made of them takes time or memory.
Layers = Annotated[int, Meta(ge=1, le=1024)]
Heads = Annotated[int, Meta(ge=1, le=2**14)]
Size = Annotated[int, Meta(ge=1, le=2**24)]
MOST_POSITIONS = 2**31 - 1
ExpertCount = Annotated[int, Meta(ge=1, le=2**12)]
Positions = Annotated[int, Meta(ge=1, le=MOST_POSITIONS)]
LayerTypes = Annotated[list[Literal["full_attention", "sliding_attention"]], Meta(max_length=1024)]
Epsilon = Annotated[float, Meta(gt=0, le=1)]
Ids = int | Annotated[list[int], Meta(max_length=256)] | None
_Factor = Annotated[float, Meta(ge=1e-3, le=1e6)]
Theta = Annotated[float, Meta(ge=1, le=1e15)]
_Fraction = Annotated[float, Meta(gt=0, le=1)]
_Turns = Annotated[float, Meta(ge=0, le=1e6)]
_Factors = Annotated[list[_Factor], Meta(max_length=2**14)]


class RopeParameters(Struct, kw_only=True):
    """What `rope_scaling` and `rope_parameters` hold, or the file itself beside them."""

    rope_theta: Theta | None = None
    partial_rotary_factor: _Fraction | None = None
    original_max_position_embeddings: Positions | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: _Factor | None = None
    low_freq_factor: _Factor | None = None
    high_freq_factor: _Factor | None = None
    attention_factor: _Factor | None = None
    beta_fast: _Turns | None = None
    beta_slow: _Turns | None = None
    mscale: _Turns | None = None
    mscale_all_dim: _Turns | None = None
    truncate: bool | None = None
    short_factor: _Factors | None = None
    long_factor: _Factors | None = None


class Generation(Struct):
    """What is read of `generation_config.json`."""

    eos_token_id: Ids = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


class Published(Struct, kw_only=True):
    """What the files of all families may hold."""

    model_type: str
    bos_token_id: int | None = None
    eos_token_id: Ids = None
    pad_token_id: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class Decoder(Published, kw_only=True):
    """What every Llama-like family names alike."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Size | None = None
    max_position_embeddings: Positions
    rms_norm_eps: Epsilon = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_theta: Theta | None = None
    partial_rotary_factor: _Fraction | None = None
    original_max_position_embeddings: Positions | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None


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
        "max_positions": _positions(file),
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
        "rope_scaling": _scaling_to_hf(config.rope.scaling),
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
        "pad_token_id": config.pad_id,
        "torch_dtype": config.dtype,
    }


def family_and_tokens(file: Published, vocab_size: int) -> dict[str, Any]:
    """The family, the special token ids and the published type, as ModelConfig fields."""
    return {
        "family": file.model_type,
        "bos_id": file.bos_token_id,
        "eos_ids": end_ids(file.eos_token_id, vocab_size),
        "pad_id": file.pad_token_id,
        "dtype": (file.dtype or file.torch_dtype or "float32").removeprefix("torch."),
    }


def end_ids(ids: int | list[int] | None, vocab_size: int) -> tuple[int, ...]:
    """End-of-text ids: files hold one, several or none. Raises ValueError for one that the vocabulary lacks."""
    found = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    for token in found:
        if not 0 <= token < vocab_size:
            raise ValueError(f"eos_token_id = {token} is no token of the vocabulary; allowed: 0 to {vocab_size - 1}.")
    return found


def demand(published: Mapping[str, Any], key: str, allowed: Any) -> None:
    """Raise ValueError if the file sets `key` to another value than the one that the decoder implements."""
    value = published.get(key, allowed)
    if (type(value), value) != (type(allowed), allowed):
        raise ValueError(f"config.json sets {key} = {shown(repr(value))}, which is not supported; allowed: {allowed}.")


def activation(name: str) -> str:
    """Our name of an activation function."""
    if name not in _ACTIVATION_NAMES:
        raise ValueError(f"Activation {shown(repr(name))} is not supported; allowed: {', '.join(_ACTIVATION_NAMES)}.")
    return _ACTIVATION_NAMES[name]


def rope(file: Decoder, head_dim: int, *, fraction: float = 1.0, interleaved: bool = False) -> Rope:
    """RoPE from `rope_theta` and `rope_scaling` (transformers 4) or from `rope_parameters` (transformers 5).

    `fraction` of the head's dimensions is rotated unless the file says otherwise.
    """
    parameters = _parameters(file)
    return Rope(
        theta=parameters.get("rope_theta", 10000.0),
        dim=int(head_dim * parameters.get("partial_rotary_factor", fraction)),
        interleaved=interleaved,
        scaling=_scaling(parameters),
    )


def _parameters(file: Decoder) -> dict[str, Any]:
    """What the file says of rotations, wherever it says it."""
    parameters: dict[str, Any] = {}
    for part in (file, file.rope_scaling, file.rope_parameters):
        values = {name: getattr(part, name, None) for name in RopeParameters.__struct_fields__}
        parameters |= {name: value for name, value in values.items() if value is not None}
    parameters["max_position_embeddings"] = file.max_position_embeddings
    if file.original_max_position_embeddings is not None:  # transformers takes it before the one in the scaling
        parameters["original_max_position_embeddings"] = file.original_max_position_embeddings
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    return parameters


def _positions(file: Decoder) -> int:
    """The longest text; with YaRN files may give the original one, and the factor beside it."""
    parameters = _parameters(file)
    original, factor = (parameters.get(name) for name in ("original_max_position_embeddings", "factor"))
    if parameters["rope_type"] != "yarn" or original is None or factor is None:
        return file.max_position_embeddings
    return min(max(file.max_position_embeddings, int(original * factor)), MOST_POSITIONS)


def _scaling(parameters: dict[str, Any]) -> Scaling | None:
    kind = parameters["rope_type"]
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(parameters["factor"])
            case "llama3":
                return Llama3Scaling(
                    parameters["factor"],
                    parameters["low_freq_factor"],
                    parameters["high_freq_factor"],
                    parameters["original_max_position_embeddings"],
                )
            case "longrope" | "su":
                return _long(parameters)
            case "yarn":
                return _yarn(parameters)
    except KeyError as missing:
        raise ValueError(f"RoPE scaling {kind!r} in config.json lacks {missing}.") from None
    raise ValueError(
        f"RoPE scaling {shown(repr(kind))} is not supported; allowed: default, linear, llama3, longrope, yarn."
    )


def _long(parameters: dict[str, Any]) -> LongScaling:
    """The factors for long texts where the model reads longer ones than it was trained on first, else the short ones.

    transformers takes the kind that a text's length asks for, and forgets its cache where a text outgrows the short
    ones. What is compressed cannot be rotated anew.
    """
    longest, original = parameters["max_position_embeddings"], parameters["original_max_position_embeddings"]
    factors = parameters["long_factor"], parameters["short_factor"]
    if original < 2:
        raise ValueError(f"original_max_position_embeddings = {original} is not supported; allowed: at least 2.")
    ratio = parameters.get("factor", longest / original)
    attention = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    return LongScaling(tuple(factors[longest <= original]), parameters.get("attention_factor", attention))


def _yarn(parameters: dict[str, Any]) -> YarnScaling:
    """A missing factor is what the longest text is of the original one; so long do queries and keys become."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor", parameters["max_position_embeddings"] / original)

    def longer(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention = longer(mscale) / longer(all_dim) if mscale and all_dim else longer(1.0)
    return YarnScaling(
        factor,
        original,
        parameters.get("attention_factor", attention),
        parameters.get("beta_fast") or 32.0,
        parameters.get("beta_slow") or 1.0,
        parameters.get("truncate", True),
    )


def _scaling_to_hf(scaling: Scaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "attention_factor": scaling.attention_factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            }
        case LongScaling(factors, attention_factor):
            both = {"short_factor": list(factors), "long_factor": list(factors)}
            return {"rope_type": "longrope", "attention_factor": attention_factor, **both}


def sliding(window: int | None, fields: Mapping[str, Any], types: Sequence[str] | None = None) -> dict[str, Any]:
    """The window of a decoder with these fields and the layers that slide, by their types; without types all do.

    A window that is no shorter than the longest text is none. Raises ValueError for another number of types.
    """
    count = fields["num_layers"]
    if types is not None and len(types) != count:
        raise ValueError(f"layer_types in config.json names {len(types)} layers; allowed: {count}.")
    layers = tuple(i for i in range(count) if types is None or types[i] == "sliding_attention")
    if window is None or window >= fields["max_positions"] or not layers:
        return {"window": None, "sliding_layers": ()}
    return {"window": window, "sliding_layers": layers}
