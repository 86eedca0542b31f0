"""What a model is trained on: the tokens of answers, given a cache of their contexts.

    context -> prefill, which compresses -> cache -> question and answer, appended at once -> loss of the answer

The whole is one pure function of the parameters. A gradient reaches the question, the answer and, through attention,
the rows of the cache; from the rows it goes on into the reading of the context, or is stopped there.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache.kinds import is_compressible, of_slots, with_groups
from clusterkv_jax.cache.layers import KVCache, Layer, group_heads, groups
from clusterkv_jax.cache.sliding_window import ring
from clusterkv_jax.decoding import append_step, prefill
from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.methods import Method
from clusterkv_jax.models import prompt_forward
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingBatch:
    """Contexts, what follows each of them, and which tokens of that are learned; padded on the right."""

    contexts: Int[Array | np.ndarray, "B N"]
    lengths: Int[Array | np.ndarray, " B"]
    follow: Int[Array | np.ndarray, "B T"]
    counts: Int[Array | np.ndarray, " B"]
    learned: Bool[Array | np.ndarray, "B T"]


def logits_of(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    first: Float[Array, "B V"],
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
) -> Float[Array, "B T V"]:
    """Logits of each of T tokens that follow a cache: `first` are those after the context, by which the first is drawn.

    All are appended at once and compress nothing, so that the cache must have slots for T tokens (`step_tokens`).
    """
    before = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1), (tokens.shape[0], tokens.shape[1] - 1))
    _, after = append_step(params, config, method, cache, tokens, counts, before)
    return jnp.concatenate([first[:, None], after], axis=1)


def logprobs(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Log-likelihood of tokens."""
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def read(
    params: Params, config: ModelConfig, method: Method, batch: TrainingBatch, *, through_rows: bool
) -> tuple[KVCache, Float[Array, "B V"]]:
    """The contexts' compressed caches, and the logits after each context.

    Compression itself has no gradient: which rows are kept, and how they merge, is decided as it is when a model
    answers. With `through_rows` the contexts are read once more, and a row's gradient goes on into the token in whose
    place it stands. That is the true one for a row that is a token as it was read. A centroid's stands for the
    gradients of all tokens that were merged into it.

    Raises ValueError for methods whose rows have no gradient: in the host's memory, or with `through_rows` quantised.
    """
    if method.storage == "host":
        raise ValueError(f"{type(method).__name__} holds rows in the host's memory, where no gradient is taken.")
    follow = batch.follow.shape[1]
    counts: Any = {"max_new_tokens": follow, "step_tokens": follow}
    still = jax.lax.stop_gradient(params)
    cache, first = prefill(still, config, method, batch.contexts, batch.lengths, **counts)
    if not through_rows:
        return cache, first
    tokens, lengths = jnp.asarray(batch.contexts), jnp.asarray(batch.lengths)
    hidden, _ = prompt_forward.embed(params, config, tokens, lengths)
    layers = []
    for number, (weights, layer) in enumerate(zip(params["layers"], cache.layers, strict=True)):
        one_layer = jax.checkpoint(_read_layer, static_argnums=1)
        hidden, keys, values = one_layer(weights, config.of_layer(number), hidden)
        layers.append(in_place_of(layer, keys, values, lengths))
    return replace(cache, layers=tuple(layers)), prompt_forward.last_logits(params, config, hidden, lengths)


def _read_layer(weights: Params, config: ModelConfig, hidden: Float[Array, "B N M"]) -> tuple[Array, Array, Array]:
    hidden, _, keys, values, _ = prompt_forward.over_prompt(weights, config, None, hidden)
    return hidden, keys, values


def in_place_of(
    layer: Layer, keys: Float[Array, "B K N D"], values: Float[Array, "B K N D"], lengths: Int[Array, " B"]
) -> Layer:
    """The layer, whose rows have the gradients of the tokens in whose places they stand."""
    if not is_compressible(layer):
        return ring(keys, values, lengths, layer.window, layer.rows.capacity)
    parts = [
        _group_in_place(group, keys[:, jnp.asarray(heads)], values[:, jnp.asarray(heads)])
        for group, heads in zip(groups(layer), group_heads(layer), strict=True)
    ]
    return with_groups(layer, parts)


def _group_in_place(group: Any, keys: Float[Array, "B K N D"], values: Float[Array, "B K N D"]) -> Any:
    if isinstance(group.keys, Quantised):
        raise ValueError(
            "Rows of a cache_dtype are codes, which have no gradient; train with rows of the model's type."
        )

    def put(rows: Array, tokens: Array) -> Array:
        mine = jnp.take_along_axis(of_slots(group, tokens), group.positions[..., None], axis=2)
        # The rows' own numbers, to the bit: x - x is 0.
        return rows + (mine - jax.lax.stop_gradient(mine))

    return replace(group, keys=put(group.keys, keys), values=put(group.values, values))


def answer_loss(
    params: Params, config: ModelConfig, method: Method, batch: TrainingBatch, *, through_rows: bool = False
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross-entropy of the learned tokens, and the share of them that is the likeliest token."""
    cache, first = read(params, config, method, batch, through_rows=through_rows)
    logits = logits_of(params, config, method, cache, first, jnp.asarray(batch.follow), jnp.asarray(batch.counts))
    weights = jnp.asarray(batch.learned).astype(jnp.float32)
    total = jnp.maximum(jnp.sum(weights), 1.0)
    hits = (jnp.argmax(logits, axis=-1) == batch.follow) & batch.learned
    return -jnp.sum(logprobs(logits, jnp.asarray(batch.follow)) * weights) / total, jnp.sum(
        hits.astype(jnp.float32)
    ) / total
