"""A token through a layer of experts and its cache in one launch, where a kernel takes all of it."""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache import KVCache, Layer, State, group_heads
from clusterkv_jax.kernels.expert_layer.pallas_gpu import refused
from clusterkv_jax.kernels.pending import Pending
from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.methods import by_head
from clusterkv_jax.methods.base import Method
from clusterkv_jax.models import few_tokens
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.few_tokens import Params

BEFORE_ATTENTION = frozenset({"scores", "lookahead"})  # what a method may ask of a token before it attends


def in_common(cache: KVCache) -> list[bool]:
    """Of each layer, whether a neighbour has its rows in arrays of the same shapes, so that both have the same launch.

    The code of a launch that only one layer has comes from memory at every step, and takes longer than single ops. The
    last layer is a neighbour of the first: steps follow each other.
    """
    flat = [jax.tree.flatten(rows) for rows in zip(cache.layers, cache.state, strict=True)]
    shapes = [(tree, [x.shape for x in leaves]) for leaves, tree in flat]
    return [mine in (shapes[i - 1], shapes[(i + 1) % len(shapes)]) for i, mine in enumerate(shapes)]


def takes(
    weights: Params,
    config: ModelConfig,
    method: Method,
    needs: frozenset[str],
    in_common: bool,
    layer: Layer,
    state: tuple[State, ...],
    hidden: Float[Array, "B T M"] | Pending,
) -> bool:
    """Whether one launch takes these tokens through the layer: one token, whose rows enter the cache as they are."""
    if not in_common or needs & BEFORE_ATTENTION or not few_tokens.takes_layer(weights, config, hidden):
        return False
    if not by_head.steps_alike(method, layer, state, 1):
        return False
    buffers, _ = by_head.of_groups(layer, state)
    if any(isinstance(keys, Quantised) or scores is not None for keys, *_, scores in buffers):
        return False
    assert config.experts is not None
    of_layer = few_tokens.settled(hidden), few_tokens.layer_weights(weights), buffers
    return refused(*of_layer, config.num_kv_heads, config.experts.per_token) is None


def step(
    weights: Params,
    config: ModelConfig,
    layer: Any,
    state: tuple[State, ...],
    hidden: Float[Array, "1 1 M"] | Pending,
    positions: Int[Array, "1 1"],
    real: Bool[Array, "1 1"],
) -> tuple[Pending, Layer, tuple[State, ...]]:
    """The token behind the layer, and the layer with the token in it."""
    buffers, lengths = by_head.of_groups(layer, state)
    plain = tuple(group[:4] for group in buffers)
    hidden, after, longer = few_tokens.through_layer(
        weights, config, hidden, (positions, real), plain, lengths, group_heads(layer)
    )
    return hidden, *by_head.put_in_groups(layer, state, [(*group, None) for group in after], longer)
