"""A Flax nnx model whose cache is compressed."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from clusterkv_jax import decoding, generation
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.layers import KVCache
from clusterkv_jax.calibration import read as read_calibration
from clusterkv_jax.calibration import with_shares
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.generation.results import Result
from clusterkv_jax.methods.auto import settled
from clusterkv_jax.methods.base import Method
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.nnx.decoder import FlaxDecoder, in_parts
from clusterkv_jax.nnx.layouts import Layout, attentions, layers_of, layout_of
from clusterkv_jax.presets import as_method
from clusterkv_jax.runtime.checks import check_ids, on_host
from clusterkv_jax.runtime.errors import shown
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.sharding import auto_mesh
from clusterkv_jax.text.prompts import Texts, is_list

# Positions of a model that says nothing of them.
MAX_POSITIONS = 1 << 20

_decode_step = jit(static_argnames=("config", "method"), donate_argnames=("cache",))(decoding.decode_step)
_extend_step = jit(static_argnames=("config", "method"), donate_argnames=("cache",))(decoding.extend_step)


def compressed(
    model: nnx.Module,
    method: Method | str,
    *,
    ratio: float | None = None,
    tokens: int | None = None,
    budget: Budget | None = None,
    attention: Layout | None = None,
    max_positions: int = MAX_POSITIONS,
    eos_ids: Sequence[int] = (),
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    calibration: str | os.PathLike[str] | None = None,
) -> "CompressedModel":
    """A Flax nnx model with a compressed cache; the model itself stays as it is, and its arrays are not copied.

    Args:
        model: a decoder in the mode in which it is to answer (`model.eval()`).
        method: what is kept of a prompt, by name or as an object.
        ratio: the share of the cache that a method of a name keeps.
        tokens: or how many rows.
        budget: or any budget.
        attention: where the model's attention is and what it projects; found by attribute names by default, for models
            whose attention has the methods `qkv` and `output`, for tunix's Qwen2, Qwen3, Llama 3 and Gemma 1 to 3, and
            for bonsai's Qwen3.
        max_positions: most tokens of a prompt and all that is appended to it.
        eos_ids: tokens that end a text.
        tokenizer: of the tokenizers library, for `generate` with texts.
        mesh: the devices that `generate` uses; the model's arrays are laid out over it by whoever made them.
        calibration: what `clusterkv calibrate` wrote for a model with the same weights, as `load` takes it: methods of
            learned scores need its surrogate, and get the shares of heads that were measured with it.

    Raises:
        ValueError: one sentence that says what of the attention is missing, or what does not fit, a calibration of
            another model for one.
        FileNotFoundError: if there is no such calibration.
    """
    if not isinstance(model, nnx.Module):
        raise ValueError(f"model must be a flax.nnx.Module, got {shown(model)}.")
    kept: Any = method
    if isinstance(method, str) or any(x is not None for x in (ratio, tokens, budget)):
        kept = as_method(method, budget=budget, ratio=ratio, tokens=tokens, learned=calibration is not None)
    if not hasattr(type(kept), "budget_rows"):
        raise ValueError(f"method must be an object such as CentroidKV(Budget(ratio=0.25)), got {shown(method)}.")
    if not isinstance(attention, Layout | None):
        raise ValueError(f"attention must be an nnx.Layout or None, got {shown(attention)}.")
    if not is_list(eos_ids) or not all(isinstance(end, int | np.integer) for end in eos_ids):
        raise ValueError(f"eos_ids must be a list of token ids, got {shown(eos_ids)}.")
    layout = layout_of(model) if attention is None else attention
    config = _config(model, layout, max_positions, tuple(eos_ids))
    found = None if calibration is None else read_calibration(calibration)
    if found is not None:
        found.check(config)
        kept = with_shares(found, settled(kept, found))
    surrogate = None if found is None else found.surrogate
    return CompressedModel(model, kept, config, tokenizer, None if mesh is None else auto_mesh(mesh), surrogate)


class CompressedModel(nnx.Module):
    """A Flax nnx model with a compressed cache, from `compressed`. It is a module: `nnx.jit` and `nnx.split` take it.

    It holds the model, not a copy: what trains the one changes what the other answers. Its cache is a pytree.
    """

    def __init__(
        self,
        model: nnx.Module,
        method: Method,
        config: ModelConfig,
        tokenizer: Any,
        mesh: Mesh | None,
        surrogate: Sequence[Any] | None = None,
    ):
        self.model = model
        # Variables, which `nnx.split` finds; no parameters, which an optimizer would.
        layers = () if surrogate is None else zip(config.global_layers, surrogate, strict=True)
        self.surrogate = nnx.Dict({str(number): _variables(arrays) for number, arrays in layers})
        self.method = method
        self.config = config
        self.tokenizer = tokenizer
        self.mesh = mesh

    @property
    def params(self) -> Params:
        """The model's arrays as `prefill` and `decode_step` of the library take them, with `config`."""
        params = in_parts(self.model, self.config.decoder.layout, self.config.dtype)
        learned = {int(layer): arrays for layer, arrays in self.surrogate.items()}
        layers = [
            {**layer, "surrogate": {name: x[...] for name, x in learned[i].items()}} if i in learned else layer
            for i, layer in enumerate(params["layers"])
        ]
        return params | {"layers": tuple(layers)}

    def as_model(self) -> Model:
        """The model as `load` would give it: for `generate`, evaluation and all else that takes one."""
        return Model(self.params, self.config, self.tokenizer, self.mesh, type(self.model).__name__)

    def prefill(
        self, tokens: Int[Array | np.ndarray, "B N"], lengths: Int[Array | np.ndarray, " B"], **options: Any
    ) -> tuple[KVCache, Float[Array, "B V"]]:
        """Read prompts and compress them; `options` and errors are those of `clusterkv_jax.prefill`.

        `reserve` is the number of tokens that will be appended, questions included.
        """
        return decoding.prefill(self.params, self.config, self.method, tokens, lengths, **options)

    def decode_step(self, cache: KVCache, token: Int[Array | np.ndarray, " B"]) -> tuple[KVCache, Float[Array, "B V"]]:
        """Append one token to each sequence; logits of the next. The cache is donated: use the one that comes back.

        Raises ValueError if a token that lies on the host is not in the vocabulary.
        """
        if on_host(token):
            check_ids(token, self.config.vocab_size)
        return _decode_step(self.params, self.config, self.method, cache, jnp.asarray(token, jnp.int32))

    def extend(
        self, cache: KVCache, tokens: Int[Array | np.ndarray, "B T"], counts: Int[Array | np.ndarray, " B"]
    ) -> tuple[KVCache, Float[Array, "B V"]]:
        """Append the first `counts` of T tokens to each sequence, such as a question; logits after the last of them.

        `prefill` must have been told of them: `step_tokens` of at least T. The cache is donated.

        Raises ValueError if a token that lies on the host is not in the vocabulary.
        """
        if on_host(tokens):
            check_ids(tokens, self.config.vocab_size)
        tokens, counts = jnp.asarray(tokens, jnp.int32), jnp.asarray(counts, jnp.int32)
        return _extend_step(self.params, self.config, self.method, cache, tokens, counts)

    def generate(self, prompts: Texts, **options: Any) -> Result:
        """Continue prompts or answer questions about them; `options` and errors are those of `clusterkv_jax.generate`.

        Prompts and questions are lists of token ids, or texts where there is a tokenizer.
        """
        return generation.generate(self.as_model(), prompts, method=self.method, **options)


def _variables(arrays: Mapping[str, Any]) -> Any:
    return nnx.Dict({name: nnx.Variable(jnp.asarray(x)) for name, x in arrays.items()})


def _config(model: nnx.Module, layout: Layout, max_positions: int, eos_ids: tuple[int, ...]) -> ModelConfig:
    """Sizes of a model, from shapes that go through it. Raises ValueError if they do not fit each other."""
    attentions(layers_of(model, layout.layers), layout.attention)
    parts, ids, name = in_parts(model, layout), jnp.zeros((1, 2), jnp.int32), type(model).__name__
    plain = FlaxDecoder(layout)
    hidden = jax.eval_shape(plain.embed, parts, ids, ids)
    through = partial(jax.eval_shape, lambda *args: _through_layer(plain, *args))
    (q, k, _), result = through(parts["layers"][0], hidden, ids)
    for number, layer in enumerate(parts["layers"][1:], start=1):
        (other_q, other_k, _), _ = through(layer, hidden, ids)
        if (other_q.shape, other_k.shape) != (q.shape, k.shape):
            raise ValueError(
                f"{name}: all layers need as many heads of the same size, got queries {q.shape} and keys {k.shape} in "
                f"layer 0, {other_q.shape} and {other_k.shape} in layer {number}."
            )
    decoder = FlaxDecoder(layout, _place(result, hidden, name))
    logits = jax.eval_shape(decoder.unembed, parts, hidden)
    return ModelConfig(
        family="flax",
        vocab_size=logits.shape[-1],
        hidden_size=hidden.shape[-1],
        intermediate_size=hidden.shape[-1],
        num_layers=len(parts["layers"]),
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=k.shape[3],
        max_positions=max_positions,
        rope=layout.rope,
        eos_ids=eos_ids,
        dtype=str(k.dtype),
        decoder=decoder,
        **_reach(model, layout),
    )


def _reach(model: nnx.Module, layout: Layout) -> dict[str, Any]:
    """Which layers have a window, and the cap of scores. Raises ValueError where layers differ otherwise."""
    every = attentions(layers_of(model, layout.layers), layout.attention)
    windows, caps = [layout.window(one) for one in every], {layout.soft_cap(one) for one in every}
    sizes = {window for window in windows if window is not None}
    for what, found in (("window", sizes), ("cap of scores", caps)):
        if len(found) > 1:
            raise ValueError(f"{type(model).__name__}: all layers need the same {what}, got {sorted(found, key=str)}.")
    sliding = tuple(layer for layer, window in enumerate(windows) if window is not None)
    return {"window": next(iter(sizes), None), "sliding_layers": sliding, "soft_cap": next(iter(caps))}


def _through_layer(decoder: FlaxDecoder, layer: Params, hidden: Array, positions: Array) -> tuple[Any, Any]:
    result, place = decoder.run(layer, hidden, positions)
    if place.qkv is None:
        raise ValueError(f"A layer does not call its attention {decoder.layout.attention!r}.")
    return place.qkv, result


def _place(result: Any, hidden: Any, name: str) -> tuple[int, int] | None:
    """Where hidden states are in what a layer returns."""
    if not isinstance(result, tuple | list):
        result, places = (result,), None
    else:
        places = len(result)
    found = [i for i, x in enumerate(result) if getattr(x, "shape", None) == hidden.shape]
    if len(found) != 1:
        raise ValueError(f"{name}: a layer must return hidden states {hidden.shape}, once, got {shown(result)}.")
    return None if places is None else (found[0], places)
