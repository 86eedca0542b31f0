"""A model on a plain text, layer by layer: what calibration measures and inspection draws."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import groups
from clusterkv_jax.calibration import Calibration, as_table, choose_outliers, in_steps, least_scores, outlier_share
from clusterkv_jax.checkpoints import Model
from clusterkv_jax.learned import reconstruction
from clusterkv_jax.learned.fitting import products, ridge
from clusterkv_jax.learned.repetition import instruction, prompts
from clusterkv_jax.methods import AdaKV
from clusterkv_jax.models import transformer
from clusterkv_jax.models.causal_attention import causal_attention
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.transformer import Params
from clusterkv_jax.tensors import compress

# Rows at the start of a text that take attention whatever they say.
SINKS = 4
# Of a score, so that rows that nothing looks at have a logarithm.
LEAST_SCORE = 1e-12


@dataclass(frozen=True)
class Observed:
    """One layer on one text: post-RoPE queries [1,H,N,D], keys and values [1,K,N,D], and what enters the attention.

    `ahead` are the queries that the layer makes of what the layer before it read; None in the first.
    """

    queries: Float[Array, "1 H N D"]
    keys: Float[Array, "1 K N D"]
    values: Float[Array, "1 K N D"]
    hidden: Float[Array, "1 N M"]
    ahead: Float[Array, "1 H N D"] | None = None


def observe_layers(model: Model, tokens: Sequence[int]) -> Iterator[Observed]:
    """Queries, keys and values of every layer in turn."""
    ids = jnp.asarray([tokens], jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden = transformer.embed(model.params, model.config, ids, positions)
    before, ahead = hidden, None
    for number, weights in enumerate(model.params["layers"]):
        if number:
            ahead = jnp.swapaxes(_queries(weights, model.config, before, positions), 1, 2)
        before = hidden
        hidden, entering, *qkv = _layer(weights, model.config, hidden, positions)
        queries, keys, values = (jnp.swapaxes(x, 1, 2) for x in qkv)
        yield Observed(queries, keys, values, entering, ahead)


@partial(jax.jit, static_argnames=("config",))
def _layer(weights: Params, config: ModelConfig, hidden: Float[Array, "1 N M"], positions: Int[Array, "1 N"]):
    q, k, v = transformer.qkv(weights, config, hidden, positions)
    entering = transformer.attention_input(weights, config, hidden)
    return transformer.finish(weights, config, hidden, causal_attention(q, k, v)), entering, q, k, v


@partial(jax.jit, static_argnames=("config",))
def _queries(weights: Params, config: ModelConfig, hidden: Float[Array, "1 N M"], positions: Int[Array, "1 N"]):
    return transformer.qkv(weights, config, hidden, positions)[0]


def calibrate(
    model: Model,
    sequences: Sequence[Sequence[int]],
    *,
    outliers: float = 0.04,
    whole_layers: tuple[int, ...] = (),
    chunk: int = 256,
    threshold: float = 0.8,
    ratio: float = 0.25,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Run the statistics over token sequences of equal length, one sequence and layer at a time.

    Args:
        model: from `load`.
        sequences: token ids, some thousand each.
        outliers: share of all heads that become outlier heads, those of `whole_layers` first.
        whole_layers: layers all of whose heads are outliers (Chelsea keeps Llama-2's layer 0).
        chunk, threshold: of the outlier statistic.
        ratio: the share of the cache that AdaKV spreads over a layer's heads.
        progress: called as progress(layers done, `layers_read` of all sequences).
    """
    config = model.config
    method = AdaKV(Budget(ratio=ratio))
    total = layers_read(model, sequences)
    shares, rows = (np.zeros((config.num_layers, config.num_kv_heads)) for _ in range(2))
    scores, sums = [], [np.zeros(()) for _ in range(config.num_layers)]
    for i, tokens in enumerate(sequences):
        done = i * (total // len(sequences))
        if model.tokenizer is not None:
            scores.append(repetition_scores(model, tokens))
            done += config.num_layers
            if progress is not None:
                progress(done, total)
        for number, layer in enumerate(observe_layers(model, tokens)):
            if scores:
                sums[number] = sums[number] + np.asarray(_products(layer, scores[-1][number]), np.float64)
            shares[number] += np.asarray(outlier_share(layer.keys, chunk=chunk, threshold=threshold)[0])
            layer_after = compress(method, layer.queries, layer.keys, layer.values)
            rows[number] += np.asarray(groups(layer_after)[0].length[0]) / int(ratio * len(tokens))
            if progress is not None:
                progress(done + number + 1, total)
    fits = [ridge(each, config.num_kv_heads) for each in sums] if scores else None
    shares, rows = shares / len(sequences), rows / len(sequences)
    return Calibration(
        model.name,
        as_table(np.round(shares, 4)),
        choose_outliers(shares, outliers, whole_layers),
        in_steps(rows),
        {
            "sequences": len(sequences),
            "tokens": len(sequences[0]),
            "chunk": chunk,
            "threshold": threshold,
            "outliers": outliers,
            "whole_layers": list(whole_layers),
            "ratio": ratio,
        },
        None if not scores else _rounded(least_scores(np.concatenate(scores, axis=-1))),
        None if fits is None else as_table(np.round([explained for _, explained in fits], 4)),
        None if fits is None else tuple(arrays for arrays, _ in fits),
    )


def layers_read(model: Model, sequences: Sequence[Sequence[int]]) -> int:
    """Layers that `calibrate` reads, those of the repetition too; without a tokenizer nothing can be asked for."""
    return len(sequences) * model.config.num_layers * (1 if model.tokenizer is None else 2)


def repetition_scores(model: Model, tokens: Sequence[int], chunk: int = 2048) -> Float[np.ndarray, "L K R"]:
    """Logarithms of the KVzip+ scores of a text's rows behind the first four, which every method keeps."""
    ids = jnp.asarray([tokens], jnp.int32)
    prompts = repeat_prompts(model.tokenizer, tokens, chunk)
    scores = reconstruction(model.params, model.config, ids, chunk=chunk, prompts=prompts, normalize=True)
    return np.log(np.maximum([np.asarray(layer[0, :, SINKS:]) for layer in scores], LEAST_SCORE))


def _products(layer: Observed, scores: Float[np.ndarray, "K R"]) -> Array:
    return products(layer.hidden[0, SINKS:], jnp.asarray(scores))


def repeat_prompts(tokenizer: Any, tokens: Sequence[int], chunk: int) -> list[Int[Array, "1 n"]]:
    """What asks a model to repeat each piece of a text, as KVzip words it."""
    return prompts(instruction(tokenizer), jnp.asarray([tokens]), chunk)


def _rounded(numbers: Float[np.ndarray, "L K parts"]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    return tuple(as_table(np.round(layer, 3)) for layer in numbers)
