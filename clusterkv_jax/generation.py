"""`generate`: from texts to texts. Everything here runs on the host; the programs it calls are in `decoding`."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from clusterkv_jax.cache import KVCache, gather_rows, nbytes, occupancy, slot_bytes
from clusterkv_jax.checkpoints import Model
from clusterkv_jax.decoding import decode_loop, due_jit, feed_jit, prefill, recompress_jit, sample_jit
from clusterkv_jax.errors import is_count, out_of_memory_explained
from clusterkv_jax.host_store import host_bytes, traffic
from clusterkv_jax.methods import Full, Method
from clusterkv_jax.methods.families.recall import recalled_rows
from clusterkv_jax.sampling import Sampling

Tokens = list[int]
Progress = Callable[[str, int, int], None]
OnText = Callable[[int, str], None]

# Tokens per call of the decode loop: between two calls the host looks for stop strings and shows text.
SEGMENT = 32
# Question tokens per call of `extend`.
QUESTION_STEP = 64
# What jax calls lowering and compiling; the tracing before them is reported with what is traced inside counted twice.
COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


@dataclass(frozen=True)
class Stats:
    """What a call of `generate` took. Bytes are those allocated, padding included.

    Attributes:
        ttft_s: seconds from the tokenised prompts to the first token of every row: prefill, compression, question.
        tpot_s: seconds per decode step after the first token, 0 if there was none.
        compile_s: seconds within this call that went into compiling programs not seen before.
        kept_rows: rows held at the end of prefill [layer][prompt][KV head]; equal prompts are read and counted once.
        recalled_rows: rows that the last step chose to attend to [layer][row][query head], of methods that keep more
            than they attend to; a layer that attends to everything, and any other method, has none.
        union_rows: how many different ones the query heads of a KV head chose together [layer][row][KV head].
        cache_bytes: bytes of the compressed cache of the batch, and of what the method keeps beside it.
        host_bytes: those of them in the host store of a method that has one.
        moved_bytes: bytes of the rows moved from there, of questions' and generated tokens; 0 without a host store.
        cluster_hit_rate: share of the clusters recalled in these steps that the device held in whole.
        row_hit_rate: the same of rows, other than sinks and those not clustered yet, which are always on the device.
        full_cache_bytes: bytes of the same batch's cache without compression.
        prompt_tokens: tokens of each prompt.
        question_tokens: tokens of each question.
        new_tokens: tokens generated for each prompt.
    """

    ttft_s: float
    tpot_s: float
    compile_s: float
    kept_rows: list[list[list[int]]]
    recalled_rows: list[list[list[int]]]
    union_rows: list[list[list[int]]]
    cache_bytes: int
    host_bytes: int
    moved_bytes: int
    cluster_hit_rate: float
    row_hit_rate: float
    full_cache_bytes: int
    prompt_tokens: list[int]
    question_tokens: list[int]
    new_tokens: list[int]


@dataclass(frozen=True)
class Result:
    """Texts without special tokens and without the stop string, the tokens as generated, and what it took."""

    texts: list[str]
    tokens: list[Tokens]
    stats: Stats


def generate(
    model: Model,
    prompts: Sequence[str | Tokens],
    *,
    method: Method | None = None,
    questions: Sequence[str | Tokens] | None = None,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    prefill_chunk: int | None = None,
    on_text: OnText | None = None,
    progress: Progress | None = None,
) -> Result:
    """Read long texts, keep a compressed cache of each, and continue them or answer questions about them.

    Args:
        model: from `load`.
        prompts: texts (special tokens are added), or token ids as they are.
        method: what is kept of the prompts; `Full()` by default.
        questions: one per prompt, fed at their true positions after the prompt's cache has been compressed, so that no
            method sees the question before it decides what to keep. Equal prompts are read once.
        max_new_tokens: most tokens generated per prompt.
        sampling: greedy by default.
        seed: of the sampling, and of methods that draw.
        stop: a row ends when its text contains one of these; the text is cut before it.
        prefill_chunk: read the prompt this many tokens at a time within each layer, to bound memory.
        on_text: called as on_text(row, text) with each new piece of text.
        progress: called as progress("prefill", layers done, layers) and progress("decode", steps done, steps).

    Returns:
        texts, tokens and stats, in the order of the prompts.

    Raises:
        ValueError: one sentence that names the value and what is allowed: an empty prompt, ids out of range, more
            tokens than the model has positions, an impossible budget, texts for a model without tokenizer.
        MemoryError: one sentence, if the device's or the host's memory does not suffice.
    """
    method, sampling = method or Full(), sampling or Sampling()
    if not all(map(isinstance, (method, sampling), (Method, Sampling))):
        raise ValueError(
            f"method and sampling must be objects such as Full() and Sampling(), got {method!r} and {sampling!r}."
        )
    texts = _encode(model, prompts, "prompt", special=True)
    asked = None if questions is None else _encode(model, questions, "question", special=False)
    _check_request(model, texts, asked, max_new_tokens, stop, prefill_chunk, streams=on_text is not None)
    doing = f"generating from {len(texts)} x {max(map(len, texts)):,} tokens"
    explained = out_of_memory_explained(doing, uses_host=method.holds == "host")
    with compile_seconds() as compiled, _mesh(model), explained:
        begin = time.perf_counter()
        key = jax.random.key(seed)
        cache, logits, kept, full_bytes = _read(
            model, method, texts, asked, max_new_tokens, prefill_chunk, key, progress
        )
        token = jax.block_until_ready(sample_jit(logits, sampling, key, 0))
        first = time.perf_counter()
        cache_bytes = nbytes(cache)
        cache, made, steps = _decode(
            model, method, cache, token, key, max_new_tokens, sampling, stop, on_text, progress
        )
        end = time.perf_counter()
    recalled, union = recalled_rows(cache)
    stats = Stats(
        ttft_s=first - begin,
        tpot_s=(end - first) / steps if steps else 0.0,
        compile_s=compiled[0],
        kept_rows=kept,
        recalled_rows=recalled,
        union_rows=union,
        cache_bytes=cache_bytes,
        host_bytes=host_bytes(cache),
        **traffic(cache),
        full_cache_bytes=full_bytes,
        prompt_tokens=[len(text) for text in texts],
        question_tokens=[len(question) for question in asked] if asked else [0] * len(texts),
        new_tokens=[len(row) for row in made],
    )
    return Result([_cut(_decode_text(model, row), stop) for row in made], made, stats)


def bucket(tokens: int, least: int) -> int:
    """`tokens` rounded up to one of 4 to 8 sizes per power of two, so that few programs serve all prompts."""
    step = max(least, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


# --- the stages ---


def _check_request(
    model: Model,
    texts: Sequence[Sequence[int]],
    asked: Sequence[Sequence[int]] | None,
    max_new_tokens: int,
    stop: Sequence[str],
    prefill_chunk: int | None,
    *,
    streams: bool,
) -> None:
    """Raise ValueError for what `generate` cannot do with these prompts and questions, as token ids."""
    config = model.config
    if not texts:
        raise ValueError("prompts must hold at least one prompt, got none.")
    if not is_count(max_new_tokens, 1):
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens!r}.")
    if prefill_chunk is not None and not is_count(prefill_chunk, 1):
        raise ValueError(f"prefill_chunk must be a whole number of at least 1 or None, got {prefill_chunk!r}.")
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop must be a list of texts that are not empty, got {stop!r}.")
    if (stop or streams) and model.tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer, so there is no text to stop at or to stream.")
    if asked is not None and len(asked) != len(texts):
        raise ValueError(f"questions must be one per prompt, got {len(asked)} for {len(texts)} prompts.")
    for kind, rows in (("prompt", texts), ("question", asked or [])):
        for i, row in enumerate(rows):
            if not row:
                raise ValueError(f"{kind} {i} is empty; it needs at least one token.")
            if min(row) < 0 or max(row) >= config.vocab_size:
                wrong = next(t for t in row if not 0 <= t < config.vocab_size)
                raise ValueError(f"{kind} {i} holds token id {wrong}; allowed are 0 to {config.vocab_size - 1}.")
    for i, text in enumerate(texts):
        question = len(asked[i]) if asked else 0
        if len(text) + question + max_new_tokens > config.max_positions:
            raise ValueError(
                f"prompt {i} of {len(text)} tokens, its question of {question} and {max_new_tokens} new tokens "
                f"exceed the model's {config.max_positions} positions."
            )


def _read(
    model: Model,
    method: Method,
    texts: list[Tokens],
    asked: list[Tokens] | None,
    max_new_tokens: int,
    prefill_chunk: int | None,
    key: jax.Array,
    progress: Progress | None,
) -> tuple[KVCache, jax.Array, list[list[list[int]]], int]:
    """Prefill each different prompt once, give every question its own copy of the compressed cache, feed it.

    Returns the cache, the logits, the rows kept per layer, prompt and head, and the bytes of an uncompressed cache.
    """
    unique = list(dict.fromkeys(map(tuple, texts)))
    lengths = np.asarray([len(text) for text in unique], np.int32)
    width = min(bucket(int(lengths.max()), 64), model.config.max_positions)
    longest_question = max(map(len, asked)) if asked else 0
    step_tokens = min(QUESTION_STEP, bucket(longest_question, 16)) if asked else 1
    reserve = bucket(max_new_tokens + longest_question, 128)
    layers = model.config.num_layers

    def on_layer(number: int, hidden: jax.Array) -> None:
        if progress is not None:
            jax.block_until_ready(hidden)
            progress("prefill", number + 1, layers)

    cache, logits = prefill(
        model.params,
        model.config,
        method,
        jnp.asarray(_pad(unique, width)),
        jnp.asarray(lengths),
        max_new_tokens=max_new_tokens,
        reserve=reserve,
        step_tokens=step_tokens,
        prefill_chunk=prefill_chunk,
        key=key,
        on_layer=on_layer,
    )
    kept = occupancy(cache)
    if len(unique) != len(texts):
        rows = jnp.asarray([unique.index(tuple(text)) for text in texts])
        cache, logits = gather_rows(cache, rows), logits[rows]
    if asked:
        cache, logits = _ask(model, method, cache, asked, step_tokens)
    full_bytes = slot_bytes(cache) * (width + reserve) * model.config.num_kv_heads * layers * len(texts)
    return cache, logits, kept, full_bytes


def _ask(model: Model, method: Method, cache: KVCache, asked: list[Tokens], step: int) -> tuple[KVCache, jax.Array]:
    """Feed questions of unequal length, `step` tokens at a time; each row's logits are those after its last token."""
    counts = np.asarray([len(question) for question in asked])
    width = -(-int(counts.max()) // step) * step
    tokens = _pad(asked, width)
    logits = None
    for start in range(0, width, step):
        now = np.clip(counts - start, 0, step)
        part = jnp.asarray(tokens[:, start : start + step])
        cache, latest = feed_jit(model.params, model.config, method, cache, part, jnp.asarray(now, jnp.int32))
        # Asked on the host: most questions leave room, and clustering is then not even compiled here.
        if due_jit(method, cache):
            cache = recompress_jit(method, cache)
        logits = latest if logits is None else jnp.where(jnp.asarray(now > 0)[:, None], latest, logits)
    assert logits is not None
    return cache, logits


def _decode(
    model: Model,
    method: Method,
    cache: KVCache,
    token: jax.Array,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    on_text: OnText | None,
    progress: Progress | None,
) -> tuple[KVCache, list[Tokens], int]:
    """Segments of the decode loop until every row has ended or has its tokens.

    Returns the cache as it is then, the tokens and the steps done.
    """
    ends = model.config.eos_ids
    made = [[int(t)] for t in np.asarray(token)]
    shown = ["" for _ in made]
    done = np.asarray([row[-1] in ends for row in made])
    steps = 0
    while True:
        for i, row in enumerate(made):
            done[i] |= _shorten_at_stop(model, row, stop)
            shown[i] = _show(model, i, row, shown[i], stop, bool(done[i]) or steps + 1 == max_new_tokens, on_text)
        if progress is not None:
            progress("decode", max_new_tokens if done.all() else steps + 1, max_new_tokens)
        limit = min(SEGMENT, max_new_tokens - 1 - steps)
        if done.all() or limit == 0:
            return cache, made, steps
        cache, token, _, new, count = decode_loop(
            model.params,
            model.config,
            method,
            cache,
            token,
            jnp.asarray(done),
            key,
            jnp.int32(steps + 1),
            jnp.int32(limit),
            sampling=sampling,
            eos_ids=ends,
            steps=SEGMENT,
        )
        for i, row in enumerate(np.asarray(new)):
            made[i].extend(int(t) for t in row[: int(count)] if t >= 0)
            done[i] |= made[i][-1] in ends
        steps += int(count)


# --- text ---


def _encode(model: Model, texts: Sequence[str | Tokens], kind: str, special: bool) -> list[Tokens]:
    if isinstance(texts, str):
        raise ValueError(f"{kind}s must be a list of texts or of token ids, got one text; put it in a list.")
    encoded = []
    for i, text in enumerate(texts):
        if isinstance(text, str):
            if model.tokenizer is None:
                raise ValueError(f"model {model.name!r} has no tokenizer, so {kind} {i} must be token ids, not text.")
            if not text.strip():
                raise ValueError(f"{kind} {i} is empty; give at least one word.")
            text = model.tokenizer.encode(text, add_special_tokens=special)
        if not all(isinstance(token, int | np.integer) for token in text):
            raise ValueError(f"{kind} {i} must be a text or a list of whole numbers, got {text!r}.")
        encoded.append([int(token) for token in text])
    return encoded


def _decode_text(model: Model, tokens: Tokens) -> str:
    return "" if model.tokenizer is None else model.tokenizer.decode(tokens, skip_special_tokens=True)


def _cut(text: str, stop: Sequence[str]) -> str:
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else text


def _shorten_at_stop(model: Model, row: Tokens, stop: Sequence[str]) -> bool:
    """Drop the tokens after the one that completes a stop string; True if there is one."""
    text = _decode_text(model, row) if stop else ""
    if _cut(text, stop) == text:
        return False
    low, high = 1, len(row)
    while low < high:
        middle = (low + high) // 2
        text = _decode_text(model, row[:middle])
        low, high = (low, middle) if _cut(text, stop) != text else (middle + 1, high)
    del row[low:]
    return True


def _show(
    model: Model, i: int, row: Tokens, shown: str, stop: Sequence[str], last: bool, on_text: OnText | None
) -> str:
    """Hand over what is new of a row's text; what may still change (half a character, half a stop string) waits."""
    if on_text is None:
        return shown
    text = _cut(_decode_text(model, row), stop)
    if not last:
        text = text.rstrip("\ufffd")
        half = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        text = text[: len(text) - half]
    if len(text) > len(shown):
        on_text(i, text[len(shown) :])
        return text
    return shown


# --- small parts ---


def _pad(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    padded = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def _mesh(model: Model) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if model.mesh is None else jax.set_mesh(model.mesh)


@contextlib.contextmanager
def compile_seconds() -> Iterator[list[float]]:
    """A one-entry list that grows by the seconds spent lowering and compiling, but not tracing, inside the block."""
    total = [0.0]

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event in COMPILING:
            total[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield total
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
