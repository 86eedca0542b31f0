"""What a request says as it runs, and what it comes to: the result that `generate` has, or no finite logits."""

from dataclasses import dataclass

import numpy as np

from clusterkv_jax.cache.host_store import host_bytes, traffic
from clusterkv_jax.cache.layers import KVCache, nbytes
from clusterkv_jax.cache.sliding_window import window_bytes
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine.contexts import Context
from clusterkv_jax.engine.layout import EngineLayout
from clusterkv_jax.engine.logits import Logprobs
from clusterkv_jax.engine.requests import Request
from clusterkv_jax.engine.scheduler import RunningSequence
from clusterkv_jax.generation.diagnosis import check_finite
from clusterkv_jax.generation.results import Result, Stats, TokenLogprob, full_bytes
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.families.recall import recalled_rows
from clusterkv_jax.sampling import NOT_FINITE
from clusterkv_jax.text.stops import FinishReason, finish_reason, text_of
from clusterkv_jax.text.tokenizer import Tokens


@dataclass(frozen=True)
class RequestOutput:
    """What is new of one answer of a request.

    Attributes:
        request_id: of the request.
        index: of the answer, from 0 to n - 1.
        text: what follows the text of the outputs before; half characters and half stop strings wait.
        token_ids: the tokens that follow those of the outputs before.
        logprobs: of these tokens, where the request asks for them.
        finish_reason: why the answer has ended, as in `Result`; None if it goes on.
        result: the whole answer, of the last output.
        context: what the answer has left, of the last output of a request with `keep`.
        prompt_context: the prompt as it was read, of the first output of a request with `keep_prompt`.
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    result: Result | None = None
    context: Context | None = None
    prompt_context: Context | None = None


def output_of(
    sequence: RunningSequence, text: str, result: Result | None = None, context: Context | None = None
) -> RequestOutput:
    """What is new of a sequence whose whole text is this one."""
    reason = None if result is None else result.finish_reasons[0]
    tokens = sequence.tokens[sequence.said :]
    asked = sequence.request.params.logprobs is not None
    logprobs = sequence.logprobs[sequence.said : len(sequence.tokens)] if asked else None
    new = text[len(sequence.shown) :], tokens, logprobs
    return RequestOutput(*sequence.request.key, *new, reason, result, context)


def token_logprobs(request: Request, logprobs: Logprobs | None, slot: int, tokens: Tokens) -> list[TokenLogprob]:
    """Those of a slot's new tokens, as a request asks for them; none where it does not."""
    most = request.params.logprobs
    if most is None or logprobs is None:
        return []
    drawn, ids, top = (np.asarray(x[slot]) for x in (logprobs.drawn, logprobs.top_ids, logprobs.top))
    return [
        TokenLogprob(token, float(drawn[i]), tuple(zip(ids[i, :most].tolist(), top[i, :most].tolist(), strict=True)))
        for i, token in enumerate(tokens)
        if token != -1
    ]


def result_of(
    model: Model, sequence: RunningSequence, layout: EngineLayout, now: KVCache | None, end_s: float, compile_s: float
) -> Result:
    """What `generate` returns of a request, as far as it has come.

    `now` is what statistics look at in its slot, where the method recalls.
    """
    one = layout.one
    request, tokens = sequence.request, list(sequence.tokens)
    recalled, union = ([], []) if now is None else recalled_rows(now)
    moved = {"moved_bytes": 0, "cluster_hit_rate": 0.0, "row_hit_rate": 0.0} if now is None else traffic(now)
    stats = Stats(
        ttft_s=sequence.first_s - request.added_s if tokens else 0.0,
        tpot_s=(end_s - sequence.first_s) / (len(tokens) - 1) if len(tokens) > 1 else 0.0,
        compile_s=compile_s - request.compile_s,
        kept_rows=sequence.rows[0],
        window_rows=sequence.rows[1],
        recalled_rows=recalled,
        union_rows=union,
        cache_bytes=nbytes(one),
        window_bytes=window_bytes(one),
        host_bytes=host_bytes(one),
        **moved,
        full_cache_bytes=full_bytes(model, layout.rows),
        prompt_tokens=[request.prompt_tokens],
        question_tokens=[len(request.question)],
        new_tokens=[len(tokens)],
        cached_tokens=[sequence.cached],
    )
    stops = request.batch.stops
    reason = finish_reason(model.tokenizer, tokens, request.ends, stops) if sequence.ended else "cancelled"
    logprobs = None if request.params.logprobs is None else [list(sequence.logprobs[: len(tokens)])]
    return Result([text_of(model.tokenizer, tokens, stops)], [tokens], stats, [reason], logprobs)


def check_tokens(model: Model, method: Method, request: Request, tokens: Tokens) -> None:
    """Raise ValueError if a step's logits were not finite."""
    if NOT_FINITE not in tokens:
        return
    if request.context is not None and request.context.file is not None:
        raise ValueError(f"The model's logits after the saved cache {request.context.file} are not finite numbers.")
    check_finite(model, method, request.batch, [tokens])
