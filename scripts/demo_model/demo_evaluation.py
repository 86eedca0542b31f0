"""How well the demo model answers, with its full cache and a compressed one, on books and keys it never saw."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import demo_data
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from clusterkv_jax import Budget, CentroidKV, generate
from clusterkv_jax.checkpoints.loading import load
from clusterkv_jax.evaluation.tasks import synthetic
from clusterkv_jax.evaluation.tasks.haystack import Book
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.decoder import forward_hidden, unembed
from clusterkv_jax.models.parameters import Params

LENGTHS = (1024, 4096, 7936)  # the last leaves room for questions and answers in 8,192 positions
REPLY_ROOM = 256
KEPT = (1.0, 0.5, 0.25, 0.125)
AT_ONCE = 16  # contexts that are read and compressed together
SEED = 1_000_000  # far from the seeds of training


def unseen_examples(
    task: str, length: int, cases: int, tokenizer: Tokenizer, books: Sequence[Book]
) -> list[synthetic.Example]:
    """Examples of a task in validation books with held-out keys."""
    count = demo_data.counter(tokenizer)
    examples = []
    for case in range(cases):
        rng = np.random.default_rng([SEED, length, case])
        examples.append(synthetic.generate(task, rng, length, count, books[case % len(books)], split="valid"))
    return examples


def greedy_hits(
    params: Params, config: ModelConfig, tokenizer: Tokenizer, examples: Sequence[synthetic.Example], length: int
) -> list[Bool[np.ndarray, " T"]]:
    """For each example, which tokens of its reply greedy decoding gets right after a right beginning.

    All of them right is the same as: greedy decoding writes exactly this reply and stops.
    """
    end, pad = tokenizer.token_to_id(demo_data.END), tokenizer.token_to_id(demo_data.PAD)
    hits = []
    for example in examples:
        prompt = tokenizer.encode(example.prompt).ids
        reply = [*tokenizer.encode(example.reply, add_special_tokens=False).ids, end]
        ids = [*prompt, *reply]
        if len(ids) > length or len(reply) > REPLY_ROOM:
            raise ValueError(
                f"a case of {len(ids)} tokens with a reply of {len(reply)} exceeds {length} or {REPLY_ROOM}"
            )
        row = np.array([ids + [pad] * (length - len(ids))], np.int32)
        where = len(prompt) - 1 + np.arange(REPLY_ROOM)
        predicted = np.asarray(_predict(params, config, row, np.minimum(where, length - 1).astype(np.int32)))
        hits.append(predicted[: len(reply)] == np.array(reply))
    return hits


@partial(jax.jit, static_argnums=1)
def _predict(params: Params, config: ModelConfig, row: Int[Array, "1 N"], where: Int[Array, " T"]) -> Int[Array, " T"]:
    hidden = forward_hidden(params, config, row)[0, where]
    return jnp.argmax(unembed(params, config, hidden), axis=-1)


def scores(folder: Path, data: Path, cases: int) -> dict[tuple[str, int], tuple[float, float]]:
    """(share of exact replies, share of right reply tokens) of every task and length."""
    model = load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus = demo_data.make_corpus(demo_data.read_texts(data, "valid"), tokenizer)
    longest = model.config.max_positions
    shares = {}
    for length in (n for n in LENGTHS if n + REPLY_ROOM <= longest):
        for task in synthetic.TASKS:
            examples = unseen_examples(task, length - 64, cases, tokenizer, corpus.books)
            hits = greedy_hits(model.params, model.config, tokenizer, examples, length + REPLY_ROOM)
            shares[task, length] = (float(np.mean([h.all() for h in hits])), float(np.concatenate(hits).mean()))
    return shares


def compressed_scores(folder: Path, data: Path, cases: int, length: int = 4096) -> dict[float, float]:
    """Share of exact replies to one of four needles by the share of the cache that CentroidKV keeps.

    The context is compressed before the question is seen.
    """
    model = load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus = demo_data.make_corpus(demo_data.read_texts(data, "valid"), tokenizer)
    examples = unseen_examples(
        "niah_multikey_1", min(length, model.config.max_positions - 96), cases, tokenizer, corpus.books
    )
    questions = [example.question + example.answer_prefix for example in examples]
    shares = {}
    for ratio in KEPT:
        texts: list[str] = []
        for start in range(0, cases, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            contexts = [example.context for example in examples[part]]
            method = CentroidKV(Budget(ratio=ratio))
            texts += generate(model, contexts, method=method, questions=questions[part], max_new_tokens=8).texts
        shares[ratio] = float(np.mean([text == example.reply for text, example in zip(texts, examples, strict=True)]))
    return shares


def run(folder: Path, data: Path, cases: int, console: Console) -> None:
    """Prints the table of `scores`: exact replies, and in brackets right tokens of replies."""
    shares = scores(folder, data, cases)
    lengths = sorted({length for _, length in shares})
    table = Table("task", *(f"{length:,} tokens" for length in lengths), title=f"full cache, {cases} unseen cases each")
    for task in synthetic.TASKS:
        table.add_row(task, *("{:.1%} ({:.1%})".format(*shares[task, length]) for length in lengths))
    console.print(table)
    for ratio, share in compressed_scores(folder, data, cases).items():
        console.print(f"CentroidKV, {ratio:.1%} kept, one of four needles at 4,096 tokens: {share:.1%} exact")
