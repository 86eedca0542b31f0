"""Rotations by the published configuration: read as transformers reads them, or refused."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import UNSET, structs

from clusterkv_jax.models.config import LinearScaling, Llama3Scaling, LongScaling, Rope, Scaling, YarnScaling
from clusterkv_jax.models.hf_fields import MOST_POSITIONS, Decoder, RopeParameters, RopesByLayer, refuse
from clusterkv_jax.storage.schema import shown

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")
_THETA = 10000.0
AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)


def rope(
    file: Decoder,
    head_dim: int,
    *,
    theta: float = _THETA,
    fraction: float | None = None,
    interleaved: bool = False,
    types: Sequence[str] = ROPE_TYPES,
) -> Rope:
    """RoPE from `rope_theta` and `rope_scaling` (transformers 4) or from `rope_parameters` (transformers 5).

    Where both are given they must say the same. `theta` is the family's default, `fraction` the part of a head's
    dimensions that it rotates unless the file says otherwise; None for a family that rotates whole heads.

    Raises ValueError, naming the field, for rotations that the decoder does not implement.
    """
    found = {_rope(_parameters(file, part, theta), head_dim, fraction, interleaved, types) for part in _parts(file)}
    if len(found) > 1:
        raise ValueError(
            "config.json holds rope_scaling and rope_parameters, which differ; allowed: one of them, or both alike."
        )
    return found.pop()


def ropes_by_layer(file: AnyDecoder, theta: float | None) -> tuple[AnyDecoder, AnyDecoder]:
    """The file as layers that see every token read its rotations, and as those with a window do.

    `rope_scaling` is of the former alone. `theta` is the latter's in the style of transformers 4.
    """
    ropes: Any = file.rope_parameters or RopesByLayer()
    far = structs.replace(file, rope_parameters=ropes.full_attention, original_max_position_embeddings=None)
    near = structs.replace(far, rope_parameters=ropes.sliding_attention, rope_scaling=None, rope_theta=theta)
    return far, near


def longest_text(file: Decoder) -> int:
    """The most positions; with YaRN files may give the original ones, and the factor beside them."""
    parameters = _parameters(file, _parts(file)[0])
    if parameters["rope_type"] != "yarn":
        return file.max_position_embeddings
    longer = int(parameters["original_max_position_embeddings"] * parameters.get("factor", 1))
    return min(max(file.max_position_embeddings, longer), MOST_POSITIONS)


def _parts(file: Decoder) -> list[RopeParameters]:
    """Where the file speaks of rotations; an empty object says nothing."""
    empty = RopeParameters()
    return [part for part in (file.rope_scaling, file.rope_parameters) if part not in (None, empty)] or [empty]


def _parameters(file: Decoder, part: RopeParameters, theta: float = _THETA) -> dict[str, Any]:
    """What one part says, and the file where that is silent; an original length in the file itself comes first."""
    values = {name: getattr(part, name) for name in RopeParameters.__struct_fields__}
    parameters = {name: value for name, value in values.items() if value not in (None, UNSET)}
    longest, beside = file.max_position_embeddings, file.original_max_position_embeddings
    defaults = {
        "rope_theta": theta if file.rope_theta is None else file.rope_theta,
        "partial_rotary_factor": file.partial_rotary_factor,
        "original_max_position_embeddings": longest,
        "rope_type": parameters.get("type", "default"),
    }
    stated = {} if beside is None else {"original_max_position_embeddings": beside}
    found = {**defaults, **parameters, **stated, "max_position_embeddings": longest}
    if part.factor is None and found["rope_type"] == "yarn":  # null, which is not the same as nothing
        found["factor"] = longest / found["original_max_position_embeddings"]
    return found


def _rope(
    parameters: dict[str, Any], head_dim: int, fraction: float | None, interleaved: bool, types: Sequence[str]
) -> Rope:
    kind = "longrope" if parameters["rope_type"] == "su" else parameters["rope_type"]
    if kind not in types:
        raise ValueError(f"RoPE scaling {shown(repr(kind))} is not supported; allowed: {', '.join(types)}.")
    part = parameters["partial_rotary_factor"]
    if fraction is None and part not in (None, 1.0):
        refuse("partial_rotary_factor", part, 1.0)
    part = part or fraction or 1.0
    if (dim := int(head_dim * part)) < 2 or dim % 2:
        raise ValueError(
            f"config.json rotates {dim} of {head_dim} dimensions of a head (head_dim, partial_rotary_factor); "
            "allowed: an even number."
        )
    return Rope(parameters["rope_theta"], dim, interleaved, _scaling(kind, parameters))


def _scaling(kind: str, parameters: dict[str, Any]) -> Scaling | None:
    try:
        match kind:
            case "linear":
                return LinearScaling(parameters["factor"])
            case "llama3":
                return Llama3Scaling(
                    parameters["factor"],
                    parameters["low_freq_factor"],
                    parameters["high_freq_factor"],
                    parameters["original_max_position_embeddings"],
                )
            case "longrope":
                return _long(parameters)
            case "yarn":
                return _yarn(parameters)
    except KeyError as missing:
        raise ValueError(f"RoPE scaling {kind!r} in config.json lacks {missing}.") from None
    # Qwen's mrope is plain where the positions of time, height and width are one: in texts.
    # Dynamic NTK turns only those texts otherwise that are longer than max_position_embeddings, which are refused.
    return None


def _long(parameters: dict[str, Any]) -> LongScaling:
    """The factors for long texts where the model reads longer ones than it was trained on first, else the short ones.

    transformers takes the kind that a text's length asks for, and forgets its cache where a text outgrows the short
    ones. What is compressed cannot be rotated anew.
    """
    longest, original = parameters["max_position_embeddings"], parameters["original_max_position_embeddings"]
    long, short = tuple(parameters["long_factor"]), tuple(parameters["short_factor"])
    if original < 2:
        raise ValueError(f"original_max_position_embeddings = {original} is not supported; allowed: at least 2.")
    ratio = parameters.get("factor", longest / original)
    attention = parameters.get(
        "attention_factor", 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    )
    if longest <= original:
        return LongScaling(short, attention)
    return LongScaling(long, attention, short_factors=short, original_max_positions=original)


def _yarn(parameters: dict[str, Any]) -> YarnScaling:
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]

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


def scaling_to_hf(scaling: Scaling | None) -> dict[str, Any] | None:
    """The inverse of what `rope` reads of a scaling, in the style of transformers 4, which version 5 reads too."""
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
        case LongScaling(factors, attention_factor, short, original):
            both = {"short_factor": list(short or factors), "long_factor": list(factors)}
            first = {} if original is None else {"original_max_position_embeddings": original}
            return {"rope_type": "longrope", "attention_factor": attention_factor, **both, **first}
