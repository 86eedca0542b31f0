"""What some requests ask of a token beside its sampling: penalties, biases, masks, fewest tokens, log probabilities.

The arrays of all slots go through one program, which exists only where a running request asks for any of it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from clusterkv_jax.engine.params import MOST_BIASES, MOST_LOGPROBS
from clusterkv_jax.runtime.errors import shown

# The tokens that a grammar allows after these: a bit each, lowest first, in 32-bit words; None allows all.
AllowedTokens = Callable[[tuple[int, ...]], Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsState:
    """What changes the logits of each of B slots; sets of tokens are bits of W words.

    Attributes:
        allowed: tokens that may be drawn.
        ends: tokens that are not drawn before `min_tokens` others.
        prompt: tokens that `repetition` counts as said.
        said: tokens generated so far, -1 behind them.
        min_tokens: fewest tokens.
        frequency: penalty for each time that a token was said.
        presence: penalty for a token that was said.
        repetition: what divides the logits of tokens that were said, or multiplies those below 0.
        bias_ids: tokens with a bias; 0 where there is none.
        bias: what is added to their logits.
    """

    allowed: UInt32[Array | np.ndarray, "B W"]
    ends: UInt32[Array | np.ndarray, "B W"]
    prompt: UInt32[Array | np.ndarray, "B W"]
    said: Int[Array | np.ndarray, "B R"]
    min_tokens: Int[Array | np.ndarray, " B"]
    frequency: Float[Array | np.ndarray, " B"]
    presence: Float[Array | np.ndarray, " B"]
    repetition: Float[Array | np.ndarray, " B"]
    bias_ids: Int[Array | np.ndarray, "B biases"]
    bias: Float[Array | np.ndarray, "B biases"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of B drawn tokens, and of the k most likely ones, by the model's logits as they are."""

    drawn: Float[Array, "B ..."]
    top_ids: Int[Array, "B ... _"]
    top: Float[Array, "B ... _"]


def logits_state(sequences: Sequence[Any], masks: dict[int, np.ndarray], vocab_size: int, reserve: int) -> LogitsState:
    """The state of slots with these `RunningSequence`s, None where one is free, and allowed tokens by slot."""
    count, words = len(sequences), -(-vocab_size // 32)
    allowed = np.full((count, words), 2**32 - 1, np.uint32)
    ends, prompt = np.zeros((count, words), np.uint32), np.zeros((count, words), np.uint32)
    said = np.full((count, reserve), -1, np.int32)
    bias_ids, bias = np.zeros((count, MOST_BIASES), np.int32), np.zeros((count, MOST_BIASES), np.float32)
    numbers = np.zeros((4, count), np.float32)
    numbers[3] = 1
    for slot, sequence in enumerate(sequences):
        if sequence is None:
            continue
        request, params = sequence.request, sequence.request.params
        said[slot, : len(sequence.tokens)] = sequence.tokens
        numbers[:, slot] = (
            params.min_tokens,
            params.frequency_penalty,
            params.presence_penalty,
            params.repetition_penalty,
        )
        if params.min_tokens:
            ends[slot] = bits({*request.ends, *request.batch.stops.ids}, vocab_size)
        if params.repetition_penalty != 1:
            prompt[slot] = bits({*request.batch.texts[0], *request.question}, vocab_size)
        for place, (token, value) in enumerate((params.logit_bias or {}).items()):
            bias_ids[slot, place], bias[slot, place] = token, value
        if slot in masks:
            allowed[slot] = masks[slot]
    fewest, (frequency, presence, repetition) = numbers[0].astype(np.int32), numbers[1:]
    penalties = frequency, presence, repetition
    return LogitsState(allowed, ends, prompt, said, fewest, *penalties, bias_ids, bias)


def bits(tokens: Collection[int], vocab_size: int) -> UInt32[np.ndarray, " W"]:
    """A set of tokens as bits."""
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def checked_mask(mask: Any, vocab_size: int) -> UInt32[np.ndarray, " W"]:
    """What a grammar says, as bits of all tokens: those that it does not know are not allowed.

    Raises ValueError for what is no array of such words, or allows no token.
    """
    words = -(-vocab_size // 32)
    if not isinstance(mask, np.ndarray) or mask.dtype not in (np.int32, np.uint32) or mask.ndim != 1:
        raise ValueError(f"allowed_tokens must return an array of 32-bit words or None, got {shown(mask)}.")
    if mask.size > words:
        raise ValueError(f"allowed_tokens must return at most {words} words for {vocab_size} tokens, got {mask.size}.")
    mask = np.pad(mask.view(np.uint32), (0, words - mask.size)) & bits(range(vocab_size), vocab_size)
    if not mask.any():
        raise ValueError("allowed_tokens allows no token here; let it allow a token that ends the text.")
    return mask


def counts_of(state: LogitsState, vocab_size: int) -> Int[Array, "B V"]:
    """How often each slot has said each token."""
    said = jnp.asarray(state.said)
    rows = jnp.arange(said.shape[0], dtype=jnp.int32)[:, None]
    one = (said >= 0).astype(jnp.int32)
    return jnp.zeros((said.shape[0], vocab_size), jnp.int32).at[rows, jnp.maximum(said, 0)].add(one)


def changed(
    logits: Float[Array, "B V"], state: LogitsState, counts: Int[Array, "B V"], number: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """The logits by which each slot draws its token `number`; -inf where it must not."""
    vocab_size = logits.shape[1]
    logits, said = logits.astype(jnp.float32), counts > 0
    penalty = jnp.asarray(state.repetition)[:, None]
    lessened = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(said | _flags(state.prompt, vocab_size), lessened, logits)
    times, once = counts.astype(jnp.float32), said.astype(jnp.float32)
    logits -= times * jnp.asarray(state.frequency)[:, None] + once * jnp.asarray(state.presence)[:, None]
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    logits = logits.at[rows, state.bias_ids].add(state.bias)
    early = (number < state.min_tokens)[:, None] & _flags(state.ends, vocab_size)
    return jnp.where(_flags(state.allowed, vocab_size) & ~early, logits, -jnp.inf)


def logprobs_of(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Logprobs:
    """Of drawn tokens, by the model's logits."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    drawn = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    top, top_ids = jax.lax.top_k(logprobs, min(MOST_LOGPROBS, logits.shape[1]))
    return Logprobs(drawn, top_ids.astype(jnp.int32), top)


def _flags(words: UInt32[Array | np.ndarray, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """A set of tokens as booleans."""
    each = (jnp.asarray(words)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    return each.reshape(words.shape[0], -1)[:, :vocab_size] > 0
