"""A Cartridge: the compressed rows of one chapter, trained on questions that are made from the chapter itself.

The chapter of a book holds facts. A method keeps a sixteenth of its cache, with which the demo model answers few
questions. Then keys, values and degrees of these rows are trained: what the model says with them shall be what it says
with the full cache (KL divergence), on spans of the chapter and on questions whose names are put together anew from
words of the chapter. The questions of the evaluation ask for half of the facts; none of them is among those trained on.
The trained rows are saved as any cache, and answer from the file.
"""

import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jaxtyping import Array, Bool, Float, Int

import clusterkv_jax as ckv
from clusterkv_jax.cache import KVCache
from clusterkv_jax.evaluation.tasks import haystack, sources, synthetic
from clusterkv_jax.programs import jit
from clusterkv_jax.training.cartridge import Rows, divergence, logits_after, rows_of, with_rows

ROOM = 64  # tokens of a question and its answer
PLACES = 12  # tokens of a question that are learned, the same number for all, so that a teacher's answers take little
FACT = re.compile(r"One of the special magic numbers for (\S+) is: (\d+)\.")


@dataclass(frozen=True)
class Questions:
    """Texts that follow a chapter, the places in them after which the next token is learned, and those tokens."""

    tokens: Int[np.ndarray, "Q T"]
    places: Int[np.ndarray, "Q P"]
    learned: Bool[np.ndarray, "Q P"]

    @property
    def targets(self) -> Int[np.ndarray, "Q P"]:
        """What is said at the places."""
        return np.take_along_axis(self.tokens, np.minimum(self.places + 1, ROOM - 1), axis=1)


@dataclass(frozen=True)
class Chapter:
    """A text, its tokens, and the facts that it holds."""

    text: str
    ids: tuple[int, ...]
    facts: tuple[tuple[str, str], ...]


# --- the chapter and its questions ---


def chapter(model: ckv.Model, tokens: int, facts: int, seed: int) -> Chapter:
    """A passage of the first shipped book with facts hidden in it; the keys are none that the model was trained on."""
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    book = haystack.book(next(iter(sources.books(None).values())), lambda texts: [len(encode(text)) for text in texts])
    rng, needles = np.random.default_rng(seed), synthetic.Needles(keys=facts)
    text = synthetic.niah(rng, tokens, lambda part: len(encode(part)), needles, book, split="valid")[0].context
    return Chapter(text, tuple(model.tokenizer.encode(text)), tuple(FACT.findall(text)))


def about(key: str, value: str) -> tuple[str, str]:
    """A question with the beginning of its answer, and the rest of the answer."""
    what = f"special magic number for {key} mentioned in the provided text"
    return f"What is the {what}? The {what} is", f" {value}."


def asked(model: ckv.Model, pairs: list[tuple[str, str]]) -> Questions:
    """These questions, of which the answers are learned."""
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    return _questions([(encode(question), [*encode(answer), *model.config.eos_ids[:1]]) for question, answer in pairs])


def self_made(model: ckv.Model, source: Chapter, count: int, held_out: set[str], seed: int) -> Questions:
    """Four fifths ask for names put together anew from those of facts, by which both facts are recalled; the others
    are spans of the chapter to be continued. No question asks for what is held out.
    """
    rng, rows = np.random.default_rng([seed, 1]), []
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    names = [key.split("-", 1) for key, _ in source.facts]
    while len(rows) < count:
        if rng.random() < 0.2:
            start, known = rng.integers(1, len(source.ids) - ROOM), rng.integers(4, ROOM - PLACES)
            span = list(source.ids[start : start + known + PLACES])
            rows.append((span[:known], span[known:]))
            continue
        mine, other = rng.integers(len(names), size=2)
        (first, second), (third, fourth) = names[mine], names[other]
        key = (f"{first}-{fourth}", f"{third}-{second}", first, second)[rng.integers(4)]
        if key not in held_out:
            question, answer = about(key, source.facts[mine][1])
            rows.append((encode(question), encode(answer)))
    return _questions(rows)


def _questions(rows: list[tuple[list[int], list[int]]]) -> Questions:
    tokens, places, learned = np.zeros((len(rows), ROOM), np.int32), [], []
    for row, (known, rest) in zip(tokens, rows, strict=True):
        row[: len(known) + len(rest)] = [*known, *rest]
        place = len(known) - 1 + np.arange(PLACES)
        places.append(np.minimum(place, ROOM - 1))
        learned.append(np.arange(PLACES) < len(rest))
    return Questions(tokens, np.stack(places).astype(np.int32), np.stack(learned))


# --- training ---


@partial(jax.jit, static_argnames=("config", "method"))
def said(
    params: Any, config: Any, method: Any, cache: KVCache, tokens: Int[Array, "Q T"], places: Int[Array, "Q P"]
) -> Float[Array, "Q P V"]:
    """What the model says after a cache."""
    return logits_after(params, config, method, cache, tokens, places)


def taught(model: ckv.Model, cache: KVCache, questions: Questions, at_once: int = 16) -> Float[np.ndarray, "Q P V"]:
    """The teacher's logits, which has the full cache."""
    parts = []
    for start in range(0, len(questions.tokens), at_once):
        part = slice(start, start + at_once)
        tokens, places = jnp.asarray(questions.tokens[part]), jnp.asarray(questions.places[part])
        parts.append(np.asarray(said(model.params, model.config, ckv.Full(), cache, tokens, places)))
    return np.concatenate(parts)


def train(
    model: ckv.Model,
    method: Any,
    cache: KVCache,
    questions: Questions,
    teacher: Float[np.ndarray, "Q P V"],
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    show: Any,
) -> KVCache:
    """The cache with trained rows; `show` gets each step's number and loss."""
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(10, steps // 2), steps))
    config = model.config

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(rows: Rows, state: Any, params: Any, cache: KVCache, *data: Array) -> tuple[Rows, Any, Array]:
        tokens, places, learned, teacher = data

        def loss(rows: Rows) -> Array:
            said = logits_after(params, config, method, with_rows(cache, rows), tokens, places)
            return divergence(teacher, said, learned)

        value, grads = jax.value_and_grad(loss)(rows)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers and multiplies floats with them
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(rows, updates), state, value

    rows: Any = jax.tree.map(jnp.copy, rows_of(cache))
    state, rng = optimizer.init(rows), np.random.default_rng([seed, 2])
    for number in range(steps):
        if number * batch % len(teacher) < batch:
            order = rng.permutation(len(teacher))
        mine = order[np.arange(number * batch, (number + 1) * batch) % len(teacher)]
        data = (questions.tokens[mine], questions.places[mine], questions.learned[mine], teacher[mine])
        rows, state, value = step(rows, state, model.params, cache, *map(jnp.asarray, data))
        show(number + 1, value)
    return with_rows(cache, rows)
