"""New tokens through the model, over its compressed cache: as one program with its layers unrolled, or layer by layer.

    append_step       pure, for use in a jit: tokens that a batch is given
    next_tokens       the same of the token that it drew last, and its next: the step of every decode loop
    append_layerwise  programs that layers share, each in place: a question, which is read once

A program of thirty layers takes thirty times as long to compile as one of a layer, and runs a few milliseconds less.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache.kinds import alike, as_it_was
from clusterkv_jax.cache.layers import KVCache, Layer, State, StepInputs, overflowed
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.driver import placed, placed_state, step_layer
from clusterkv_jax.methods.plan import inputs_of_layer
from clusterkv_jax.methods.recompression import room_of_sequences
from clusterkv_jax.models import decoder
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.sharding import constrain


def append_step(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    at: Int[Array, "B P"] | None = None,
) -> tuple[KVCache, Float[Array, "B ... V"]]:
    """`extend_step` that leaves compression to its caller, for whom it need not even be compiled.

    With `at` the logits are those after these of the T tokens, [B,P,V]: for losses.
    """

    def run(number: int, *args: Any) -> Any:
        with jax.named_scope(f"layer_{number}"):
            return _step_layer(*args)

    entered = enter(params, config, cache.position, tokens, counts)
    hidden, cache = through_layers(params, config, method, cache, entered, run)
    cache = replace(cache, layers=placed(method, cache.layers), position=cache.position + counts)
    return cache, leave(params, config, cache, hidden, counts, at)


append_step_jit = jit(static_argnames=("config", "method"), donate_argnames=("cache",))(append_step)


def next_tokens(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    token: Int[Array, " B"],
    counts: Int[Array, " B"],
    choose: Callable[[Float[Array, "B V"]], Int[Array, " B"]],
    ends: Int[Array, " ends"],
) -> tuple[KVCache, Float[Array, "B V"], Int[Array, " B"], Bool[Array, " B"]]:
    """The last token of each sequence enters where its count is 1, and the logits behind it choose the next one: cache,
    logits, tokens, and which of these are among `ends`.
    """
    cache, logits = append_step(params, config, method, cache, token[:, None], counts)
    new = choose(logits)
    return cache, logits, new, jnp.isin(new, ends)


def enter(
    params: Params, config: ModelConfig, position: Int[Array, " B"], tokens: Int[Array, "B T"], counts: Int[Array, " B"]
) -> tuple[Float[Array, "B T M"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """What the first layer reads of tokens behind `position`, their positions, and which of them are real."""
    width = tokens.shape[1]
    positions = position[:, None] + ordinals(width, 2)
    hidden = constrain(decoder.embed(params, config, tokens, positions), "batch", None, None)
    return hidden, positions, ordinals(width, 2) < counts[:, None]


def through_layers(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    entered: tuple[Float[Any, "B T M"], Int[Any, "B T"], Bool[Any, "B T"]],
    run: Callable[..., Any],
    *,
    shape_alone: bool = False,
    rows_of: Callable[[int], tuple[Layer, tuple[State | None, ...]]] | None = None,
) -> tuple[Float[Any, "B T M"], KVCache]:
    """What the last layer says of tokens that have `entered`, and the cache with their rows.

    `run` takes a layer's number and the arguments of `step_one_layer`; `shape_alone` is that of `kinds.alike`.
    `rows_of` gives a layer and its state when it is their turn, in place of those of the cache.
    """
    hidden, positions, real = entered
    layers, state, before = [], [], None
    for number, weights in enumerate(params["layers"]):
        inputs = inputs_of_layer(config, method, number)
        held, memory = (cache.layers[number], cache.state[number]) if rows_of is None else rows_of(number)
        rows = alike(held, shape_alone=shape_alone), memory
        entering = hidden, before if "lookahead" in inputs else None
        args = weights, config.of_layer(number), method, inputs, *rows, *entering, positions, real
        before, (hidden, layer, memory) = hidden, run(number, *args)
        layers.append(as_it_was(layer, held))
        state.append(memory)
    return hidden, replace(cache, layers=tuple(layers), state=tuple(state))


def leave(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    hidden: Float[Array, "B T M"],
    counts: Int[Array, " B"],
    at: Int[Array, "B P"] | None = None,
) -> Float[Array, "B ... V"]:
    """The logits of what the last layer says, as in `append_step`; NaN where the cache has had no room."""
    places = jnp.maximum(counts - 1, 0)[:, None] if at is None else at
    hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
    logits = decoder.unembed(params, config, hidden[:, 0] if at is None else hidden)
    # A GPU's compiler would put the comparisons of all heads into the product of the logits, and find no fast one.
    over = jax.lax.optimization_barrier(overflowed(cache))
    return jnp.where(over, jnp.nan, logits)


def step_one_layer(
    weights: Params,
    config: ModelConfig,
    method: Method,
    inputs: frozenset[str],
    layer: Layer,
    state: tuple[State | None, ...],
    hidden: Float[Array, "B T M"],
    before: Float[Array, "B T M"] | None,
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T M"], Layer, tuple[State | None, ...]]:
    """New tokens through one layer; `before` is what entered the layer before it."""
    lookup = None if before is None else decoder.attention_in(weights, config, before, positions)[0]
    surrogate = surrogate_of(weights, method) if "scores" in inputs else None
    q, k, v, scores = decoder.attention_in(weights, config, hidden, positions, surrogate)
    sinks = decoder.sink_logits(weights, config)
    new = StepInputs(q, k, v, positions, real, lookup, scores, sinks, config.rope, config.soft_cap)
    attended, layer, state = step_layer(method, layer, state, new)
    return decoder.attention_out_and_mlp(weights, config, hidden, attended), layer, state


# Equal layers are traced once.
_step_layer = jax.jit(step_one_layer, static_argnames=("config", "method", "inputs"))


def surrogate_of(weights: Params, method: Method) -> Params:
    """What scores a layer's tokens. Raises ValueError for a method of learned scores where the model has none."""
    if "surrogate" not in weights:
        raise ValueError(
            f"{type(method).__name__} keeps rows by learned scores, and the model has none: "
            "give load, or nnx.compressed, the calibration that clusterkv calibrate writes for it."
        )
    return weights["surrogate"]


# --- layer by layer ---


def append_layerwise(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    tokens: Int[Any, "B T"],
    counts: Int[Any, " B"],
    logits: Float[Any, "B V"] | None = None,
    *,
    rows_of: Callable[[int], tuple[Layer, tuple[State | None, ...]]] | None = None,
    call: Callable[..., Any] = lambda program, *args: program(*args),
) -> tuple[KVCache, Float[Any, "B V"], Bool[Any, " B"] | None]:
    """`append_step` by programs that layers share; not for use in a jit. The cache is donated, layer by layer.

    Args:
        params, config, method, cache, tokens, counts: as in `append_step`.
        logits: of sequences that no token enters; donated.
        rows_of: as in `through_layers`.
        call: runs the programs, or compiles them.

    Returns:
        the cache, the logits, and which sequences are due; None where none ever is.
    """
    ends = {name: part for name, part in params.items() if name != "layers"}
    entered = call(_enter, ends, config, cache.position, tokens, counts)

    def run(_: int, *args: Any) -> Any:
        return call(append_to_layer, *args)

    options: Any = {"shape_alone": tokens.shape[1] > 1, "rows_of": rows_of}
    hidden, cache = through_layers(params, config, method, cache, entered, run, **options)
    position, logits, late = call(_leave, ends, config, method, cache, hidden, counts, logits)
    return replace(cache, position=position), logits, late


@jit(static_argnames=("config",))
def _enter(
    params: Params, config: ModelConfig, position: Array, tokens: Array, counts: Array
) -> tuple[Float[Array, "B T M"], Int[Array, "B T"], Bool[Array, "B T"]]:
    return enter(params, config, position, jnp.asarray(tokens), jnp.asarray(counts))


@jit(static_argnames=("config", "method", "inputs"), donate_argnames=("layer", "state"))
def append_to_layer(
    weights: Params,
    config: ModelConfig,
    method: Method,
    inputs: frozenset[str],
    layer: Layer,
    state: tuple[State | None, ...],
    hidden: Float[Array, "B T M"],
    before: Float[Array, "B T M"] | None,
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T M"], Layer, tuple[State | None, ...]]:
    """`step_one_layer` in place, as a program of its own."""
    new = hidden, before, positions, real
    hidden, layer, state = step_one_layer(weights, config, method, inputs, layer, state, *new)
    return constrain(hidden, "batch", None, None), placed(method, layer), placed_state(method, state)


@jit(static_argnames=("config", "method"), donate_argnames=("before",))
def _leave(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    hidden: Float[Array, "B T M"],
    counts: Int[Array, " B"],
    before: Float[Array, "B V"] | None,
) -> tuple[Int[Array, " B"], Float[Array, "B V"], Bool[Array, " B"] | None]:
    counts, room = jnp.asarray(counts), room_of_sequences(method, cache)
    logits = leave(params, config, cache, hidden, counts)
    logits = logits if before is None else jnp.where(counts[:, None] > 0, logits, before)
    late = None if room is None else constrain(room <= 0, None)
    return constrain(cache.position + counts, "batch"), constrain(logits, "batch", None), late
