"""Which fields a published configuration may hold: what is read, what is assumed, and what changes no logits.

A family declares every field of its configuration class in transformers as a subclass of `Published` or `Decoder`, with
the class's own defaults. Both styles are read, that of transformers 4 and that of transformers 5. Fields that nobody
declares say nothing of the decoder.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from clusterkv_jax.storage.schema import checked, shown

# Counts far above those of any model, and low enough that nothing which is made of them takes time or memory.
Layers = Annotated[int, Meta(ge=1, le=1024)]
Heads = Annotated[int, Meta(ge=1, le=2**14)]
Size = Annotated[int, Meta(ge=1, le=2**24)]
MOST_POSITIONS = 2**31 - 1
ExpertCount = Annotated[int, Meta(ge=1, le=2**12)]
Positions = Annotated[int, Meta(ge=1, le=MOST_POSITIONS)]
LayerTypes = Annotated[list[str], Meta(max_length=1024)]
Epsilon = Annotated[float, Meta(gt=0, le=1)]
Ids = int | Annotated[list[int], Meta(max_length=256)] | None
Theta = Annotated[float, Meta(ge=1, le=1e15)]
_Factor = Annotated[float, Meta(ge=1e-3, le=1e6)]
_Fraction = Annotated[float, Meta(gt=0, le=1)]
_Turns = Annotated[float, Meta(ge=0, le=1e6)]
_Factors = Annotated[list[_Factor], Meta(max_length=2**14)]


class RopeParameters(Struct, kw_only=True):
    """What `rope_scaling` and `rope_parameters` hold."""

    rope_theta: Theta | None = None
    partial_rotary_factor: _Fraction | None = None
    original_max_position_embeddings: Positions | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: _Factor | UnsetType | None = UNSET
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
    llama_4_scaling_beta: _Turns | None = None
    # Only `RopesByLayer` has rotations for each kind of layer.
    full_attention: None = None
    sliding_attention: None = None


class RopesByLayer(Struct):
    """What `rope_parameters` holds of families whose sliding layers have rotations of their own."""

    full_attention: RopeParameters | None = None
    sliding_attention: RopeParameters | None = None


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
    """What the files of all families may hold.

    A field of `assumed` may have these values only; those of `without_effect` change no logits. `default_eos` ends the
    texts of a model whose file does not say what does.
    """

    default_eos: ClassVar[int | tuple[int, ...] | None] = None
    assumed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "is_causal": (True,),
        "is_encoder_decoder": (False,),
        "per_layer_config": (None,),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            *("architectures", "transformers_version", "id2label", "label2id", "problem_type"),
            *("output_hidden_states", "return_dict", "use_cache", "chunk_size_feed_forward"),
            *("initializer_range", "attention_dropout"),
        }
    )

    model_type: str
    bos_token_id: int | None = None
    eos_token_id: Ids | UnsetType = UNSET
    pad_token_id: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class Decoder(Published, kw_only=True):
    """What every Llama-like family names alike."""

    # Families whose layers may differ read their types.
    assumed: ClassVar = {**Published.assumed, "layer_types": (None,)}

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
    rope_theta: Theta | None = None
    partial_rotary_factor: _Fraction | None = None
    original_max_position_embeddings: Positions | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None


class Sparse(Decoder, kw_only=True):
    """A decoder with experts, whose number has two names."""

    default_experts: ClassVar[int] = 1
    without_effect = Decoder.without_effect | {"output_router_logits", "router_aux_loss_coef"}

    num_experts: ExpertCount | None = None
    num_local_experts: ExpertCount | None = None
    num_experts_per_tok: ExpertCount


File = TypeVar("File", bound=Published)


def declared(published: Mapping[str, Any], kind: type[File], where: str) -> File:
    """A configuration as its family declares it. Raises ValueError for a field that the decoder does not follow."""
    for key, allowed in kind.assumed.items():
        demand(published, key, *allowed)
    return checked(published, kind, where)


def demand(published: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """Raise ValueError if the file sets `key` to another value than those that the decoder implements."""
    value = published.get(key, allowed[0])
    if (type(value), value) not in [(type(one), one) for one in allowed]:
        refuse(key, value, *allowed)


def refuse(key: str, value: Any, *allowed: Any) -> NoReturn:
    """Raise ValueError for a field whose value the decoder does not implement."""
    named = ", ".join(map(str, allowed))
    raise ValueError(f"config.json sets {key} = {shown(repr(value))}, which is not supported; allowed: {named}.")
