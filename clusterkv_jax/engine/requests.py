"""`Request`: what a caller adds, encoded and checked against the model, the method and the slots."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine.contexts import Context
from clusterkv_jax.engine.layout import Limits
from clusterkv_jax.engine.logits import AllowedTokens
from clusterkv_jax.engine.params import SamplingParams
from clusterkv_jax.generation.batch import Batch, make_batch
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.plan import check_prompts, repeats
from clusterkv_jax.methods.request import RequestShape, request_of_model
from clusterkv_jax.runtime.errors import counted, shown
from clusterkv_jax.runtime.prng import MOST_SEED
from clusterkv_jax.sampling import Sampling, check_seed
from clusterkv_jax.text.chat import Chat
from clusterkv_jax.text.tokenizer import Tokens


class EngineFull(ValueError):
    """A queue has no place for a request.

    Attributes:
        retry_after_s: seconds after which it will have one, about.
    """

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"The engine's queue is full: {waiting} wait; come back in {retry_after_s:.1f} s.")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, eq=False)
class Request:
    """A request as it was added.

    Attributes:
        request_id: counted from 0.
        batch: its prompt and question as tokens; of a context that is a file the prompt is not known.
        prompt_tokens: tokens of the prompt.
        context: of the prompt, where it was read before.
        params: how its tokens are drawn, and where they end.
        read_seed: of what its method draws.
        ends: the model's tokens that end it.
        stream: whether somebody waits for each of its tokens; calls of the decode program are then short.
        allowed_tokens: which tokens may follow those that it has said.
        added_s: when it was made, by a clock that stands still while the engine compiles.
        compile_s: seconds that the engine had compiled by then.
        index: which of its `params.n` answers this is.
        keep: whether its cache is left as a context when it ends.
        keep_prompt: whether its prompt, as it was read, is left as one with the first tokens.
    """

    request_id: int
    batch: Batch
    prompt_tokens: int
    context: Context | None
    params: SamplingParams
    read_seed: int
    ends: tuple[int, ...]
    stream: bool
    allowed_tokens: AllowedTokens | None
    added_s: float
    compile_s: float
    index: int = 0
    keep: bool = False
    keep_prompt: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from all others."""
        return self.request_id, self.index

    @property
    def seed(self) -> int:
        """Of the draws of this answer."""
        return (int(self.params.seed) + self.index) % (MOST_SEED + 1)

    @property
    def question(self) -> Tokens:
        """Tokens of the question, none without one."""
        return self.batch.questions[0] if self.batch.questions else []

    @property
    def waiting_bytes(self) -> int:
        """What its tokens take while it waits; a context's are the context's."""
        prompt = 0 if self.context is not None else self.prompt_tokens
        return 8 * (prompt + len(self.question))

    def reads_as(self, other: "Request") -> bool:
        """Whether reading this prompt gives what reading the other one gave."""
        mine, theirs = self.batch, other.batch
        return (
            self.context is None is other.context
            and self.read_seed == other.read_seed
            and (mine.max_new_tokens, mine.reserve) == (theirs.max_new_tokens, theirs.reserve)
            and mine.texts == theirs.texts
        )


def prompt_batch(model: Model, method: Method, limits: Limits, prompt: Any, question: Any, **sizes: Any) -> Batch:
    """A prompt and its question, encoded. Raises ValueError for what cannot be served."""
    questions = None if question is None else [question]
    batch = replace(make_batch(model, [prompt], questions=questions, **sizes), whole=limits.whole)
    check_lengths(limits, len(batch.texts[0]), batch)
    check_chat(model, method, batch.chat)
    request = request_of_batch(model, method, batch)
    check_prompts(model.config, method, request, np.asarray([len(batch.texts[0])], np.int64))
    return batch


def check_chat(model: Model, method: Method, chat: Chat | None) -> None:
    """Raise ValueError for a chat that a method would not repeat prompts in: an engine knows its template alone."""
    if repeats(model.config, method) and chat not in (None, Chat()):
        raise ValueError(
            f"{type(method).__name__} repeats prompts in the chat template as it stands, so an engine takes no system "
            "and no chat_template_kwargs for it; generate does."
        )


def context_batch(model: Model, limits: Limits, context: Context, question: Any, **sizes: Any) -> Batch:
    """A question to a context, encoded; the context's own tokens were checked when it was read."""
    if sizes.get("chat"):
        raise ValueError("Arguments of a chat must be said where a context is read, not where it is asked.")
    if context.in_chat is not None and not isinstance(question, str):
        raise ValueError(f"A context in a chat needs a question in words, got {shown(question)}.")
    question = question if context.in_chat is None else context.in_chat(question)
    stand_in = list(context.tokens[:1]) or [0]
    questions = None if question is None else [question]
    batch = make_batch(model, [stand_in], questions=questions, **sizes)
    if question is None and context.file is not None:
        raise ValueError(f"The saved cache {context.file} holds no logits; give a question that continues its text.")
    if question is None and context.answered:
        raise ValueError("A context that an answer has left holds no logits; give a question that continues it.")
    check_lengths(limits, context.length, batch)
    return replace(batch, texts=[list(context.tokens)])


def rows_alike(model: Model, method: Method, context: Context, max_new_tokens: int) -> bool:
    """Whether a request for so many tokens has the budget that a context was read with; a saved cache, and what an
    answer has left, are as they are.
    """
    if context.file is not None or context.answered or max_new_tokens == context.max_new_tokens:
        return True
    length, dtype = np.asarray([context.length]), number_dtype(model.params)
    one, other = (
        request_of_model(model.config, dtype, length, method.cache_dtype, max_new_tokens=new)
        for new in (max_new_tokens, context.max_new_tokens)
    )
    rows = method.budget_rows
    return all(np.array_equal(rows(length, i, one), rows(length, i, other)) for i in range(one.num_layers))


def check_params(params: SamplingParams, context: Context | None, vocab_size: int, *, keep: bool) -> None:
    """Raise ValueError for parameters that a model, or a context, does not go with."""
    check_settings(params.sampling, params.seed)
    if wrong := [token for token in params.logit_bias or () if token >= vocab_size]:
        raise ValueError(f"logit_bias holds token id {wrong[0]}; allowed are 0 to {vocab_size - 1}.")
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens must be at most the new tokens, {params.max_tokens}, got {params.min_tokens}.")
    if params.min_tokens and params.stop:
        raise ValueError("min_tokens goes with stop_token_ids, not with stop: a text may end within a token.")
    for name, asked in (("repetition_penalty", params.repetition_penalty != 1), ("keep", keep)):
        if asked and context is not None and not context.tokens:
            raise ValueError(f"{name} needs the prompt's tokens, which {context.file} does not hold.")


def answers(request: Request) -> list[Request]:
    """A request for each of the answers that one asks for; neighbours with equal prompts are read once."""
    return [replace(request, index=index) for index in range(request.params.n)]


def check_settings(sampling: Any, seed: Any) -> None:
    """Raise ValueError for a sampling or a seed that `generate` would not take."""
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling must be an object such as Sampling(temperature=0.5) or None, got {shown(sampling)}."
        )
    check_seed(seed)


def answer_tokens(limits: Limits, prompt: int) -> int:
    """Tokens of the answers about a prompt where nobody says how many: 64, or what a slot has room for behind it."""
    return max(1, min(64, limits.reserve, limits.max_tokens - prompt))


def check_lengths(limits: Limits, prompt: int, batch: Batch) -> None:
    """Raise ValueError for a sequence that no slot has room for."""
    question = len(batch.questions[0]) if batch.questions else 0
    after = question + batch.max_new_tokens
    if prompt + after > limits.max_tokens:
        raise ValueError(
            f"A prompt of {counted(prompt, 'token')}, its question of {question} and {batch.max_new_tokens} new tokens "
            f"exceed the engine's max_tokens = {limits.max_tokens}."
        )
    if after > limits.reserve:
        raise ValueError(
            f"A question of {counted(question, 'token')} and {batch.max_new_tokens} new tokens exceed the engine's "
            f"reserve = {limits.reserve}."
        )


def request_of_batch(model: Model, method: Method, batch: Batch) -> RequestShape:
    """The request that `generate` would make of it."""
    counts = {name: getattr(batch, name) for name in ("reserve", "step_tokens", "max_new_tokens", "whole")}
    lengths = np.arange(1, batch.width + 1)
    return request_of_model(model.config, number_dtype(model.params), lengths, method.cache_dtype, **counts)
