"""The stages of `generate`, on the host: prompts are read, questions appended, answers decoded."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import annotate_function
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.cache.host_store import host_bytes
from clusterkv_jax.cache.layers import KVCache, nbytes, occupancy, take_sequences
from clusterkv_jax.cache.sliding_window import window_bytes
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.decoding import (
    SEGMENT,
    DecodeState,
    decode_loop,
    prefill,
)
from clusterkv_jax.decoding.appending import append_layerwise
from clusterkv_jax.generation.batch import Batch, padded
from clusterkv_jax.generation.diagnosis import check_finite
from clusterkv_jax.generation.diagnosis import first_not_finite as _first_not_finite
from clusterkv_jax.generation.gated_reading import check_fills, gated_prefill
from clusterkv_jax.methods import Method
from clusterkv_jax.methods.recompression import recompress_late
from clusterkv_jax.methods.request import request_of_model
from clusterkv_jax.runtime.dispatch import traits
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.sharding import constrain, fetch
from clusterkv_jax.sampling import Sampling, next_token
from clusterkv_jax.text.stops import OnText, shorten, show
from clusterkv_jax.text.tokenizer import Tokens

Progress = Callable[[str, int, int], None]

# Most tokens per call of the decode loop where the host looks for stop strings or shows text between two calls.
WATCHED = 32


@jit(static_argnames=("sampling",))
def next_token_jit(
    logits: Float[Array, "B V"], sampling: Sampling, key: Key[Array, "..."], number: Int[Array, ""] | int
) -> Int[Array, " B"]:
    """`next_token`, whole on every device of a mesh, as `decode_loop` gives it back."""
    return constrain(next_token(logits, sampling, key, number), None)


def read(
    model: Model, method: Method, batch: Batch, key: jax.Array, progress: Progress | None
) -> tuple[KVCache, jax.Array, dict[str, Any]]:
    """Prefill each different prompt once, give every question its own copy of the compressed cache, append it.

    Returns the cache, the logits, and what `Stats` says of the prompts' caches: their rows and bytes.
    """
    layers, longest, reading_bytes = model.config.num_layers, max(map(len, batch.unique)), 0

    def on_layer(number: int, hidden: jax.Array) -> None:
        if progress is not None:
            jax.block_until_ready(hidden)
            progress("prefill", number + 1, layers)

    def on_chunk(done: int, held: KVCache) -> None:
        nonlocal reading_bytes
        reading_bytes = nbytes(held)
        if progress is not None:
            jax.block_until_ready(held.position)
            progress("prefill", done, longest)

    if batch.gate is None:
        cache, logits = prefill_batch(model, method, batch, key, on_layer=on_layer)
    else:
        cache, logits = prefill_batch(model, method, batch, key, on_chunk=on_chunk)
    rows = {"kept_rows": occupancy(cache), "window_rows": occupancy(cache, windows=True)}
    sizes = {"cache_bytes": nbytes(cache), "window_bytes": window_bytes(cache), "host_bytes": host_bytes(cache)}
    sizes |= {"reading_bytes": reading_bytes}
    if len(batch.unique) != len(batch.texts):
        numbers = jnp.asarray([batch.unique.index(tuple(text)) for text in batch.texts])
        cache, logits = take_sequences((cache, logits), numbers)
    if batch.questions:
        cache, logits = append_questions(model, method, cache, batch.questions, batch.step_tokens)
    return cache, logits, rows | sizes


@partial(annotate_function, name="prefill")
def prefill_batch(model: Model, method: Method, batch: Batch, key: jax.Array, **options: Any) -> tuple[KVCache, Any]:
    """`prefill` of a batch's different prompts; `options` are its `on_layer` or `on_chunk`, and `call`."""
    tokens, lengths = padded(batch.unique, batch.width), np.asarray([len(text) for text in batch.unique], np.int32)
    sizes: Any = {"max_new_tokens": batch.max_new_tokens, "reserve": batch.reserve, "step_tokens": batch.step_tokens}
    sizes |= {"whole": batch.whole, "key": key, **options}
    if batch.gate is not None:
        _check_gate(model, method, batch, lengths)
        return gated_prefill(model.params, model.config, method, tokens, lengths, gate=batch.gate, **sizes)
    arrays = jnp.asarray(tokens), jnp.asarray(lengths)
    return prefill(model.params, model.config, method, *arrays, prefill_chunk=batch.prefill_chunk, **sizes)


def _check_gate(model: Model, method: Method, batch: Batch, lengths: np.ndarray) -> None:
    """Raise ValueError where a batch has prompts beyond the window and none of them ever drops a row."""
    counts = {"reserve": batch.reserve, "step_tokens": batch.step_tokens, "max_new_tokens": batch.max_new_tokens}
    dtype, config = number_dtype(model.params), model.config
    if batch.gate is not None and lengths.max() > batch.gate.window:
        request = request_of_model(config, dtype, lengths, method.cache_dtype, **counts)
        check_fills(config, method, request, lengths.astype(np.int64))


@partial(annotate_function, name="question")
def append_questions(
    model: Model, method: Method, cache: KVCache, questions: list[Tokens], step: int
) -> tuple[KVCache, jax.Array]:
    """Append questions of unequal length, `step` tokens at a time; logits are those after the last token of each."""
    counts = np.asarray([len(question) for question in questions])
    width = -(-int(counts.max()) // step) * step
    tokens = padded(questions, width)
    logits = None
    for start in range(0, width, step):
        # From the host as they are: `jnp.asarray` would compile a program for each shape.
        now = np.clip(counts - start, 0, step).astype(np.int32)
        args = model.params, model.config, method, cache, tokens[:, start : start + step], now
        cache, logits, late = append_layerwise(*args, logits)
        # The host looks: most questions leave room, and clustering is then not even compiled here.
        if late is not None and (late := fetch(late)).any():
            cache = recompress_late(method, cache, model.config.ropes, late)
    assert logits is not None
    return cache, logits


@partial(annotate_function, name="decode")
def decode(
    model: Model,
    method: Method,
    batch: Batch,
    cache: KVCache,
    token: jax.Array,
    keys: jax.Array,
    sampling: Sampling,
    on_text: OnText | None,
    progress: Progress | None,
) -> tuple[KVCache, list[Tokens], int]:
    """Segments of the decode loop until every sequence has ended or has its tokens.

    Returns the cache as it is then, the tokens, and the number of steps.
    """
    ends, max_new_tokens, stops = model.config.eos_ids, batch.max_new_tokens, batch.stops
    sequences = [[int(t)] for t in fetch(token)]
    on_screen = ["" for _ in sequences]
    ended = np.asarray([sequence[-1] in ends for sequence in sequences])
    # A segment runs while the host reads the one before; not where the host must say which texts a string has stopped,
    # nor where the host drives the loops.
    most_ahead, under_way = 1 if stops.any or traits().host_driven else 2, deque()
    longest = WATCHED if stops.any or on_text is not None or progress is not None else SEGMENT
    state, steps, begun = DecodeState(cache, token, jnp.asarray(ended)), 0, 0
    while True:
        check_finite(model, method, batch, sequences, _first_not_finite)
        for i, sequence in enumerate(sequences):
            ended[i] |= shorten(model.tokenizer, sequence, stops)
            last = bool(ended[i]) or steps + 1 == max_new_tokens
            on_screen[i] = show(model.tokenizer, i, sequence, on_screen[i], stops, last, on_text)
        if progress is not None:
            progress("decode", max_new_tokens if ended.all() else steps + 1, max_new_tokens)
        if ended.all() or steps + 1 == max_new_tokens:
            return state.cache, sequences, steps
        while len(under_way) < most_ahead and begun + 1 < max_new_tokens:
            limit = min(longest, max_new_tokens - 1 - begun)
            numbers = loop_numbers(keys, begun + 1, limit)
            state = replace(state, ended=jnp.asarray(ended)) if stops.any else state
            state, *made = decode_loop(
                model.params, model.config, method, state, *numbers, sampling=sampling, eos_ids=ends, steps=SEGMENT
            )
            under_way.append(made)
            begun += limit
        new, count = fetch(under_way.popleft())
        for i, tokens in enumerate(new):
            sequences[i].extend(int(t) for t in tokens[: int(count)] if t != -1)
            ended[i] |= sequences[i][-1] in ends
        steps += int(count)


def loop_numbers(keys: jax.Array, first: int, limit: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """What a call of the decode loop draws by, and its most steps.

    On the host: made on the device, each would be a launch of its own that the call waits for.
    """
    return keys, np.asarray(first, np.int32), np.asarray(limit, np.int32)
