"""Weights of layers rounded to int4 by what enters them when the model reads a text: layer after layer, each reading
what the rounded ones before it make.

The experts that a router chooses are rounded to the nearest code: few tokens of a text go through each of them.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from clusterkv_jax.blocks.attention_out import attention_out
from clusterkv_jax.blocks.causal_attention import causal_attention
from clusterkv_jax.blocks.mlp import hidden_units
from clusterkv_jax.blocks.norm import pre_norm
from clusterkv_jax.checkpoints.in_codes import in_codes
from clusterkv_jax.checkpoints.loading import Checkpoint, parameter_name, read_numbers
from clusterkv_jax.kernels.weight_codes import QuantisedWeights, dequantised
from clusterkv_jax.models import decoder
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params, abstract

_AT_ONCE = 4  # pieces that are read together


def codes_by_text(
    checkpoint: Checkpoint, pieces: Sequence[Sequence[int]], progress: Callable[[int, int], None]
) -> dict[str, QuantisedWeights]:
    """The int4 codes of all products of the layers, experts apart, by the names of their parameters, on the host.

    Args:
        checkpoint: what is converted. One layer of it at a time is in memory in numbers.
        pieces: texts as tokens, equally many in each.
        progress: called with the layers that are done and all of them.
    """
    config, specs = checkpoint.config, abstract(checkpoint.config)
    outer = {name: specs[name] for name in ("embed", "positions") if name in specs}
    params = jax.tree.map(read_numbers, outer, {name: checkpoint.parameters[name] for name in outer})
    tokens = jnp.asarray(pieces, jnp.int32)
    batches = [tokens[i : i + _AT_ONCE] for i in range(0, len(tokens), _AT_ONCE)]
    hidden = [decoder.embed(params, config, batch, _positions(batch)) for batch in batches]
    found: dict[str, QuantisedWeights] = {}
    for number, spec in enumerate(specs["layers"]):
        progress(number, config.num_layers)
        own, source = config.of_layer(number), checkpoint.parameters["layers"][number]
        layer = jax.tree.map(read_numbers, spec, source)
        sums = reduce(partial(jax.tree.map, jnp.add), (_products(layer, own, x) for x in hidden))
        moments = jax.tree.map(lambda x: np.asarray(x) / tokens.size, sums)
        codes = _codes(spec, source, moments)
        found |= {f"layers.{number}.{name}": x for name, x in codes.items()}
        layer = jax.tree.map_with_path(partial(_as_rounded, codes), layer)
        hidden = [decoder.decoder_layer(layer, own, x, _positions(x)) for x in hidden]
    progress(config.num_layers, config.num_layers)
    return found


def _codes(spec: Params, source: Any, moments: dict[str, Any]) -> dict[str, QuantisedWeights]:
    """Codes of a layer's parameters whose inputs have moments."""
    found = {}
    for (path, own), parameter in zip(jax.tree.leaves_with_path(spec), jax.tree.leaves(source), strict=True):
        if (name := parameter_name(path)) in moments:
            coded = in_codes(parameter, own, path[-1].key, "int4", moments[name])
            found |= {} if coded is None else {name: coded}
    return found


def _as_rounded(codes: dict[str, QuantisedWeights], path: tuple[Any, ...], numbers: Array) -> Array:
    coded = codes.get(parameter_name(path))
    return numbers if coded is None else jnp.asarray(dequantised(jax.tree.map(jnp.asarray, coded)))


@partial(jax.jit, static_argnames=("config",))
def _products(layer: Params, config: ModelConfig, hidden: Float[Array, "B T M"]) -> dict[str, Float[Array, "_ _"]]:
    """Products of any two inputs of each of a layer's weights, experts apart, added up over all tokens, by the names of
    the weights.
    """
    entering = _by_each_other(decoder.attention_input(layer, config, hidden))
    q, k, v, _ = decoder.attention_in(layer, config, hidden, _positions(hidden))
    sinks = decoder.sink_logits(layer, config)
    attended = causal_attention(q, k, v, window=config.window, soft_cap=config.soft_cap, sink_logits=sinks)
    found = {f"attention.{name}": entering for name in "qkv"}
    found["attention.o"] = _by_each_other(attended.reshape(*attended.shape[:2], -1))
    block = "mlp" if "mlp" in layer else "shared_mlp"
    if block in layer:
        out = hidden if config.parallel_blocks else attention_out(layer, config, hidden, attended)
        x = pre_norm(layer, "mlp", config, out)
        found |= dict.fromkeys((f"{block}.gate", f"{block}.up"), _by_each_other(x))
        found[f"{block}.down"] = _by_each_other(hidden_units(layer[block], config.activation, x))
    return found


def _by_each_other(x: Float[Array, "B T I"]) -> Float[Array, "I I"]:
    rows = x.reshape(-1, x.shape[-1])
    return jnp.matmul(rows.T, rows, precision="highest")


def _positions(x: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
