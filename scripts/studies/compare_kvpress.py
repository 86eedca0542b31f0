"""The same model, prompts and budgets through NVIDIA's kvpress (torch) and through this project.

Counts, per method, prompts whose every layer and head keeps the same positions, and prompts with the same answer. Needs
an environment of its own with both: `pip install torch kvpress`, then `pip install -e .`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import demo_chapter
import jax.numpy as jnp
import kvpress  # pyright: ignore[reportMissingImports]
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import LayerCache
from clusterkv_jax.cache.pages import from_pages
from clusterkv_jax.generation.batch import bucket
from clusterkv_jax.presets import completed

DEMO = Path(__file__).parents[2] / "models" / "demo"
NEW_TOKENS = 24
# Two rows compete for the last place, and float32 sums in another order may rank them otherwise.
TIE = 1e-4


@dataclass(frozen=True)
class Pair:
    """A press and the method that does the same; `group` rows are kept or dropped together, and heads of a layer
    `share` its rows. Where scores are ranks, rows that tie may have them the other way round, a `step` apart.
    """

    press: Callable[[float], Any]
    method: Callable[[ckv.Budget], Any]
    group: int = 1
    share: bool = False
    step: float = 0.0


# kvpress compresses prompts only, so what is decoded is appended. KVzip's cut over all layers has no counterpart here,
# so both cut each layer; with LagKV's ranks rows of all partitions tie, so its numbers themselves are compared too.
PAIRS = {
    "SnapKV": Pair(
        lambda drop: kvpress.SnapKVPress(drop, window_size=64, kernel_size=5),
        lambda budget: ckv.SnapKV(budget, 64, 5, "avg", pool_before_group=True),
    ),
    "PyramidKV": Pair(
        lambda drop: kvpress.PyramidKVPress(drop, window_size=64, kernel_size=5, beta=20),
        lambda budget: ckv.PyramidKV(budget, 64, 5, "avg"),
    ),
    "AdaKV": Pair(
        lambda drop: kvpress.AdaKVPress(kvpress.SnapKVPress(drop, window_size=64, kernel_size=5)),
        lambda budget: ckv.AdaKV(budget, 64, 5, "avg", pool_before_group=True),
        share=True,
    ),
    "ChunkKV": Pair(
        lambda drop: kvpress.ChunkKVPress(kvpress.SnapKVPress(drop, window_size=64, kernel_size=5), chunk_length=20),
        lambda budget: ckv.ChunkKV(budget, 64, 20, "kvpress"),
        group=20,
    ),
    "StreamingLLM": Pair(
        lambda drop: kvpress.StreamingLLMPress(drop, n_sink=4),
        lambda budget: ckv.Composed(ckv.StreamingLLM(budget), ckv.Full()),
    ),
    "H2O (ObservedAttention)": Pair(
        lambda drop: kvpress.ObservedAttentionPress(drop),
        lambda budget: ckv.Composed(ckv.H2O(budget, 0, normalize=True), ckv.Full()),
    ),
    "KVzip": Pair(
        lambda drop: kvpress.KVzipPress(drop, layerwise=True, chunk_size=512),
        lambda budget: ckv.KVzip(budget, scope="layer", chunk=512),
        share=True,
    ),
    "KVzip+": Pair(
        lambda drop: kvpress.KVzipPress(drop, layerwise=True, kvzip_plus_normalization=True, chunk_size=512),
        lambda budget: ckv.KVzip(budget, plus=True, scope="layer", chunk=512),
        share=True,
    ),
    "Expected Attention": Pair(
        lambda drop: kvpress.ExpectedAttentionPress(drop), lambda budget: ckv.ExpectedAttention(budget)
    ),
    "AdaKV over Expected Attention": Pair(
        lambda drop: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(drop, epsilon=1e-2)),
        lambda budget: ckv.ExpectedAttention(budget, epsilon=1e-2, scope="layer"),
        share=True,
    ),
    "KeyDiff": Pair(lambda drop: kvpress.KeyDiffPress(drop), lambda budget: ckv.KeyDiff(budget)),
    "LagKV": Pair(lambda drop: kvpress.LagKVPress(drop), lambda budget: ckv.LagKV(budget), step=1 / 128),
    "LagKV (cross_scoring)": Pair(
        lambda drop: kvpress.LagKVPress(drop, cross_scoring=True), lambda budget: ckv.LagKV(budget, cross_scoring=True)
    ),
}


@dataclass
class Run:
    """What one side kept [layer][head] of a prompt, and what it answered; kvpress's scores [layer] where it has any."""

    rows: list[list[set[int]]]
    answer: list[int]
    scores: list[np.ndarray | None]


def prompts(tokenizer: Any, tokens: int, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Contexts with four numbers hidden in them, and a question about one of them.

    They end at a multiple of 64 tokens, where int(K N drop), which kvpress drops of K heads together, is K int(N drop).
    """
    cases = demo_chapter.contexts(tokenizer, tokens, count, seed, questions=1)
    return [
        (
            (ids := tokenizer.encode(example.context))[: len(ids) // 64 * 64],
            tokenizer.encode(example.question + example.answer_prefix, add_special_tokens=False),
        )
        for (example,) in cases
    ]


def with_kvpress(model: Any, press: Any, context: list[int], question: list[int]) -> Run:
    """Prefill the context under the press, feed the question at its true positions, answer greedily."""
    rows, scores, layers = [], [], len(model.model.layers)
    if isinstance(press, kvpress.KVzipPress):
        _observe_kvzip(press, rows, scores)
    else:
        _observe(press, rows, scores)
    cache, total = DynamicCache(), len(context)
    with torch.no_grad():
        with press(model):
            model(torch.tensor([context]), past_key_values=cache)
        answer, position = [], total
        fed = list(question)
        while len(answer) < NEW_TOKENS:
            # One by one: with several, transformers builds one mask, for layers that are all equally long.
            at = torch.tensor([[position]])
            out = model(torch.tensor([[fed.pop(0)]]), past_key_values=cache, position_ids=at, use_cache=True)
            position += 1
            if not fed:
                answer.append(int(out.logits[0, -1].argmax()))
                fed = answer[-1:]
    return Run(rows, answer, scores if len(scores) == layers else [None] * layers)


def _observe(press: Any, rows: list[list[set[int]]], scores: list[np.ndarray | None]) -> None:
    """Write down what the press keeps of each layer, and its scores."""
    compress, scorer = press.compress, getattr(press, "press", press)
    score = scorer.score

    def observed_score(*arguments, **options):
        values = score(*arguments, **options)
        scores.append(values[0].clone().numpy())
        return values

    def observed(module, hidden, keys, values, attentions, options):
        k, v = compress(module, hidden, keys, values, attentions, options)
        masked = getattr(module, "masked_key_indices", None)
        if masked is None:
            rows.append([_rows(full, less) for full, less in zip(keys[0], k[0], strict=True)])
        else:
            rows.append(_unmasked(masked, keys.shape[1], keys.shape[2]))
        return k, v

    press.compress, scorer.score = observed, observed_score


def _observe_kvzip(press: Any, rows: list[list[set[int]]], scores: list[np.ndarray | None]) -> None:
    """The same of KVzip, which cuts all layers at the end."""
    cut = press.compress_post

    def observed(model):
        values = press.score_val[:, 0].clone().numpy()
        cut(model)
        scores.extend(values)
        masks = (layer.self_attn.masked_key_indices for layer in model.model.layers)
        rows.extend(_unmasked(masked, *values.shape[1:]) for masked in masks)

    press.compress_post = observed


def _unmasked(masked: Any, heads: int, tokens: int) -> list[set[int]]:
    """The rows of each head that a press leaves that marks rows instead of dropping them."""
    return [set(range(tokens)) - set(masked[2][masked[1] == head].tolist()) for head in range(heads)]


def _rows(full: Any, less: Any) -> set[int]:
    """Which rows of `full` [N,D] the rows of `less` are."""
    number = {row.tobytes(): i for i, row in enumerate(full.numpy())}
    return {number[row.tobytes()] for row in less.numpy()}


def with_ours(model: ckv.Model, method: Any, context: list[int], question: list[int]) -> Run:
    """The same with this project."""
    width = bucket(len(context), 64)
    tokens = jnp.asarray([context + [0] * (width - len(context))], jnp.int32)
    lengths = jnp.asarray([len(context)])
    # With the room that `generate` gives, so that both use the same programs.
    room = bucket(NEW_TOKENS + len(question), 128)
    method = completed(model, method)
    cache, _ = ckv.prefill(model.params, model.config, method, tokens, lengths, max_new_tokens=NEW_TOKENS, reserve=room)
    rows = [_held(layer) for layer in cache.layers]
    result = ckv.generate(model, [context], questions=[question], method=method, max_new_tokens=NEW_TOKENS)
    return Run(rows, result.tokens[0], [None] * len(rows))


def _held(layer: Any) -> list[set[int]]:
    if isinstance(layer, ckv.PagedHeads):
        layer = from_pages(layer, int(layer.length.max()))
    assert isinstance(layer, LayerCache)
    assert layer.positions is not None
    rows, lengths = np.asarray(layer.positions[0]), np.asarray(layer.length[0])
    return [set(head[:count].tolist()) for head, count in zip(rows, lengths, strict=True)]


def compare(theirs: Run, ours: Run, pair: Pair) -> tuple[int, int, int]:
    """Positions that only one side keeps; those among them that no tie explains; heads compared."""
    different = unexplained = heads = 0
    for a, b, score in zip(theirs.rows, ours.rows, theirs.scores, strict=True):
        for head, (x, y) in enumerate(zip(a, b, strict=True)):
            heads += 1
            different += len(x ^ y)
            if x == y:
                continue
            if score is None or (len(x) != len(y) and not pair.share):
                unexplained += len(x ^ y)
                continue
            group, values = pair.group, _grouped(score, pair.group)[0 if pair.group > 1 else head]
            cut = _cut(score, a) if pair.share else min(values[p // group] for p in x)
            unexplained += sum(abs(values[p // group] - cut) > TIE * abs(cut) + pair.step for p in x ^ y)
    return different, unexplained, heads


def _cut(score: np.ndarray, rows: list[set[int]]) -> float:
    """The score that a row needs where heads share a layer's rows: at least the best of those that went has it."""
    gone = [np.delete(values, sorted(head)) for values, head in zip(score, rows, strict=True)]
    return float(np.concatenate(gone).max())


def _grouped(score: np.ndarray, group: int) -> np.ndarray:
    """Scores [K, N], or those of runs [1, runs]: the mean of their rows, all heads together."""
    if group == 1:
        return score
    total = score.sum(0)
    return np.asarray([[total[i : i + group].mean() for i in range(0, len(total), group)]])


def main(
    count: Annotated[int, typer.Option("--prompts", help="Prompts.")] = 20,
    tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 2048,
    ratio: Annotated[float, typer.Option(help="Share of the cache kept.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Of what is hidden in the prompts.")] = 0,
    model: Annotated[Path, typer.Option(help="Folder of a model.")] = DEMO,
    only: Annotated[list[str], typer.Option(help="A method of the table; again for several. All by default.")] = [],  # noqa: B006
) -> None:
    """Print the table as Markdown; exit code 1 where something differs that no tie explains."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # a model this small is many times slower with more
    ours = replace(ckv.load(model, dtype="float32"), calibration=None)  # equal shares, as kvpress has
    implementation = {"H2O (ObservedAttention)": "eager"}
    cases = prompts(ours.tokenizer, tokens, count, seed)
    lines, equal = [], True
    for name, pair in PAIRS.items():
        if only and name not in only:
            continue
        theirs = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=implementation.get(name, "sdpa")
        )
        # A ratio to keep and one to drop: kvpress takes int(n * (1 - drop)).
        press, method = pair.press(1 - ratio), pair.method(ckv.Budget(ratio=ratio))
        positions, answers, different, unexplained, heads = 0, 0, 0, 0, 0
        for context, question in track(cases, name, transient=True):
            a = with_kvpress(theirs, pair.press(press.compression_ratio), context, question)
            b = with_ours(ours, method, context, question)
            ends = [i for i, token in enumerate(a.answer) if token in ours.config.eos_ids]
            counts = compare(a, b, pair)
            positions += counts[1] == 0
            answers += a.answer[: ends[0] + 1 if ends else NEW_TOKENS] == b.answer
            different, unexplained, heads = different + counts[0], unexplained + counts[1], heads + counts[2]
        equal &= unexplained == 0 and answers == count
        lines.append(f"| {name} | {positions} of {count} | {different} in {heads} heads | {answers} of {count} |")
    console = Console(width=200)
    console.print(f"kvpress {_version('kvpress')}, torch {torch.__version__}, jax {_version('jax')}; {tokens:,} tokens")
    console.print(
        "| method | prompts that keep the same positions | ties | that get the same answer |\n|---|---|---|---|"
    )
    console.print("\n".join(lines), markup=False, highlight=False)
    raise typer.Exit(0 if equal else 1)


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    typer.run(main)
