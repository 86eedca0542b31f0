"""The demo model's tokenizer and training rows: public-domain prose, copying, and questions about long texts.

A row is a pure function of (recipe seed, step, row), so that a resumed run sees the same data as an unbroken one.
"""

import gzip
import json
import multiprocessing
import pickle
import re
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt8, UInt16
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from clusterkv_jax.evaluation.tasks import synthetic
from clusterkv_jax.evaluation.tasks.haystack import Book, TokenCounter, book
from clusterkv_jax.evaluation.tasks.synthetic import Example, Needles

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
# Llama-3's split: digits in groups of one to three from the left, so that a 7-digit number is three tokens.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Enough that about half of the list's words become single tokens: the model must see keys of few and of many tokens.
KEYS_PER_BOOK = 1500
ANSWER_WEIGHT = 10
KIND_TOKENS = {"numbers": 5, "words": 6, "uuids": 26}  # about the most that a key or value of a kind takes
# Shares of the kinds of documents. Plain facts (numbers in books) are most: they keep the keys of facts apart, and the
# few others are what retrieval emerges from early.
MIXTURE = {"prose": 0.27, "copy": 0.08, "facts": 0.47, "needles": 0.10, "vt": 0.04, "cwe": 0.02, "fwe": 0.02}


@dataclass(frozen=True)
class Corpus:
    """What rows are made from: a tokenizer, books as sentences, all prose as one token stream, and words for keys."""

    tokenizer: Tokenizer
    books: tuple[Book, ...]
    prose: UInt16[np.ndarray, " N"]
    words: tuple[str, ...]


# --- tokenizer ---


def train_tokenizer(texts: Sequence[str], vocab_size: int, seed: int = 0) -> Tokenizer:
    """Byte-level BPE on prose and on the tasks' keys and numbers; every number of up to three digits is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = np.random.default_rng(seed)
    keys = (" " + synthetic.random_value(rng, "words", "train") for _ in range(len(texts) * KEYS_PER_BOOK))
    digits = "\n".join([f"{i:03d}" for i in range(1000)] + [f"{i:02d}" for i in range(100)]) + "\n"
    tokenizer.train_from_iterator([*map(unwrap, texts), *keys, *[digits] * (20 * len(texts))], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {f"{name}_token_id": tokenizer.token_to_id(config[f"{name}_token"]) for name in ("bos", "eos", "pad")}
    (folder / "generation_config.json").write_text(json.dumps({**ids, "do_sample": False}, indent=2) + "\n")


def counter(tokenizer: Tokenizer) -> TokenCounter:
    """Tokens of a text without special tokens; short texts (sentences come back often) are remembered."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    remembered = lru_cache(maxsize=2**18)(count)
    return lambda text: remembered(text) if len(text) < 1000 else count(text)


# --- corpus ---


def read_texts(folder: Path, split: str = "train") -> list[str]:
    """The books of gutenberg_{split}.jsonl.gz in `folder` or in its subfolder `corpus`.

    Raises FileNotFoundError that says where such a file was looked for.
    """
    name = f"gutenberg_{split}.jsonl.gz"
    path = next((p for p in (folder / name, folder / "corpus" / name) if p.exists()), None)
    if path is None:
        raise FileNotFoundError(f"no {name} in {folder} or {folder / 'corpus'}: name the data folder with --data")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def unwrap(text: str) -> str:
    """Joins hard-wrapped lines; blank lines still separate paragraphs."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def make_corpus(texts: Sequence[str], tokenizer: Tokenizer) -> Corpus:
    """Tokenises every book once; every fourth keeps its hard line breaks, because readers' files have them too."""

    def as_book(text: str) -> Book:
        return book(
            text, lambda sentences: [len(e) for e in tokenizer.encode_batch_fast(sentences, add_special_tokens=False)]
        )

    shaped = [text if i % 4 == 3 else unwrap(text) for i, text in enumerate(texts)]
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(shaped, add_special_tokens=False)]
    listed = sorted({word for text in texts for word in re.findall(r"\b[a-z]{3,10}\b", text[:200_000])})
    return Corpus(tokenizer, tuple(map(as_book, texts)), np.concatenate(ids).astype(np.uint16), tuple(listed))


def save_corpus(corpus: Corpus, path: Path) -> None:
    """One file for the worker processes."""
    parts = (corpus.tokenizer.to_str(), corpus.books, corpus.prose, corpus.words)
    path.write_bytes(pickle.dumps(parts, protocol=5))


def load_corpus(path: Path) -> Corpus:
    """What `save_corpus` wrote; only ever a file of one's own run."""
    tokenizer, books, prose, listed = pickle.loads(path.read_bytes())
    return Corpus(Tokenizer.from_str(tokenizer), books, prose, listed)


# --- rows ---

Row = tuple[UInt16[np.ndarray, " N"], UInt8[np.ndarray, " N"]]


def make_row(corpus: Corpus, count: TokenCounter, length: int, seed: Sequence[int]) -> Row:
    """One document of at most `length` tokens of one kind of the mixture, beginning with <|begin|> and padded, and the
    tokens' loss weights (0: padding or noise, 1: text, ANSWER_WEIGHT: answers).
    """
    rng = np.random.default_rng(list(seed))
    kind = str(rng.choice(list(MIXTURE), p=list(MIXTURE.values())))
    if kind == "copy":
        ids, weights = _copies(rng, corpus, length - 1)
    elif kind == "prose" or (quiz := _quiz(rng, corpus, count, length - 1, kind)) is None:
        ids, weights = _slice(rng, corpus.prose, length - 1), np.ones(length - 1, np.uint8)
    else:
        ids, weights = quiz
    begin = np.array([corpus.tokenizer.token_to_id(BEGIN)], np.uint16)
    padding = np.full(length - 1 - len(ids), corpus.tokenizer.token_to_id(PAD), np.uint16)
    tokens = np.concatenate([begin, ids, padding])
    return tokens, np.concatenate([np.zeros(1, np.uint8), weights, np.zeros(len(padding), np.uint8)])


def _slice(rng: np.random.Generator, stream: np.ndarray, length: int) -> np.ndarray:
    start = int(rng.integers(len(stream) - length + 1))
    return stream[start : start + length]


def _copies(rng: np.random.Generator, corpus: Corpus, length: int) -> Row:
    """Pieces of prose or of random tokens, each repeated; only what can be known from before is learned."""
    ids, weights = np.zeros(0, np.uint16), np.zeros(0, np.uint8)
    vocab = corpus.tokenizer.get_vocab_size()
    while len(ids) < length:
        size, times = int(rng.integers(4, max(5, min(length // 3, 400)))), int(rng.integers(2, 4))
        prose = rng.random() < 0.5
        piece = _slice(rng, corpus.prose, size) if prose else rng.integers(3, vocab, size).astype(np.uint16)
        first = np.full(size, 1 if prose else 0, np.uint8)
        again = np.ones(size * (times - 1), np.uint8)
        again[::size] = 0
        ids, weights = np.concatenate([ids, np.tile(piece, times)]), np.concatenate([weights, first, again])
    return ids[:length], weights[:length]


def _quiz(rng: np.random.Generator, corpus: Corpus, count: TokenCounter, length: int, kind: str) -> Row | None:
    """A text and as many of its questions as fit, each reply closed by <|end|>; prose is learned too, noise is not.

    None where the drawn task does not fit into `length`, which happens at the shortest lengths only.
    """
    try:
        examples, learned = _MAKERS[kind](rng, corpus, count, length)
    except ValueError:
        return None
    return _answered(rng, corpus.tokenizer, examples, learned, length)


Quiz = tuple[Sequence[Example], bool]  # examples of one context, and whether the context is prose to be learned


def _tracking_examples(rng: np.random.Generator, corpus: Corpus, count: TokenCounter, length: int) -> Quiz:
    chains, hops = int(rng.integers(1, 2 + min(6, length // 400))), int(rng.integers(1, 5))
    return synthetic.variable_tracking(rng, length - 90 * chains, count, chains=chains, hops=hops), False


def _common_examples(rng: np.random.Generator, corpus: Corpus, count: TokenCounter, length: int) -> Quiz:
    seldom = int(rng.integers(1, 4)) if length > 600 else 1
    often = min(seldom * int(rng.integers(4, 11)), max(2 * seldom, length // 80))
    common = min(10, length // 60)
    return (synthetic.common_words(rng, length - 110, count, often=often, seldom=seldom, common=common),), False


def _frequent_examples(rng: np.random.Generator, corpus: Corpus, count: TokenCounter, length: int) -> Quiz:
    alpha = 2.0 if rng.random() < 0.6 else float(rng.uniform(1.5, 3.0))
    return (synthetic.frequent_words(rng, length - 100, count, alpha=alpha),), False


def _plain_facts(rng: np.random.Generator, corpus: Corpus, count: TokenCounter, length: int) -> Quiz:
    """One to eight 7-digit numbers in a book, one for each key."""
    keys = int(rng.integers(1, 1 + max(1, min(8, length // 120))))
    return _needle_quiz(rng, corpus, count, length, Needles(keys=keys, intro=bool(rng.random() < 0.85)))


def _needle_examples(rng: np.random.Generator, corpus: Corpus, count: TokenCounter, length: int) -> Quiz:
    """Needle tasks over all of RULER's axes."""
    haystack = str(rng.choice(["book", "noise", "needles"], p=[0.6, 0.2, 0.2]))
    key_kind = str(rng.choice(["words", "uuids"], p=[0.85, 0.15]))
    value_kind = str(rng.choice(list(synthetic.KINDS), p=[0.4, 0.3, 0.3]))
    values = 1 if rng.random() < 0.7 or length < 1000 else int(rng.integers(2, 5))
    most = max(1, length // (4 * values * (15 + KIND_TOKENS[key_kind] + KIND_TOKENS[value_kind])))
    keys = int(rng.integers(1, 1 + min(most, 8 if values == 1 else 3)))
    queries = 1 if values > 1 or rng.random() < 0.6 else int(rng.integers(1, 1 + min(keys, 4)))
    intro = bool(rng.random() < 0.85)
    spec = Needles(haystack, key_kind, value_kind, keys, values, queries, intro)  # pyright: ignore
    return _needle_quiz(rng, corpus, count, length, spec)


def _needle_quiz(rng: np.random.Generator, corpus: Corpus, count: TokenCounter, length: int, spec: Needles) -> Quiz:
    """A context with as many questions as fit into half of it; two fifths of the keys are any words of the books."""
    key, value = KIND_TOKENS[spec.key_kind], KIND_TOKENS[spec.value_kind]
    each = 28 + 2 * spec.queries * (key + 1) + spec.queries * spec.values * (value + 3)
    questions = max(1, min(spec.keys // spec.queries, length // 2 // each))
    own = spec.key_kind == "words" and rng.random() < 0.4
    names = [_any_key(rng, corpus.words) for _ in range(spec.keys)] if own else ()
    source = corpus.books[int(rng.integers(len(corpus.books)))]
    room = length - each * questions
    examples = synthetic.niah(rng, room, count, spec, source, questions=questions, split="train", keys=names)
    return examples, spec.haystack == "book"


_MAKERS = {
    "facts": _plain_facts,
    "needles": _needle_examples,
    "vt": _tracking_examples,
    "cwe": _common_examples,
    "fwe": _frequent_examples,
}


def _any_key(rng: np.random.Generator, listed: Sequence[str]) -> str:
    first, second = (listed[int(i)] for i in rng.integers(len(listed), size=2))
    return first if rng.random() < 0.15 else f"{first}-{second}"


def _answered(
    rng: np.random.Generator, tokenizer: Tokenizer, examples: Sequence[Example], learned: bool, length: int
) -> Row:
    context, joint = _typeset(rng, examples[0].context, prose=learned)
    ids = tokenizer.encode(context, add_special_tokens=False).ids
    weights = [int(learned)] * len(ids)
    for number, example in enumerate(examples):
        question = (joint if number == 0 else "") + example.question
        parts = [(question, 0), (example.answer_prefix, 1), (example.reply + END, ANSWER_WEIGHT)]
        encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text, _ in parts]
        if len(ids) + sum(map(len, encoded)) > length:
            break
        for (_, weight), piece in zip(parts, encoded, strict=True):
            ids += piece
            weights += [weight] * len(piece)
    return np.array(ids[:length], np.uint16), np.array(weights[:length], np.uint8)


def _typeset(rng: np.random.Generator, context: str, prose: bool) -> tuple[str, str]:
    """The context and what joins it to the question: mostly as the suites write it, sometimes as people do."""
    if prose and rng.random() < 0.25:
        context = re.sub(r"(?<=[.!?]) ", lambda _: "\n\n" if rng.random() < 0.2 else " ", context)
    elif prose and rng.random() < 0.15:
        context = textwrap.fill(context, 72, break_long_words=False, break_on_hyphens=False) + "\n"
    if rng.random() < 0.7:
        return context, ""
    return context.rstrip(), ("\n\n", " ", "\n", "")[int(rng.integers(4))]


# --- batches ---

Batch = tuple[UInt16[np.ndarray, "B N"], UInt8[np.ndarray, "B N"]]


def make_batch(corpus: Corpus, count: TokenCounter, length: int, rows: int, seed: int, step: int) -> Batch:
    """`rows` rows of `length` tokens for one step."""
    batch = [make_row(corpus, count, length, (seed, step, row)) for row in range(rows)]
    return np.stack([tokens for tokens, _ in batch]), np.stack([weights for _, weights in batch])


def batches(
    path: Path, shapes: Sequence[tuple[int, int]], seed: int, start: int, workers: int, ahead: int = 48
) -> Iterator[Batch]:
    """Batches of steps start, start + 1, ...; `shapes[step]` is (rows, length); 0 workers: made in this process."""
    steps = range(start, len(shapes))
    if workers == 0:
        corpus = load_corpus(path)
        count = counter(corpus.tokenizer)
        for step in steps:
            yield make_batch(corpus, count, shapes[step][1], shapes[step][0], seed, step)
        return
    # Spawned, not forked: the parent holds threads of the accelerator's runtime.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_prepare_worker, initargs=(path,)) as pool:
        pending = [pool.submit(_worker_batch, *shapes[step], seed, step) for step in steps[:ahead]]
        try:
            for step in steps:
                batch = pending.pop(0).result()
                if step + ahead < len(shapes):
                    pending.append(pool.submit(_worker_batch, *shapes[step + ahead], seed, step + ahead))
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_WORKER: list = []


def _prepare_worker(path: Path) -> None:
    corpus = load_corpus(path)
    _WORKER[:] = [corpus, counter(corpus.tokenizer)]


def _worker_batch(rows: int, length: int, seed: int, step: int) -> Batch:
    corpus, count = _WORKER
    return make_batch(corpus, count, length, rows, seed, step)
