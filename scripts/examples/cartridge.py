"""A Cartridge: the compressed rows of one chapter, trained on questions that are made from the chapter itself.

The chapter of a book holds facts. A method keeps a sixteenth of its cache, with which the demo model answers few
questions. Then keys, values and degrees of these rows are trained: what the model says with them shall be what it says
with the full cache (KL divergence), on spans of the chapter and on questions whose names are put together anew from
words of the chapter. The questions of the evaluation ask for half of the facts; none of them is among those trained on.
The trained rows are saved as any cache, and answer from the file.
"""

import re
import time
from collections.abc import Callable
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
from clusterkv_jax.cache.layers import KVCache, take_sequences
from clusterkv_jax.cli.terminal import one_sentence_errors
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.decoding.appending import append_step_jit
from clusterkv_jax.evaluation.tasks import haystack, sources, synthetic
from clusterkv_jax.generation.batch import padded
from clusterkv_jax.presets import preset
from clusterkv_jax.sampling import Sampling
from clusterkv_jax.text.tokenizer import decode
from clusterkv_jax.training.cartridge import TrainedRows, divergence, logits_after, rows_of, with_rows

ROOM = 64  # tokens of a question and its answer
PLACES = 12  # tokens of a question that are learned, the same number for all, so that a teacher's answers take little
FACT = re.compile(r"One of the special magic numbers for (\S+) is: (\d+)\.")


@dataclass(frozen=True)
class Questions:
    """Texts that follow a chapter, the places in them after which the next token is learned."""

    tokens: Int[np.ndarray, "Q T"]
    places: Int[np.ndarray, "Q P"]
    learned: Bool[np.ndarray, "Q P"]


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
    show: Callable[[int, Array], None],
) -> KVCache:
    """The cache with trained rows; `show` gets each step's number and loss."""
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(10, steps // 2), steps))
    config = model.config

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(rows: Any, state: Any, params: Any, cache: KVCache, *data: Array) -> tuple[Any, Any, Array]:
        tokens, places, learned, teacher = data

        def loss(rows: TrainedRows) -> Array:
            said = logits_after(params, config, method, with_rows(cache, rows), tokens, places)
            return divergence(teacher, said, learned)

        value, grads = jax.value_and_grad(loss)(rows)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers and multiplies floats with them
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(rows, updates), state, value

    rows: Any = jax.tree.map(jnp.copy, rows_of(cache))  # a step donates its rows, and the cache's are still asked for
    state, rng = optimizer.init(rows), np.random.default_rng([seed, 2])
    for number in range(steps):
        mine = rng.choice(len(teacher), batch, replace=False)
        data = (questions.tokens[mine], questions.places[mine], questions.learned[mine], teacher[mine])
        rows, state, value = step(rows, state, model.params, cache, *map(jnp.asarray, data))
        show(number + 1, value)
    return with_rows(cache, rows)


# --- answers ---


def ask(model: ckv.Model, method: Any, cache: KVCache, questions: list[str], most: int = 8) -> list[str]:
    """Greedy answers to questions about the one context of a cache, such as `load_cache` reads."""
    ids = [model.tokenizer.encode(question, add_special_tokens=False) for question in questions]
    many = take_sequences(cache, jnp.zeros(len(ids), jnp.int32))
    counts = jnp.asarray([len(question) for question in ids], jnp.int32)
    tokens = jnp.asarray(padded(ids, ROOM - most))
    many, logits = append_step_jit(model.params, model.config, method, many, tokens, counts)
    first = np.asarray(jnp.argmax(logits, axis=-1), np.int32)
    state = DecodeState(many, jnp.asarray(first), jnp.asarray(np.isin(first, model.config.eos_ids)))
    options: Any = {"sampling": Sampling(), "eos_ids": model.config.eos_ids, "steps": most}
    args = model.params, model.config, method, state, jax.random.key(0), jnp.int32(1), jnp.int32(most - 1)
    _, rest, _ = decode_loop(*args, **options)
    rows = np.concatenate([first[:, None], np.asarray(rest)], axis=1)
    return [decode(model.tokenizer, [int(token) for token in row if token >= 0]) for row in rows]


def right(model: ckv.Model, method: Any, cache: KVCache, pairs: list[tuple[str, str]]) -> int:
    """How many questions are answered to the letter."""
    answers = ask(model, method, cache, [question for question, _ in pairs])
    return sum(answer == expected for answer, (_, expected) in zip(answers, pairs, strict=True))


@dataclass(frozen=True)
class Outcome:
    """Of one seed: right answers to the held-out questions, and their KL divergence from the full cache, in nats."""

    full: int
    before: int
    after: int
    kl_before: float
    kl_after: float
    seconds: float


def distil(
    model: ckv.Model, method: Any, seed: int, file: Path, *, tokens: int, facts: int, pool: int, **training: Any
) -> Outcome:
    """Train the rows of one chapter and save them to a file, from which the held-out questions are answered."""
    source = chapter(model, tokens, 2 * facts, seed)
    held_out = source.facts[::2]
    pairs = [about(*fact) for fact in held_out]
    prompt, lengths = jnp.asarray([source.ids]), jnp.asarray([len(source.ids)])
    room: Any = {"reserve": ROOM, "step_tokens": ROOM}
    full, _ = ckv.prefill(model.params, model.config, ckv.Full(), prompt, lengths, **room)
    cache, _ = ckv.prefill(model.params, model.config, method, prompt, lengths, **room)
    questions, exam = self_made(model, source, pool, {key for key, _ in held_out}, seed), asked(model, pairs)
    begin = time.perf_counter()
    trained = train(model, method, cache, questions, taught(model, full, questions), seed=seed, **training)
    seconds = time.perf_counter() - begin
    ckv.save_cache(file, trained, model.config, method)
    served = ckv.load_cache(file, model.config, method)

    expected = jnp.asarray(taught(model, full, exam))
    args = jnp.asarray(exam.tokens), jnp.asarray(exam.places)

    def apart(cache: KVCache) -> float:
        found = said(model.params, model.config, method, cache, *args)
        return float(divergence(expected, found, jnp.asarray(exam.learned)))

    counts = (
        right(model, ckv.Full(), full, pairs),
        right(model, method, cache, pairs),
        right(model, method, served, pairs),
    )
    return Outcome(*counts, apart(cache), apart(served), seconds)


def main(
    output: Annotated[Path, typer.Option(help="Folder of the trained caches.")] = Path("runs/cartridge"),
    method: Annotated[
        str, typer.Option(help="The method that the rows come from, until they are trained.")
    ] = "gravitykv",
    ratio: Annotated[float, typer.Option(help="Share of the chapter's rows.")] = 1 / 16,
    seeds: Annotated[str, typer.Option(help="Of chapters and questions, between commas.")] = "0,1,2",
    tokens: Annotated[int, typer.Option(help="Of a chapter.")] = 2048,
    facts: Annotated[int, typer.Option(help="That are asked for; the chapter holds as many others.")] = 16,
    pool: Annotated[int, typer.Option(help="Questions that are made from a chapter.")] = 384,
    steps: Annotated[int, typer.Option(help="Steps of Adam.")] = 200,
    batch: Annotated[int, typer.Option(help="Questions of a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = 3e-2,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Train the compressed rows of chapters, and print how many held-out questions they answer before and after."""
    with one_sentence_errors(debug):
        output.mkdir(parents=True, exist_ok=True)
        model = ckv.load("demo", dtype="float32")
        rows = preset(method, ckv.Budget(ratio=ratio), sinks=4, recent=8)
        chosen = ckv.Composed(rows, ckv.Full())  # answers are short: nothing is compressed while they are written
        losses: list[float] = []

        def show(number: int, value: Array) -> None:
            losses.append(float(value))
            if number % 40 == 0 or number == steps:
                print(f"  step {number:4d}  KL {np.mean(losses[-40:]):.3f} nats", flush=True)

        print("| seed | full cache | rows as they are | trained | KL before | KL after | seconds |")
        print("|---|---|---|---|---|---|---|")
        for seed in map(int, seeds.split(",")):
            sizes = {"tokens": tokens, "facts": facts, "pool": pool}
            rates: Any = {"steps": steps, "batch": batch, "learning_rate": learning_rate}
            x = distil(model, chosen, seed, output / f"seed-{seed}.safetensors", **sizes, **rates, show=show)
            row = [seed, x.full, x.before, x.after, f"{x.kl_before:.2f}", f"{x.kl_after:.2f}", f"{x.seconds:.0f}"]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
