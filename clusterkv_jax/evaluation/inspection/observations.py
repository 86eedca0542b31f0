"""What the papers observe in keys and caches, from any model and text, as numbers.

cosine maps of neighbouring keys, similarity over distance   CentroidKV Figures 2 and 3, Theorem 6.1's assumption
outlier heads                                                Chelsea Figures 6 and 7
kept positions of neighbouring layers                        ChunkKV Figure 2 and Table 3
error of the attention output                                ChunkKV Table 8
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from clusterkv_jax.cache.attention import attend_cache, with_sinks
from clusterkv_jax.cache.layers import group_heads, groups
from clusterkv_jax.calibration import outlier_share
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.methods import Full, Method, Recall
from clusterkv_jax.observation import Observed, observe_layers
from clusterkv_jax.tensors import build_index, compress, select

MAP_ROWS = 128  # keys of a cosine map
DISTANCES = 64  # largest distance of the similarity curve
QUERIES = 64  # last queries of the text whose attention outputs are compared


def observe(model: Model, tokens: Sequence[int]) -> list[Observed]:
    """Queries, keys and values of every layer; all layers stay in memory."""
    return list(observe_layers(model, tokens))


# --- keys ---


def _unit(keys: Float[Array, "1 K N D"]) -> Float[np.ndarray, "K N D"]:
    rows = np.asarray(keys[0]).astype(np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def cosine_maps(layer: Observed) -> Float[np.ndarray, "K R R"]:
    """Cosines among up to 128 successive keys of each head, from the middle of the text."""
    tokens = layer.keys.shape[2]
    start = max(0, (tokens - MAP_ROWS) // 2)
    unit = _unit(layer.keys)[:, start : start + MAP_ROWS]
    return unit @ unit.swapaxes(1, 2)


def similarity_over_distance(layer: Observed) -> Float[np.ndarray, "K S"]:
    """Mean cosine of keys 1, 2, ... 64 tokens apart, of each head."""
    unit = _unit(layer.keys)
    most = min(DISTANCES, unit.shape[1] - 1)
    return np.stack([(unit[:, s:] * unit[:, :-s]).sum(-1).mean(-1) for s in range(1, most + 1)], axis=1)


def convex_share(curve: Float[np.ndarray, "K S"]) -> float:
    """Which share of a curve's second differences, averaged over heads, is at least 0, as Theorem 6.1 assumes."""
    return float(np.mean(np.diff(curve.mean(0), 2) >= 0))


def outlier_map(layers: Sequence[Observed], chunk: int = 256) -> Float[np.ndarray, "L K"]:
    """Share of rows without a similar neighbour by layer and head."""
    return np.stack([np.asarray(outlier_share(layer.keys, chunk=chunk)[0]) for layer in layers])


# --- methods ---


def kept_positions(layers: Sequence[Observed], method: Method) -> list[list[set[int]]]:
    """Positions kept [layer][head]; a centroid counts at its row's position."""
    by_layer = []
    for number, layer in enumerate(layers):
        cache = compress(method, layer.queries, layer.keys, layer.values, layer=number, num_layers=len(layers))
        heads = {}
        for group, numbers in zip(groups(cache), group_heads(cache), strict=True):
            assert group.positions is not None  # `compress` always says them
            real, positions = np.asarray(group.degree[0] > 0), np.asarray(group.positions[0])
            heads |= {head: set(positions[i, real[i]].tolist()) for i, head in enumerate(numbers)}
        by_layer.append([heads[head] for head in sorted(heads)])
    return by_layer


def neighbour_similarity(by_layer: Sequence[Sequence[set[int]]]) -> Float[np.ndarray, " pairs"]:
    """Mean Jaccard similarity of the positions kept by the same head of successive layers."""
    pairs = (zip(x, y, strict=True) for x, y in pairwise(by_layer))
    return np.array([np.mean([len(a & b) / len(a | b) for a, b in heads]) for heads in pairs])


def output_errors(layers: Sequence[Observed], method: Method) -> Float[np.ndarray, "L 2"]:
    """Cosine, and relative L1 error, of the attention outputs of the text's last 64 queries, layer by layer.

    The text before these queries is compressed, and they attend to what is left of it; a method that recalls keeps all
    of it, and each query attends to the rows that are selected for it.
    """
    errors = []
    for number, layer in enumerate(layers):
        cut = max(1, layer.keys.shape[2] - QUERIES)
        full = _outputs(layer, cut, Full(), number, len(layers))
        recalls: Any = method
        if not method.forgets and not recalls.is_dense(number):
            less = _recalled_outputs(layer, cut, recalls)
        else:
            less = _outputs(layer, cut, method, number, len(layers))
        norms = np.linalg.norm(full, axis=-1) * np.linalg.norm(less, axis=-1)
        cosine = np.mean((full * less).sum(-1) / np.maximum(norms, 1e-12))
        errors.append([float(cosine), float(np.abs(full - less).sum() / np.abs(full).sum())])
    return np.array(errors)


def _outputs(layer: Observed, cut: int, method: Method, number: int, count: int) -> Float[np.ndarray, "1 T H D"]:
    before = (x[:, :, :cut] for x in (layer.queries, layer.keys, layer.values))
    cache = compress(method, *before, layer=number, num_layers=count)
    queries = jnp.swapaxes(layer.queries[:, :, cut:], 1, 2)
    attended = attend_cache(cache, queries, layer.soft_cap, method.degree_power)
    return np.asarray(with_sinks(attended, layer.sink_logits), np.float32)


def _recalled_outputs(layer: Observed, cut: int, method: Recall) -> Float[np.ndarray, "T H D"]:
    queries, keys, values = (x[:, :, :cut] for x in (layer.queries, layer.keys, layer.values))
    index = build_index(method, keys, values, queries=queries)
    heads = keys.shape[1]

    def attended(both: tuple[Float[Array, "1 H D"], Float[Array, "1 H D"]]) -> Float[Array, "H D"]:
        query, lookup = both
        rows = select(method, index, lookup)
        q, rows = (x.reshape(1, heads, -1, x.shape[-1]) for x in (query, rows))
        out, lse = recalled_attention(q, keys, values, rows, soft_cap=layer.soft_cap, return_lse=True)
        attended = out.reshape(query[:, None].shape), lse.reshape(1, 1, -1)
        return with_sinks(attended, layer.sink_logits)[0, 0]

    steps = tuple(jnp.moveaxis(x[:, :, cut:], 2, 0) for x in (layer.queries, seen_by(layer, method)))
    return np.asarray(jax.lax.map(attended, steps), np.float32)


def seen_by(layer: Observed, method: Recall) -> Float[Array, "1 H N D"]:
    """The queries by which a method selects: those of the layer, or what InfiniGen foresees of them a layer earlier."""
    if "lookahead" not in method.inputs(1):
        return layer.queries
    assert layer.ahead is not None  # the first layer is dense for methods that look ahead
    return layer.ahead
