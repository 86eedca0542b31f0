"""What a model answers: batches of prompts through a method, by generation or by the likelihood of a continuation."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.batch import QUESTION_STEP, bucket, padded
from clusterkv_jax.cache import KVCache, occupancy, take_sequences
from clusterkv_jax.checkpoints import Model
from clusterkv_jax.decoding import extend_step, prefill
from clusterkv_jax.errors import out_of_memory_explained
from clusterkv_jax.evaluation.tasks.cases import Prompt
from clusterkv_jax.generation import completed, generate
from clusterkv_jax.methods import Method
from clusterkv_jax.methods.plan import check_prompts
from clusterkv_jax.methods.request import request_of_model
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.transformer import Params
from clusterkv_jax.programs import compilation, jit
from clusterkv_jax.sharding import fetch, on_mesh

# A little more than any question or answer needs, so that whether a budget is possible does not depend on the batch.
_SLACK = 256


@dataclass(frozen=True)
class Answer:
    """What came out: a text, or the log-likelihood of each token of a continuation and whether greedy decoding, too,
    would have written it; rows held per head after the prompt (mean over layers and heads), and seconds.
    """

    text: str = ""
    logprobs: tuple[float, ...] = ()
    greedy: bool = False
    rows: float = 0.0
    seconds: float = 0.0


Respond = Callable[[Method, Sequence[Prompt], int, Sequence[str]], list[Answer]]


def responder(model: Model) -> Respond:
    """respond(method, prompts, max_new_tokens, stop): answers of a batch, all generated or all continuations."""

    def respond(method: Method, prompts: Sequence[Prompt], max_new_tokens: int, stop: Sequence[str]) -> list[Answer]:
        if prompts[0].continuation:
            return likelihoods(model, method, prompts)
        return generations(model, method, prompts, max_new_tokens, stop)

    return respond


def possible(model: Model, method: Method, prompt: Prompt, max_new_tokens: int) -> bool:
    """Whether the method's budget is possible for a prompt; of short ones too few rows may remain."""
    method = completed(model, method)
    config, tokens = model.config, len(prompt.context)
    reserve = len(prompt.question) + len(prompt.continuation) + max_new_tokens + _SLACK
    counts = {"max_new_tokens": max_new_tokens, "reserve": reserve, "step_tokens": QUESTION_STEP}
    dtype = model.params["embed"].dtype
    request = request_of_model(config, dtype, np.asarray([tokens]), method.cache_dtype, **counts)
    with contextlib.suppress(ValueError):
        check_prompts(config, method, request, request.lengths)
        return True
    return False


def generations(
    model: Model, method: Method, prompts: Sequence[Prompt], max_new_tokens: int, stop: Sequence[str]
) -> list[Answer]:
    """Greedy answers; equal contexts are read once. All prompts have a question, or none has."""
    question_ids = [list(prompt.question) for prompt in prompts] if prompts[0].question else None
    contexts = [list(prompt.context) for prompt in prompts]
    begin = time.perf_counter()
    result = generate(
        model, contexts, method=method, questions=question_ids, max_new_tokens=max_new_tokens, stop=tuple(stop)
    )
    seconds = (time.perf_counter() - begin - result.stats.compile_s) / len(prompts)
    rows = _rows_each(result.stats.kept_rows, prompts)
    return [Answer(text, rows=row_count, seconds=seconds) for text, row_count in zip(result.texts, rows, strict=True)]


def likelihoods(model: Model, method: Method, prompts: Sequence[Prompt]) -> list[Answer]:
    """The continuations' log-likelihoods, fed token by token to the compressed caches of the contexts."""
    method = completed(model, method)
    begin = time.perf_counter()
    unique = list(dict.fromkeys(prompt.context for prompt in prompts))
    width = min(bucket(max(map(len, unique)), 64), model.config.max_positions)
    counts = np.asarray([len(prompt.continuation) for prompt in prompts], np.int32)
    steps = bucket(int(counts.max()), 16)
    mesh = on_mesh(model.mesh, model.config.num_kv_heads)
    explained = out_of_memory_explained(f"scoring {len(prompts)} x {width:,} tokens", uses_host=method.holds == "host")
    with compilation() as compiled, mesh, explained:
        cache, logits = prefill(
            model.params,
            model.config,
            method,
            jnp.asarray(padded(unique, width)),
            jnp.asarray([len(context) for context in unique], jnp.int32),
            max_new_tokens=steps,
            key=jax.random.key(0),
        )
        rows = _rows_each(occupancy(cache), prompts)
        if len(unique) != len(prompts):
            numbers = jnp.asarray([unique.index(prompt.context) for prompt in prompts])
            cache, logits = take_sequences((cache, logits), numbers)
        tokens = jnp.asarray(padded([prompt.continuation for prompt in prompts], steps))
        _, scores, hits = _follow(model.params, model.config, method, cache, logits, tokens, jnp.asarray(counts))
        scores, hits = fetch((scores, hits))
    seconds = (time.perf_counter() - begin - compiled.seconds) / len(prompts)
    return [
        Answer(
            logprobs=tuple(float(x) for x in scores[i, :count]),
            greedy=bool(hits[i, :count].all()),
            rows=rows[i],
            seconds=seconds,
        )
        for i, count in enumerate(counts)
    ]


@jit(static_argnames=("config", "method"), donate_argnames=("cache",))
def _follow(
    params: Params,
    config: ModelConfig,
    method: Method,
    cache: KVCache,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
) -> tuple[KVCache, Float[Array, "B T"], Bool[Array, "B T"]]:
    """The cache, returned because it is donated; each token's log-likelihood, and whether it was the likeliest.

    What lies beyond `counts` means nothing.
    """

    def step(state: tuple[KVCache, Array], place: Array):
        cache, logits = state
        token = tokens[:, place]
        scores = jax.nn.log_softmax(logits.astype(jnp.float32))
        result = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0], jnp.argmax(scores, axis=1) == token
        more = (place + 1 < counts).astype(jnp.int32)
        cache, latest = extend_step(params, config, method, cache, token[:, None], more)
        return (cache, jnp.where(more[:, None] > 0, latest.astype(logits.dtype), logits)), result

    (cache, _), (scores, hits) = jax.lax.scan(step, (cache, logits), jnp.arange(tokens.shape[1]))
    return cache, scores.T, hits.T


def _rows_each(counts: list[list[list[int]]], prompts: Sequence[Prompt]) -> list[float]:
    """Mean rows per head of each prompt, from rows [layer][different context][head]; 0 where no layer is compressed."""
    unique = list(dict.fromkeys(prompt.context for prompt in prompts))
    if not counts:
        return [0.0] * len(prompts)
    each = [float(np.mean([head for layer in counts for head in layer[i]])) for i in range(len(unique))]
    return [each[unique.index(prompt.context)] for prompt in prompts]
