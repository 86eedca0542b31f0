"""How attention of a Flax model is laid out: the protocol, and the layouts of published models."""

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from clusterkv_jax.models.config import LinearScaling, Rope

# What layers call their attention.
_ATTENTIONS = ("attn", "attention", "self_attn")


def _call(model: Any, tokens: Any, positions: Any) -> Any:
    return model(tokens, positions)


def _layer(layer: Any, hidden: Any, positions: Any) -> Any:
    return layer(hidden, positions)


def _qkv(attention: Any, *args: Any, **kwargs: Any) -> Any:
    return attention.qkv(*args, **kwargs)


def _output(attention: Any, attended: Any) -> Any:
    return attention.output(attended)


def _window(attention: Any) -> int | None:
    return getattr(attention, "window", None)


def _soft_cap(attention: Any) -> float | None:
    return getattr(attention, "soft_cap", None)


@dataclass(frozen=True)
class Layout:
    """Where a model's attention is, and how to go into it and out again.

    Programs are compiled for a layout, so its functions are to be defined once. The defaults are those of a model that
    is called with tokens and positions, whose layers are called with hidden states and positions, and whose attention
    has the methods `qkv(hidden, positions)` and `output(attended)`, and perhaps the attributes `window` and `soft_cap`.

    Attributes:
        project: project(attention, *args, **kwargs) -> queries [B,T,H,D], keys and values [B,T,K,D]; the arguments are
            those with which the layer calls its attention. Keys come as they are cached, rotated and normed. Scores are
            q k / sqrt(D): a model that scales otherwise has that scale in its queries.
        output: output(attention, attended [B,T,H,D]) -> whatever the attention returns.
        layer: layer(layer, hidden [B,T,M], positions i32 [B,T]) -> what a layer returns: hidden states, or a tuple that
            has them.
        call: call(model, tokens i32 [B,T], positions i32 [B,T]) -> logits [B,T,V].
        layers: the model's attribute that lists its layers, with dots where it is one of a part.
        attention: the attribute of a layer that is its attention.
        rope: the model's rotations, for the methods that rotate keys; None says that it has none.
        window: window(attention) -> of how many last tokens it sees the keys, itself included; None is all.
        soft_cap: soft_cap(attention) -> c of scores c tanh(s / c), the same in all layers; None is no cap.
    """

    project: Callable[..., Any] = _qkv
    output: Callable[..., Any] = _output
    layer: Callable[..., Any] = _layer
    call: Callable[..., Any] = _call
    layers: str = "layers"
    attention: str = "attn"
    rope: Rope | None = None
    window: Callable[[Any], int | None] = _window
    soft_cap: Callable[[Any], float | None] = _soft_cap


def layout_of(model: Any) -> Layout:
    """The layout of a model of a known kind.

    Raises ValueError that names what is missing.
    """
    layers = layers_of(model, Layout.layers)
    name = next((name for name in _ATTENTIONS if hasattr(layers[0], name)), None)
    if name is None:
        raise ValueError(
            f"A layer of {type(model).__name__}, {type(layers[0]).__name__}, has no attention under the names "
            f"{', '.join(_ATTENTIONS)}: give compressed attention=nnx.Layout(attention=...)."
        )
    every = attentions(layers, name)
    attention = every[0]
    make = _kind(attention)
    if make is None:
        raise ValueError(_missing(attention))
    for number, other in enumerate(every):
        if _kind(other) is not make:
            raise ValueError(
                f"{type(model).__name__}: all layers need attention of one kind, got {type(attention).__name__} in "
                f"layer 0 and {type(other).__name__} in layer {number}."
            )
    # The rotations of a model are those of a layer that sees every token.
    layout = make(attention)
    whole = next((one for one in every if layout.window(one) is None), attention)
    return replace(make(whole), attention=name)


def attentions(layers: list[Any], name: str) -> list[Any]:
    """The attention of each layer under this attribute. Raises ValueError if one has none."""
    for layer in layers:
        if getattr(layer, name, None) is None:
            raise ValueError(f"{type(layer).__name__} has no attention under the name {name!r}.")
    return [getattr(layer, name) for layer in layers]


def layers_of(model: Any, path: str) -> list[Any]:
    """The layers under this attribute. Raises ValueError if it lists none."""
    try:
        layers = list(attrgetter(path)(model))
    except (AttributeError, TypeError):
        layers = []
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no list of layers under the name {path!r}: "
            "give compressed attention=nnx.Layout(layers=...)."
        )
    return layers


def _kind(attention: Any) -> Callable[[Any], Layout] | None:
    """What makes the layout of attention of this kind."""
    beside = sys.modules.get(type(attention).__module__)
    return next((make for names, near, make in _KNOWN if _has(attention, names) and _has(beside, near)), None)


def _has(module: Any, names: tuple[str, ...]) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


def _missing(attention: Any) -> str:
    absent = [name for name in ("qkv", "output") if not hasattr(attention, name)]
    absent += [name for name in _PROJECTIONS if not hasattr(attention, name)]
    return (
        f"{type(attention).__name__} is attention of an unknown kind, without {', '.join(absent)}: give it methods "
        "qkv(...) and output(attended), or give compressed attention=nnx.Layout(project=..., output=...)."
    )


# --- protocol: an attention with the methods qkv and output ---


def _own(attention: Any) -> Layout:
    rope = getattr(attention, "rope", None)
    return Layout(rope=rope if isinstance(rope, Rope) else None)


# --- tunix: Qwen3, Llama 3 ---


def _beside(attention: Any, name: str) -> Any:
    """A function beside an attention's class."""
    return getattr(sys.modules[type(attention).__module__], name)


def _default(function: Any, name: str) -> float:
    return float(inspect.signature(function).parameters[name].default)


def _tunix_projected(attention: Any, hidden: Any, positions: Any, *_: Any, **__: Any) -> Any:
    q, k, v = (getattr(attention, f"{name}_proj")(hidden) for name in "qkv")
    return _tunix_rotated(attention, *_normed(attention, q, k), v, positions)


def _normed(attention: Any, q: Any, k: Any) -> tuple[Any, Any]:
    return (attention.q_norm(q), attention.k_norm(k)) if hasattr(attention, "q_norm") else (q, k)


def _tunix_rotated(attention: Any, q: Any, k: Any, v: Any, positions: Any) -> Any:
    rotate = _beside(attention, "apply_rope")
    return *(rotate(x, positions, head_dim=attention.head_dim) for x in (q, k)), v


def _tunix_output(attention: Any, attended: Any) -> Any:
    return None, attention.o_proj(attended)


def _tunix_layer(layer: Any, hidden: Any, positions: Any) -> Any:
    return layer.block(hidden, positions, None, None)  # what its call may compute twice, to train in less memory


def _tunix_call(model: Any, tokens: Any, positions: Any) -> Any:
    return model(tokens, positions, None, None)[0]


_TUNIX = Layout(_tunix_projected, _tunix_output, _tunix_layer, _tunix_call)


def _tunix(attention: Any) -> Layout:
    # Its attention leaves the base to the function's default, whatever the model's configuration says.
    return replace(_TUNIX, rope=Rope(_default(_beside(attention, "apply_rope"), "rope_theta"), attention.head_dim))


# --- tunix: Qwen2 ---


def _qwen2_projected(attention: Any, hidden: Any, *_: Any, sin: Any, **__: Any) -> Any:
    q, k, v = (_biased(attention, name, hidden) for name in "qkv")
    turns = _beside(attention, "_generate_pos_embeddings")(sin, attention.head_dim, attention.config.rope_theta)
    rotate = _beside(attention, "apply_rotary_embedding")
    return *(rotate(x, *(turn.astype(x.dtype) for turn in turns)) for x in (q, k)), v


def _biased(attention: Any, name: str, hidden: Any) -> Any:
    x, bias = getattr(attention, f"{name}_proj")(hidden), getattr(attention, f"{name}_bias")[...]
    return x + bias.astype(x.dtype).reshape(1, 1, *x.shape[2:])


def _qwen2_layer(layer: Any, hidden: Any, positions: Any) -> Any:
    return layer.block(hidden, None, None, sin=positions, cos=None)  # the model would make sines of the positions


_QWEN2 = replace(_TUNIX, project=_qwen2_projected, layer=_qwen2_layer)


def _qwen2(attention: Any) -> Layout:
    return replace(_QWEN2, rope=Rope(float(attention.config.rope_theta), attention.head_dim))


# --- tunix: Gemma ---


def _gemma_parts(attention: Any, hidden: Any) -> tuple[Any, Any, Any]:
    if attention.use_qkv_einsum:
        return tuple(attention.qkv_einsum(hidden))
    return attention.q_einsum(hidden), *attention.kv_einsum(hidden)


def _gemma_projected(attention: Any, hidden: Any, positions: Any, *_: Any, **__: Any) -> Any:
    return _tunix_rotated(attention, *_gemma_parts(attention, hidden), positions)


def _gemma_output(attention: Any, attended: Any) -> Any:
    return None, attention.attn_vec_einsum(attended)


def _gemma_window(attention: Any) -> int | None:
    """Raises ValueError for a type of attention that is not known."""
    kind = attention.attn_type.name
    if kind not in ("GLOBAL", "LOCAL_SLIDING"):
        raise ValueError(f"{type(attention).__name__} is of the type {kind}; allowed: GLOBAL, LOCAL_SLIDING.")
    return attention.sliding_window_size if kind == "LOCAL_SLIDING" else None


def _gemma_cap(attention: Any) -> float | None:
    return getattr(attention, "attn_logits_soft_cap", None)


_GEMMA = replace(_TUNIX, project=_gemma_projected, output=_gemma_output, window=_gemma_window, soft_cap=_gemma_cap)


def _gemma(attention: Any) -> Layout:
    return replace(_GEMMA, rope=Rope(_default(_beside(attention, "apply_rope"), "max_wavelength"), attention.head_dim))


# --- tunix: Gemma 3, whose layers with a window have rotations of their own ---


def _gemma3_projected(attention: Any, hidden: Any, positions: Any, *_: Any, **__: Any) -> Any:
    q, k, v = _gemma_parts(attention, hidden)
    turns = {"base_frequency": attention.rope_base_frequency, "scale_factor": attention.rope_scale_factor}
    rotate = partial(_beside(attention, "apply_rope"), positions=positions, head_dim=attention.head_dim, **turns)
    scale = attention.query_pre_attn_scalar * math.sqrt(attention.head_dim)
    return rotate(attention._query_norm(q)) * scale, rotate(attention._key_norm(k)), v


def _gemma3(attention: Any) -> Layout:
    factor = float(attention.rope_scale_factor)
    scaling = None if factor == 1 else LinearScaling(factor)
    rope = Rope(float(attention.rope_base_frequency), attention.head_dim, scaling=scaling)
    return replace(_GEMMA, project=_gemma3_projected, rope=rope)


# --- bonsai: Qwen3 ---


def _bonsai_projected(attention: Any, hidden: Any, _: Any, positions: Any, *__: Any) -> Any:
    q, k, v = (getattr(attention, f"{name}_proj")(hidden) for name in "qkv")
    sin, cos = _beside(attention, "_generate_pos_embeddings")(positions, attention.head_dim)
    rotate = _beside(attention, "apply_rope")
    return *(rotate(x, sin, cos) for x in _normed(attention, q, k)), v


def _bonsai_output(attention: Any, attended: Any) -> Any:
    return attention.o_proj(attended)


def _bonsai_layer(layer: Any, hidden: Any, positions: Any) -> Any:
    return layer(hidden, None, positions)  # positions where its attention would make them of segments


def _bonsai_call(model: Any, tokens: Any, positions: Any) -> Any:
    return model(tokens, cache=[None] * len(model.layers), segment_ids=positions)


_BONSAI = Layout(_bonsai_projected, _bonsai_output, _bonsai_layer, _bonsai_call)


def _bonsai(attention: Any) -> Layout:
    theta = _default(_beside(attention, "_generate_pos_embeddings"), "rope_theta")
    return replace(_BONSAI, rope=Rope(theta, attention.head_dim))


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# What attention of a kind has, what is beside its class, and how its layout is made; the first that fits.
_KNOWN: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[[Any], Layout]], ...] = (
    (("qkv", "output"), (), _own),
    (_PROJECTIONS, ("apply_rotary_embedding", "_generate_pos_embeddings"), _qwen2),
    (_PROJECTIONS, ("apply_rope", "_generate_pos_embeddings"), _bonsai),
    (_PROJECTIONS, ("apply_rope",), _tunix),
    (("attn_vec_einsum", "use_qkv_einsum", "rope_base_frequency", "query_pre_attn_scalar"), ("apply_rope",), _gemma3),
    (("attn_vec_einsum", "use_qkv_einsum"), ("apply_rope",), _gemma),
)
