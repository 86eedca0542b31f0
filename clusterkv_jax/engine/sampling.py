"""How each slot draws its next token: settings as arrays, so that one program serves greedy and sampled slots."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from clusterkv_jax.engine.logits import LogitsState, changed
from clusterkv_jax.engine.params import SamplingParams
from clusterkv_jax.runtime.prng import wrapped
from clusterkv_jax.runtime.sharding import first_greatest
from clusterkv_jax.sampling import NOT_FINITE, draw_one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """`Sampling`, key and number of the next draw of each of B slots; filters that are off let everything pass.

    `ignore_eos` slots do not end with the model's tokens that end texts; `logits` is there where a slot asks for it.
    """

    temperature: Float[Array | np.ndarray, " B"]
    top_k: Int[Array | np.ndarray, " B"]
    top_p: Float[Array | np.ndarray, " B"]
    min_p: Float[Array | np.ndarray, " B"]
    keys: UInt32[Array | np.ndarray, "B words"]
    number: Int[Array | np.ndarray, " B"]
    ignore_eos: Bool[Array | np.ndarray, " B"]
    logits: LogitsState | None = None


def sampling_state(
    params: Sequence[SamplingParams],
    keys: Sequence[UInt32[np.ndarray, " words"]],
    numbers: Sequence[int],
    vocab_size: int,
    logits: LogitsState | None,
) -> SamplingState:
    """The sampling state of slots with these settings."""
    samplings = [each.sampling for each in params]

    def column(values: Sequence[float | None], off: float) -> np.ndarray:
        return np.asarray([off if value is None else value for value in values], np.float32)

    top_k = [vocab_size if s.top_k is None else min(s.top_k, vocab_size) for s in samplings]
    return SamplingState(
        column([s.temperature for s in samplings], 0.0),
        np.asarray(top_k, np.int32),
        column([s.top_p for s in samplings], 2.0),
        column([s.min_p for s in samplings], 0.0),
        np.stack(keys),
        np.asarray(numbers, np.int32),
        np.asarray([each.ignore_eos for each in params]),
        logits,
    )


@jax.named_scope("sampling")
def draw(
    logits: Float[Array, "B V"],
    sampling: SamplingState,
    later: Int[Array, ""] | int = 0,
    counts: Int[Array, "B V"] | None = None,
) -> Int[Array, " B"]:
    """The next token of each slot, `later` draws from now: that of `sample` for a batch of this sequence alone.

    `counts` is how often each slot has said each token, where `sampling.logits` asks. `NOT_FINITE` in slots with a
    logit that is not finite.
    """
    greedy, finite = first_greatest(logits)
    if sampling.logits is not None and counts is not None:
        logits = changed(logits, sampling.logits, counts, jnp.asarray(sampling.number) + later)
        greedy, _ = first_greatest(logits)
    warm = sampling.temperature > 0

    def sampled() -> Int[Array, " B"]:
        scores = logits.astype(jnp.float32) / jnp.where(warm, sampling.temperature, 1.0)[:, None]
        filters = warm & ((sampling.top_k < logits.shape[1]) | (sampling.top_p <= 1) | (sampling.min_p > 0))
        scores = jax.lax.cond(jnp.any(filters), lambda: _filtered(scores, sampling), lambda: scores)
        tokens = jax.vmap(draw_one)(wrapped(jnp.asarray(sampling.keys)), jnp.asarray(sampling.number) + later, scores)
        return jnp.where(warm, tokens, greedy)

    tokens = jax.lax.cond(jnp.any(warm), sampled, lambda: greedy)
    return jnp.where(finite, tokens, NOT_FINITE)


def _filtered(scores: Float[Array, "B V"], sampling: SamplingState) -> Float[Array, "B V"]:
    """What `sampling.filtered` makes of each row."""
    ranked = jnp.sort(scores, axis=-1, descending=True)
    least = jnp.take_along_axis(ranked, sampling.top_k[:, None] - 1, axis=-1)
    scores, ranked = (jnp.where(x >= least, x, -jnp.inf) for x in (scores, ranked))
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    least = jnp.min(jnp.where(before < sampling.top_p[:, None], ranked, jnp.inf), axis=-1, keepdims=True)
    scores = jnp.where(scores >= least, scores, -jnp.inf)
    best = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.where(scores >= best + jnp.log(sampling.min_p)[:, None], scores, -jnp.inf)
