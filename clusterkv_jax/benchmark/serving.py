"""Requests that come and go, timed in an engine: how near it comes to batches that are always full, and what a context
that is read once saves.

ideal      each prompt read alone, one after the other, and the tokens of all answers in steps of full slots
questions  all questions to a context that is read once, against reading it for each
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from clusterkv_jax.benchmark.common import random_prompt
from clusterkv_jax.benchmark.grid import Cell, GridRequest
from clusterkv_jax.benchmark.own_runner import peak_bytes, the_method
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine import Engine
from clusterkv_jax.engine.scheduler import MOST_STEPS
from clusterkv_jax.generation.batch import bucket

# Fewest new tokens of a request, and tokens in whose time a full step's is found.
FEWEST, FULL_STEPS = 16, 3 * MOST_STEPS
# Questions to one context, and the tokens of each and of its answer.
QUESTIONS, ASKED, ANSWER = 64, 16, 16
# Requests arrive in this share of the time that they would take in full batches: slots then rarely wait for one.
ARRIVAL = 0.5


@dataclass(frozen=True)
class TimedRequest:
    """A prompt, how many tokens follow it, and when it comes: a share of the time in which all do."""

    prompt: list[int]
    new_tokens: int
    at: float


def requests(asked: GridRequest, vocabulary: int) -> list[TimedRequest]:
    """The same for every cell: lengths spread evenly over powers of two, new tokens and arrivals over all."""
    rng, (least, most) = np.random.default_rng(0), (min(asked.lengths), max(asked.lengths))
    lengths = np.exp(rng.uniform(np.log(least), np.log(most), asked.requests)).round().astype(int)
    new = rng.integers(min(FEWEST, asked.new_tokens), asked.new_tokens + 1, asked.requests)
    at = np.sort(rng.uniform(0, 1, asked.requests))
    prompts = [rng.integers(0, vocabulary, length).tolist() for length in lengths]
    return [TimedRequest(prompt, int(n), float(x)) for prompt, n, x in zip(prompts, new, at, strict=True)]


def measure(model: Model, asked: GridRequest, cell: Cell, repeat: int) -> dict[str, Any]:
    """All requests in an engine with `cell.batch` slots, then all questions. Repeat 0 compiles.

    Raises ValueError for a cell that is impossible, or that does not fit the device.
    """
    work = requests(asked, model.config.vocab_size)
    after = max(asked.new_tokens, FULL_STEPS)
    sizes = {"slots": cell.batch, "max_tokens": max(asked.lengths) + after, "reserve": after}
    made = partial(Engine, model, method=the_method(model, cell), **sizes)
    engine, earlier = made(), peak_bytes()
    reads = read_seconds(engine, [request.prompt for request in work])
    step = step_seconds(engine, work, after)
    if not repeat:
        questions_seconds(engine, model.config.vocab_size, cell.length)
        stats = engine.stats()
        facts = {"cache_bytes": stats.memory.slots, "peak_bytes": peak_bytes(), "earlier_peak_bytes": earlier}
        return {"ttft_s": stats.ttft_s, "tpot_s": step, "compile_s": stats.compile_s, **facts}
    engine.close()
    del engine
    engine = made()
    new_tokens = sum(request.new_tokens for request in work)
    ideal = sum(reads) + step * new_tokens / cell.batch
    seconds = serve(engine, work, ARRIVAL * ideal)
    stats = engine.stats()
    read, rest = questions_seconds(engine, model.config.vocab_size, cell.length)
    return {
        "ttft_s": stats.ttft_s,
        "tpot_s": step,
        "served_tokens_per_s": new_tokens / seconds,
        "of_ideal": ideal / seconds,
        "occupancy": stats.occupancy,
        "programs": engine.stats().programs,
        "question_gain": (QUESTIONS * read + rest) / (read + rest),
    }


def read_seconds(engine: Engine, prompts: Sequence[list[int]]) -> list[float]:
    """Seconds to read each prompt alone; those of equal width take as long as the first of them, read twice."""
    by_width: dict[int, float] = {}
    for prompt in prompts:
        if (width := bucket(len(prompt), 64)) not in by_width:
            by_width[width] = min(_read(engine, prompt) for _ in range(2))
    return [by_width[bucket(len(prompt), 64)] for prompt in prompts]


def _read(engine: Engine, prompt: list[int]) -> float:
    """From the tokens to the first token after them."""
    before = engine.stats()
    engine.add(prompt, max_new_tokens=1).result()
    after = engine.stats()
    return after.busy_s - before.busy_s


def step_seconds(engine: Engine, work: Sequence[TimedRequest], new_tokens: int) -> float:
    """Seconds of a decode step with a request in every slot."""
    for number in range(engine.stats().slots):
        engine.add(work[number % len(work)].prompt, max_new_tokens=new_tokens)
    engine.step()  # reads all prompts
    before = engine.stats()
    engine.run()
    after = engine.stats()
    return (after.busy_s - before.busy_s) / (after.steps - before.steps)


def serve(engine: Engine, work: Sequence[TimedRequest], arriving_s: float) -> float:
    """Seconds from the first request to the last token, as they arrive within so many."""
    begin, rest = time.perf_counter(), list(work)
    while rest or engine.stats().active or engine.stats().waiting:
        now = time.perf_counter() - begin
        while rest and rest[0].at * arriving_s <= now:
            request = rest.pop(0)
            engine.add(request.prompt, max_new_tokens=request.new_tokens)
        engine.step()
    return time.perf_counter() - begin


def questions_seconds(engine: Engine, vocabulary: int, length: int) -> tuple[float, float]:
    """Seconds to read a context, and to answer all questions to it."""
    begin = time.perf_counter()
    context = engine.read(random_prompt(vocabulary, length), max_new_tokens=ANSWER)
    read = time.perf_counter() - begin
    for number in range(QUESTIONS):
        engine.add(context, [number % vocabulary] * ASKED, max_new_tokens=ANSWER)
    engine.run()
    engine.drop(context)
    return read, time.perf_counter() - begin - read
