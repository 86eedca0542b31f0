"""What a model answers: texts by an engine, or the likelihoods of continuations, a batch at a time."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.cache.layers import KVCache, nbytes, occupancy, take_sequences
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.decoding import prefill
from clusterkv_jax.decoding.appending import append_step
from clusterkv_jax.engine import Engine, EngineStats, Handle
from clusterkv_jax.evaluation.batching import EvaluationBatch
from clusterkv_jax.evaluation.tasks.cases import EncodedPrompt, Tokens
from clusterkv_jax.generation.batch import QUESTION_STEP, bucket, padded
from clusterkv_jax.methods import Full, Method
from clusterkv_jax.methods.plan import check_prompts
from clusterkv_jax.methods.recompression import recompress_late, room_of_sequences
from clusterkv_jax.methods.request import request_of_model
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.presets import completed
from clusterkv_jax.runtime.errors import out_of_memory_explained
from clusterkv_jax.runtime.prng import seed_key
from clusterkv_jax.runtime.programs import compilation, jit
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import constrain, fetch, on_mesh

# A little more than any question or answer needs, so that whether a budget is possible does not depend on the batch.
_SLACK = 256


@dataclass(frozen=True)
class Response:
    """What came out: a text, or the log-likelihood of each token of a continuation and whether greedy decoding, too,
    would have written it; rows held per head after the prompt (mean over layers and heads), bytes of its cache (of an
    engine's slot where one answers), and seconds.
    """

    text: str = ""
    logprobs: tuple[float, ...] = ()
    greedy: bool = False
    rows: float = 0.0
    cache_bytes: int = 0
    seconds: float = 0.0


# What answers batches; each answer is written down as it comes, in any order, with the part of a batch that it answers.
Answers = Callable[[Sequence[EvaluationBatch]], Iterator[tuple[EvaluationBatch, Sequence[Response]]]]


def responder(
    model: Model,
    batches: Sequence[EvaluationBatch],
    slots: int,
    on_stats: Callable[[EngineStats], None] = lambda stats: None,
) -> Answers:
    """answers(missing): continuations are scored batch by batch; texts are written by engines, and come one by one.

    Args:
        model: of which all are asked.
        batches: all that may be missing; they size the engines, one for each method and power of two of tokens.
        slots: most texts that are written together.
        on_stats: called with how an engine does after each of its steps.
    """
    rooms = {key: _room(parts, slots) for key, parts in _by_room(batches).items()}

    def answers(missing: Sequence[EvaluationBatch]) -> Iterator[tuple[EvaluationBatch, Sequence[Response]]]:
        for key, parts in _by_room(missing).items():
            yield from texts(Engine(model, method=key[0], context_bytes=0, **rooms[key]), parts, on_stats)
        for batch in missing:
            if batch.scores:
                yield batch, likelihoods(model, batch.method, [job.prompt for job in batch.jobs])

    return answers


def _by_room(batches: Sequence[EvaluationBatch]) -> dict[tuple[Method, int], list[EvaluationBatch]]:
    """Batches of texts that an engine can serve without slots that are far too long for most."""
    rooms: dict[tuple[Method, int], list[EvaluationBatch]] = {}
    for batch in batches:
        if not batch.scores:
            longest = max(len(job.prompt.context) for job in batch.jobs)
            rooms.setdefault((batch.method, bucket(longest, 64).bit_length()), []).append(batch)
    return rooms


def _room(batches: Sequence[EvaluationBatch], slots: int) -> dict[str, Any]:
    """What sizes the engine of these batches."""
    jobs = [job for batch in batches for job in batch.jobs]
    after = [len(job.prompt.question) + job.case.max_new_tokens for job in jobs]
    tokens = [len(job.prompt.context) + more for job, more in zip(jobs, after, strict=True)]
    return {"slots": min(slots, len(jobs)), "max_tokens": max(tokens), "reserve": max(after)}


def texts(
    engine: Engine, batches: Sequence[EvaluationBatch], on_stats: Callable[[EngineStats], None]
) -> Iterator[tuple[EvaluationBatch, list[Response]]]:
    """Answers, as they come; what is drawn has the number of its job for a seed. Their seconds are those since the ones
    before, compiling left out.
    """
    todo = deque(replace(batch, jobs=(job,)) for batch in batches for job in batch.jobs)
    live: dict[Handle, EvaluationBatch] = {}
    before, stats = 0.0, engine.stats()
    while todo or live:
        while todo and len(live) <= stats.slots:  # one waits, so that a slot which ends is taken at once
            job = todo[0].jobs[0]
            sizes = {"max_new_tokens": job.case.max_new_tokens, "stop": job.case.stop}
            sizes |= {"sampling": job.case.sampling, "seed": job.number if job.case.sampling.temperature else 0}
            live[engine.add(list(job.prompt.context), list(job.prompt.question) or None, **sizes)] = todo.popleft()
        engine.step()
        on_stats(stats := engine.stats())
        if done := [handle for handle in live if handle.done]:
            seconds = (stats.busy_s - stats.compile_s - before) / len(done)
            before = stats.busy_s - stats.compile_s
            for handle in done:
                result, part = handle.result(), live.pop(handle)
                (rows,) = _rows_each(result.stats.kept_rows, [part.jobs[0].prompt.context])
                took = {"rows": rows, "cache_bytes": result.stats.cache_bytes, "seconds": seconds}
                yield part, [Response(result.texts[0], **took)]


def possible(model: Model, method: Method, prompt: EncodedPrompt, max_new_tokens: int) -> bool:
    """Whether the method's budget is possible for a prompt; of short ones too few rows may remain."""
    method = completed(model, method)
    config, tokens = model.config, len(_compressed(method, prompt) if prompt.continuation else prompt.context)
    reserve = len(prompt.question) + len(prompt.continuation) + max_new_tokens + _SLACK
    counts = {"max_new_tokens": max_new_tokens, "reserve": reserve, "step_tokens": QUESTION_STEP}
    dtype = number_dtype(model.params)
    request = request_of_model(config, dtype, np.asarray([tokens]), method.cache_dtype, **counts)
    with contextlib.suppress(ValueError):
        check_prompts(config, method, request, request.lengths)
        return True
    return False


@own_settings()
def likelihoods(model: Model, method: Method, prompts: Sequence[EncodedPrompt]) -> list[Response]:
    """The continuations' log-likelihoods, fed token by token to the compressed caches of the contexts.

    The last token of a context is fed, too: the logits of a prompt are those of its whole cache, and the first token of
    a continuation, often the only one, would never see the compression.
    """
    method = completed(model, method)
    begin = time.perf_counter()
    contexts = [_compressed(method, prompt) for prompt in prompts]
    held = np.asarray([len(p.context) > len(c) for p, c in zip(prompts, contexts, strict=True)])
    unique = list(dict.fromkeys(contexts))
    width = min(bucket(max(map(len, unique)), 64), model.config.max_positions)
    counts = np.asarray([len(prompt.continuation) for prompt in prompts], np.int32)
    steps = bucket(int(counts.max()), 16)
    mesh = on_mesh(model.mesh, model.config.num_kv_heads)
    explained = out_of_memory_explained(
        f"scoring {len(prompts)} x {width:,} tokens", uses_host=method.storage == "host"
    )
    with compilation() as compiled, mesh, explained:
        cache, logits = prefill(
            model.params,
            model.config,
            method,
            jnp.asarray(padded(unique, width)),
            jnp.asarray([len(context) for context in unique], jnp.int32),
            max_new_tokens=steps,
            reserve=steps + int(held.any()),
            key=seed_key(0),
        )
        rows, cache_bytes = _rows_each(occupancy(cache), contexts), nbytes(cache) // len(unique)
        if len(unique) != len(prompts):
            numbers = jnp.asarray([unique.index(context) for context in contexts])
            cache, logits = take_sequences((cache, logits), numbers)
        tokens = padded([(prompt.context[-1], *prompt.continuation) for prompt in prompts], 1 + steps)
        enter = np.arange(1 + steps) < counts[:, None]  # the last token of a continuation is foretold, never read
        enter[:, 0] = held
        scores, hits = _followed(model, method, cache, logits, tokens, enter, int(counts.max()))
    seconds = (time.perf_counter() - begin - compiled.seconds) / len(prompts)
    return [
        Response(
            logprobs=tuple(float(x) for x in scores[i, :count]),
            greedy=bool(hits[i, :count].all()),
            rows=rows[i],
            cache_bytes=cache_bytes,
            seconds=seconds,
        )
        for i, count in enumerate(counts)
    ]


def _compressed(method: Method, prompt: EncodedPrompt) -> Tokens:
    """What is compressed of a context whose continuation is scored: all but the last token, if there are others. Where
    nothing is compressed all is read at once.
    """
    return prompt.context if method == Full() or len(prompt.context) == 1 else prompt.context[:-1]


def _followed(
    model: Model,
    method: Method,
    cache: KVCache,
    logits: Float[Array, "B V"],
    tokens: Int[np.ndarray, "B T"],
    enter: Bool[np.ndarray, "B T"],
    last: int,
) -> tuple[Float[np.ndarray, "B later"], Bool[np.ndarray, "B later"]]:
    """Of each token behind the first, up to the `last`: its log-likelihood, and whether it was the likeliest.

    Those that `enter` are read. A call of the program ends where a sequence is due, and the host brings it back.
    """
    found = logits, jnp.zeros(tokens.shape, jnp.float32), jnp.zeros(tokens.shape, bool)
    arrays, at, end = (tokens, enter), np.asarray(not enter[:, 0].any(), np.int32), np.asarray(last + 1, np.int32)
    while at < end:
        cache, found, at, late = _follow(model.params, model.config, method, cache, found, *arrays, at, end)
        at, late = fetch((at, late))
        if late is not None and late.any():
            cache = recompress_late(method, cache, model.config.ropes, late)
    _, scores, hits = found
    return fetch((scores[:, 1:], hits[:, 1:]))


@jit(static_argnames=("config", "method"), donate_argnames=("cache", "found"))
def _follow(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    found: tuple[Float[Array, "B V"], Float[Array, "B T"], Bool[Array, "B T"]],
    tokens: Int[Array | np.ndarray, "B T"],
    enter: Bool[Array | np.ndarray, "B T"],
    first: Int[Array | np.ndarray, ""],
    end: Int[Array | np.ndarray, ""],
) -> tuple[KVCache, tuple[Array, Array, Array], Int[Array, ""], Bool[Array, " B"] | None]:
    """Tokens from number `first` on, until a sequence has no room left: the number of the next, and who is due."""
    tokens, enter, room = jnp.asarray(tokens), jnp.asarray(enter), room_of_sequences(method, cache)
    if room is not None:  # a token takes one
        end = jnp.minimum(end, first + jnp.maximum(jnp.min(room), 1))

    def step(at: Array, state: Any) -> Any:
        cache, (logits, scores, hits) = state
        token, count = tokens[:, at], enter[:, at].astype(jnp.int32)
        odds = jax.nn.log_softmax(logits.astype(jnp.float32))
        scores = scores.at[:, at].set(jnp.take_along_axis(odds, token[:, None], axis=1)[:, 0])
        hits = hits.at[:, at].set(jnp.argmax(odds, axis=1) == token)
        cache, latest = append_step(params, config, method, cache, token[:, None], count)
        return cache, (jnp.where(count[:, None] > 0, latest.astype(logits.dtype), logits), scores, hits)

    cache, found = jax.lax.fori_loop(first, end, step, (cache, found))
    room = room_of_sequences(method, cache)
    return cache, found, jnp.asarray(end), None if room is None else constrain(room <= 0, None)


def _rows_each(counts: list[list[list[int]]], contexts: Sequence[Tokens]) -> list[float]:
    """Mean rows per head of each context, from rows [layer][different context][head]; 0 if no layer is compressed."""
    unique = list(dict.fromkeys(contexts))
    if not counts:
        return [0.0] * len(contexts)
    each = [float(np.mean([head for layer in counts for head in layer[i]])) for i in range(len(unique))]
    return [each[unique.index(context)] for context in contexts]
