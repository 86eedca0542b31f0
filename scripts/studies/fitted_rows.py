"""When do fitted rows help? Needles and plain text, rows of a method as they are and with `Matched` around it.

A context is compressed before anything is known of what follows, which is then appended at once. Plain text: the
cross-entropy of the 128 tokens behind a context of a book, in nats above the full cache. Needles are RULER's, with keys
held out from the demo's training: how often every token of the reply is the likeliest one, as greedy decoding would say
it, in per cent, and the cross-entropy of the reply.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
import yaml
from jaxtyping import Array, Bool, Float, Int

import clusterkv_jax as ckv
from clusterkv_jax.cache import KVCache, NewTokens, groups
from clusterkv_jax.evaluation.tasks import haystack, sources, synthetic
from clusterkv_jax.methods.chassis import step_layer
from clusterkv_jax.models import transformer
from clusterkv_jax.programs import jit

NEXT = 128
CONTEXT = 3900
LENGTHS = (2048, 3072, 3968)


def methods(budget: ckv.Budget) -> dict[str, Any]:
    """Methods that merge, that choose by attention, and that choose by place."""
    return {
        "GravityKV": ckv.GravityKV(budget, sinks=4, recent=8),
        "SnapKV": ckv.SnapKV(budget, window=8),
        "StreamingLLM": ckv.StreamingLLM(budget),
    }


@jit(static_argnames=("config",))
def predictions(
    params: Any, config: Any, cache: KVCache, logits: Float[Array, "B V"], tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Cross-entropy of the tokens that follow the cache, all appended at once, and whether each is the likeliest."""
    positions = cache.position[:, None] + jnp.arange(tokens.shape[1])
    hidden = transformer.embed(params, config, tokens, positions)
    for weights, layer in zip(params["layers"], cache.layers, strict=True):
        new = NewTokens(*transformer.qkv(weights, config, hidden, positions), positions, jnp.ones(tokens.shape, bool))
        attended, _, _ = step_layer(ckv.Full(), layer, (None,) * len(groups(layer)), new)
        hidden = transformer.finish(weights, config, hidden, attended)
    after = transformer.unembed(params, config, hidden)
    before = jnp.concatenate([logits[:, None], after[:, :-1]], axis=1)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(before), tokens[..., None], axis=-1)[..., 0]
    return loss, jnp.argmax(before, axis=-1) == tokens


@dataclass(frozen=True)
class Texts:
    """Contexts, padded on the right, what follows each, and which tokens of that count."""

    contexts: Int[np.ndarray, "B N"]
    lengths: Int[np.ndarray, " B"]
    follow: Int[np.ndarray, "B T"]
    counts: Bool[np.ndarray, "B T"]

    def score(self, model: ckv.Model, method: Any) -> tuple[np.ndarray, np.ndarray]:
        """Of each context: mean cross-entropy of what counts, and whether all of it would have been said."""
        reserve = self.follow.shape[1]
        cache, logits = ckv.prefill(model.params, model.config, method, self.contexts, self.lengths, reserve=reserve)
        loss, said = map(np.asarray, predictions(model.params, model.config, cache, logits, jnp.asarray(self.follow)))
        return (loss * self.counts).sum(1) / self.counts.sum(1), np.all(said | ~self.counts, axis=1)


def plain(first: list[int], book: list[int], passages: int, seed: int) -> Texts:
    """Places of a book behind the tokens that every text begins with, and the tokens behind them."""
    starts = np.random.default_rng(seed).integers(len(book) - max(LENGTHS) - NEXT, size=passages)
    read = np.stack([[*first, *book[start : start + max(LENGTHS) + NEXT]] for start in starts]).astype(np.int32)
    lengths = np.resize(np.asarray(LENGTHS, np.int32) + len(first), passages)
    follow = read[np.arange(passages)[:, None], lengths[:, None] + np.arange(NEXT)]
    return Texts(read[:, : int(lengths.max())], lengths, follow, np.ones(follow.shape, bool))


def needles(task: str, cases: int, encode: Any, hay: haystack.Book, seed: int) -> Texts:
    """Cases of a RULER task; of what follows, the reply counts."""
    count = lambda part: len(encode(part))  # noqa: E731
    rngs = (np.random.default_rng([seed, i]) for i in range(cases))
    examples = [synthetic.generate(task, rng, CONTEXT, count, hay, split="valid") for rng in rngs]
    asked = [encode(example.question + example.answer_prefix) for example in examples]
    said = [encode(example.reply) for example in examples]
    contexts = [encode(example.context, add_special_tokens=True) for example in examples]
    follow = [a + b for a, b in zip(asked, said, strict=True)]
    counts = [[0] * len(a) + [1] * len(b) for a, b in zip(asked, said, strict=True)]
    lengths = np.asarray([len(context) for context in contexts], np.int32)
    return Texts(_padded(contexts), lengths, _padded(follow), _padded(counts).astype(bool))


def _padded(rows: list[list[int]]) -> np.ndarray:
    width = max(map(len, rows))
    return np.asarray([row + [0] * (width - len(row)) for row in rows], np.int32)


def main(
    model: Annotated[str, typer.Option(help="'demo' or a folder.")] = "demo",
    book: Annotated[str | None, typer.Option(help="A .txt or .txt.gz file; the first shipped book by default.")] = None,
    head_shares: Annotated[Path | None, typer.Option(help="A YAML with `head_shares`; equal shares always.")] = None,
    ratio: Annotated[float, typer.Option(help="Share of the rows.")] = 0.125,
    tasks: Annotated[str, typer.Option(help="RULER's, between commas.")] = "niah_multikey_1,niah_multikey_3",
    cases: Annotated[int, typer.Option(help="Of each task.")] = 8,
    passages: Annotated[int, typer.Option(help="Of the book.")] = 12,
    seed: Annotated[int, typer.Option(help="Of places, keys and values.")] = 0,
) -> None:
    """Print a Markdown table, a row as soon as it is known."""
    decoder = ckv.load(model, dtype="float32")
    encode = partial(decoder.tokenizer.encode, add_special_tokens=False)
    hay = haystack.book(next(iter(sources.books(book).values())), lambda texts: [len(encode(part)) for part in texts])
    text = plain(decoder.tokenizer.encode(""), encode(" ".join(hay.sentences)), passages, seed)
    cases_of = {task: needles(task, cases, encode, hay, seed) for task in tasks.split(",") if task}

    def row(name: str, method: Any, base: np.ndarray | None) -> np.ndarray:
        loss = text.score(decoder, method)[0]
        apart = loss if base is None else loss - base
        cells = [f"{apart.mean():+.3f} ± {apart.std(ddof=1) / len(apart) ** 0.5:.3f}"]
        for each in cases_of.values():
            missed, said = each.score(decoder, method)
            cells.append(f"{100 * said.mean():.0f} ({missed.mean():.2f})")
        print("| " + " | ".join([name, *cells]) + " |", flush=True)
        return loss

    print("| method | text | " + " | ".join(cases_of) + " |", "|---" * (len(cases_of) + 2) + "|", sep="\n", flush=True)
    base = row("Full", ckv.Full(), None)
    budgets = {"equal shares": ckv.Budget(ratio=ratio)}
    if head_shares is not None:
        table = yaml.safe_load(head_shares.read_text(encoding="utf-8"))["head_shares"]
        budgets["shares of heads"] = ckv.Budget(ratio=ratio, shares=tuple(tuple(map(float, each)) for each in table))
    for spread, budget in budgets.items():
        for name, method in methods(budget).items():
            row(f"{name}, {spread}", method, base)
            row(f"{name}, {spread}, fitted", ckv.Matched(method), base)


if __name__ == "__main__":
    typer.run(main)
