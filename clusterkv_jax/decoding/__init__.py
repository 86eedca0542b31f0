"""Prefill, decode step and the jitted decode loop: pure functions over parameters and cache.

    prefill       prompts -> a compressed cache
    append_step   T more tokens at their true positions (a question); its caller asks `due` and calls `recompress`
    extend_step   the same, and `recompress` inside the program, under one condition
    decode_step   `extend_step` of one token per sequence
    decode_loop   a loop of decode steps and sampling: no host round trip per token

Decoding is one program: its layers unrolled, its cache donated, one scalar condition around all clustering.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from clusterkv_jax.cache.layers import KVCache
from clusterkv_jax.decoding.appending import append_step, next_tokens
from clusterkv_jax.decoding.prefilling import prefill as prefill
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.recompression import due, recompress, steps_until_due
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.runtime.checks import check_array, check_ids, on_host
from clusterkv_jax.runtime.control_flow import cond_in_place, while_with_maintenance
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import constrain
from clusterkv_jax.sampling import Sampling, next_token

# Most tokens of a call of `decode_loop`, which costs the host 3 to 5 ms. While it runs, no interrupt is seen.
SEGMENT = 512


@own_settings()
def decode_step(
    params: Params, config: ModelConfig, method: Method, cache: KVCache, token: Int[Array, " B"]
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Append one token per sequence at its true position, attend, and cluster if due; logits of the next token.

    Pure: jit it with `config` and `method` static and the cache donated. A cache has slots for the `reserve` it was
    made with; a token beyond them turns the logits to NaN rather than be dropped without a sign.

    Raises ValueError if `token` is not one whole number per sequence, or if one that lies on the host is not in the
    vocabulary: neither a traced number nor one on an accelerator is looked at, since steps wait for nothing.
    """
    check_array("token", token, "B", jnp.integer)
    if token.shape != cache.position.shape:
        raise ValueError(f"token must hold one id for each of {cache.position.size} sequences, got {token.shape}.")
    if on_host(token):
        check_ids(token, config.vocab_size)
    return extend_step(params, config, method, cache, token[:, None], jnp.ones(token.shape, jnp.int32))


@own_settings()
def extend_step(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Append the first `counts` of T tokens to each sequence and compress if due; logits after the last of them."""
    tokens, counts = (x.astype(jnp.int32) for x in (tokens, counts))
    cache, logits = append_step(params, config, method, cache, tokens, counts)
    if (late := due(method, cache)) is not None:
        cache = cond_in_place(late, partial(recompress, method, ropes=config.ropes), cache)
    return cache, logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Where a batch stands between decode steps.

    Attributes:
        cache: of all sequences.
        token: the last token of each sequence, not in the cache yet.
        ended: sequences that generate no more.
    """

    cache: KVCache
    token: Int[Array, " B"]
    ended: Bool[Array, " B"]


@jit(static_argnames=("config", "method", "sampling", "eos_ids", "steps"), donate_argnames=("state",), decodes=True)
def decode_loop(
    params: Params,
    config: ModelConfig,
    method: Method,
    state: DecodeState,
    key: Key[Array, "..."],
    first: Int[Array | np.ndarray, ""],
    limit: Int[Array | np.ndarray, ""],
    *,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    steps: int,
) -> tuple[DecodeState, Int[Array, "B steps"], Int[Array, ""]]:
    """Up to `limit` <= `steps` decode steps, fewer if every sequence has ended; one program however many.

    Args:
        params, config, method: as in `decode_step`.
        state: donated.
        key: PRNG key of each request, or one for all.
        first: number of the first token to be drawn, so that segments of a generation draw as an unbroken one does.
        limit: most steps.
        sampling: static.
        eos_ids: static; a sequence ends with one of these.
        steps: static size of the token buffer.

    Returns:
        the state afterwards, the new tokens (-1 where a sequence had ended), and the number of steps. A step's token is
        `NOT_FINITE` where the model's logits are not; such a sequence says nothing more that means anything.
    """
    ends = jnp.asarray(eos_ids, jnp.int32)

    def running(carry):
        step, state, _ = carry
        return (step < limit) & ~jnp.all(state.ended)

    def one(carry):
        step, state, tokens = carry
        choose = partial(next_token, sampling=sampling, key=key, step=first + step)
        cache, token, counts = state.cache, state.token, jnp.ones_like(state.token)
        cache, _, token, ended = next_tokens(params, config, method, cache, token, counts, choose, ends)
        tokens = jax.lax.dynamic_update_slice(tokens, jnp.where(state.ended, -1, token)[:, None], (0, step))
        return step + 1, DecodeState(cache, token, state.ended | ended), tokens

    def room(carry):
        return steps_until_due(method, carry[1].cache)

    def compressed(carry):
        step, state, tokens = carry
        return step, replace(state, cache=recompress(method, state.cache, ropes=config.ropes)), tokens

    tokens = jnp.full((state.token.shape[0], steps), -1, jnp.int32)
    start = jnp.zeros((), jnp.int32), state, tokens
    step, state, tokens = while_with_maintenance(running, one, room, compressed, start)
    # As they are before a first segment: a mesh that splits them would have the same program compiled twice.
    position, token, ended = (constrain(x, None) for x in (state.cache.position, state.token, state.ended))
    return DecodeState(replace(state.cache, position=position), token, ended), tokens, step
