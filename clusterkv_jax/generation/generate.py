"""`generate`: from texts to texts. Everything here runs on the host; the programs it calls are in `decoding`.

Profiles show the stages on the host under the names given to them here, those on the device as programs name them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.host_store import traffic
from clusterkv_jax.cache.layers import KVCache, copy_sequences
from clusterkv_jax.checkpoints.loading import Model, check_model
from clusterkv_jax.decoding import SEGMENT, DecodeState, decode_loop
from clusterkv_jax.decoding.appending import append_layerwise
from clusterkv_jax.generation.batch import Batch, Gate, make_batch
from clusterkv_jax.generation.results import Result, Stats, full_bytes
from clusterkv_jax.generation.stages import Progress, decode, loop_numbers, next_token_jit, prefill_batch, read
from clusterkv_jax.methods import Full, Method
from clusterkv_jax.methods.families.recall import recalled_rows
from clusterkv_jax.methods.plan import is_endless, longest_short
from clusterkv_jax.presets import completed, method_for
from clusterkv_jax.runtime.checks import check_flag
from clusterkv_jax.runtime.errors import out_of_memory_explained, shown
from clusterkv_jax.runtime.prng import seed_key, seed_keys, spread
from clusterkv_jax.runtime.programs import Compilation, compilation, compiler
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import on_mesh
from clusterkv_jax.sampling import Sampling, check_seeds
from clusterkv_jax.text.prompts import Text, Texts, listed
from clusterkv_jax.text.stops import OnText, finish_reason, text_of
from clusterkv_jax.text.tokenizer import Tokens


@own_settings()
def generate(
    model: Model,
    prompts: str | Texts,
    *,
    method: Method | str | None = None,
    ratio: float | None = None,
    tokens: int | None = None,
    budget: Budget | None = None,
    question: Text | None = None,
    questions: Texts | None = None,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] = 0,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    chat: bool = False,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens: bool = True,
    reading: str = "whole",
    window: int = Gate.window,
    chunk: int = Gate.chunk,
    renumber: bool = False,
    prefill_chunk: int | None = None,
    keep_short: bool = False,
    on_text: OnText | None = None,
    progress: Progress | None = None,
) -> Result:
    """Read long texts, keep a compressed cache of each, and continue them or answer questions about them.

    Without a question the first token comes from the prompt's own logits, before anything is compressed, as in other
    implementations. Questions and all later tokens see the compressed cache.

    Args:
        model: from `load`.
        prompts: a text or texts (special tokens are added), or token ids as they are, in lists or arrays.
        method: what is kept of the prompts, by a name such as "auto" or as an object; `Full()` by default.
        ratio: the share of the cache that a method of a name keeps.
        tokens: or how many rows.
        budget: or any budget.
        question: asked of every prompt, in place of `questions`.
        questions: one per prompt, fed at their true positions after the prompt's cache has been compressed, so that no
            method sees the question before it decides what to keep. Equal prompts are read once.
        max_new_tokens: most tokens generated per prompt.
        sampling: greedy by default.
        seed: of the sampling: a list of one per prompt, or s for s, s + 1, ..., so that equal prompts differ. A
            sequence's draws depend on its seed and on the number of the token alone. Methods that draw take the first.
        stop: a sequence ends when its text contains one of these, or it is a special token and comes; the text is cut
            before it.
        stop_ids: a sequence ends with one of these tokens, too.
        chat: read a text, and its question a blank line below, as a user's message in the model's chat template.
        system: the system's message before it.
        chat_template_kwargs: further arguments of the template, such as {"enable_thinking": False}.
        special_tokens: whether names of special tokens in texts, such as "<|im_end|>", are those tokens.
        reading: "whole" compresses a prompt after it has been read, "gated" while it is read, so that memory does not
            grow with its length; the method must not need later queries (docs/guides/gated-reading.md).
        window: gated, the newest tokens that stay until the prompt has been read; prompts of no more are read whole.
        chunk: gated, tokens that are read at once, at most `window`.
        renumber: gated, give rows positions one behind the other whenever those of the model end: a prompt may then
            have any length, and distances to older rows are no longer true.
        prefill_chunk: read the prompt this many tokens at a time within each layer, to bound memory.
        keep_short: keep prompts whole that are too short for their budget, which is an error otherwise.
        on_text: called as on_text(sequence, text) with each new piece of text.
        progress: called as progress("prefill", layers done, layers), gated with tokens in their place, and
            progress("decode", steps done, steps).

    Returns:
        texts, tokens and stats, in the order of the prompts.

    Raises:
        ValueError: one sentence that names the value and what is allowed: an empty prompt, ids out of range, more
            tokens than the model has positions, an impossible budget, texts for a model without tokenizer. And one that
            names the first layer where numbers are not finite, if the model's logits are not.
        MemoryError: one sentence, if the device's or the host's memory does not suffice.
    """
    named = method_for(model, method, budget=budget, ratio=ratio, tokens=tokens)
    prompts, questions = _asked(model, prompts, question, questions)
    sampling = Sampling() if sampling is None else sampling
    if not all(map(isinstance, (named, sampling), (Method, Sampling))):
        raise ValueError(
            f"method and sampling must be objects such as Full() and Sampling(), got {shown(named)} and "
            f"{shown(sampling)}."
        )
    batch = make_batch(
        model,
        prompts,
        questions=questions,
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_ids=stop_ids,
        prefill_chunk=prefill_chunk,
        chat=chat,
        system=system,
        chat_template_kwargs=chat_template_kwargs,
        special_tokens=special_tokens,
        reading=reading,
        window=window,
        chunk=chunk,
        renumber=renumber,
        streams=on_text is not None,
        endless=is_endless(named, model.config.max_positions) and not keep_short,
    )
    method = completed(model, named, batch.chat)
    if check_flag(keep_short=keep_short):
        batch = replace(batch, whole=kept_whole(model, method, batch))
    check_seeds(seed, len(batch.texts))
    seeds = spread(seed, len(batch.texts))
    explained = out_of_memory_explained(_doing(batch), uses_host=method.storage == "host")
    with compilation() as compiled, on_mesh(model.mesh, model.config.num_kv_heads), explained:
        begin = time.perf_counter()
        keys = seed_keys(seeds)
        cache, logits, held = read(model, method, batch, seed_key(seeds[0]), progress)
        token = jax.block_until_ready(next_token_jit(logits, sampling, keys, 0))
        first, compiled_first = time.perf_counter(), compiled.seconds
        cache, written, steps = decode(model, method, batch, cache, token, keys, sampling, on_text, progress)
        end = time.perf_counter()
    stats = Stats(
        ttft_s=first - begin - compiled_first,
        tpot_s=(end - first - compiled.seconds + compiled_first) / steps if steps else 0.0,
        compile_s=compiled.seconds,
        **held,
        **_counted(model, batch, cache, written),
    )
    answers = [text_of(model.tokenizer, sequence, batch.stops) for sequence in written]
    ends = model.config.eos_ids, batch.stops
    return Result(answers, written, stats, [finish_reason(model.tokenizer, sequence, *ends) for sequence in written])


@own_settings()
def compile_ahead(
    model: Model,
    prompts: Texts,
    *,
    method: Method | None = None,
    sampling: Sampling | None = None,
    on_program: Callable[[str], None] = lambda name: None,
    keep_short: bool = False,
    **sizes: Any,
) -> Compilation:
    """Compile what `generate` runs for these arguments, so that its times are those of reading and answering.

    Arguments and errors are those of `generate`: `sizes` are those that say what is read, and where an answer ends.
    `on_program` is called with each program's name. A method with a host store is left to compile as it runs.
    """
    endless = is_endless(method or Full(), model.config.max_positions) and not keep_short
    batch = make_batch(model, prompts, **sizes, endless=endless)
    method, sampling = completed(model, method or Full(), batch.chat), sampling or Sampling()
    batch = replace(batch, whole=kept_whole(model, method, batch)) if keep_short else batch
    explained = out_of_memory_explained(_doing(batch), uses_host=method.storage == "host")
    with explained, compilation() as total, on_mesh(model.mesh, model.config.num_kv_heads):
        if method.storage == "host":
            return total
        compile, keys = compiler(on_program), seed_keys([0] * len(batch.texts))
        cache, logits = prefill_batch(model, method, batch, seed_key(0), call=compile)
        if len(batch.unique) != len(batch.texts):
            numbers = jax.ShapeDtypeStruct((len(batch.texts),), jnp.int32)
            cache, logits = compile(copy_sequences, (cache, logits), numbers)
        if batch.questions:
            tokens = jax.ShapeDtypeStruct((len(batch.texts), batch.step_tokens), jnp.int32)
            counts = jax.ShapeDtypeStruct((len(batch.texts),), jnp.int32)
            args = model.params, model.config, method, cache, tokens, counts
            cache, logits, _ = append_layerwise(*args, call=compile)
        token = compile(next_token_jit, logits, sampling, keys, 0)
        if batch.max_new_tokens > 1:
            state = DecodeState(cache, token, jax.eval_shape(jnp.isnan, token))
            args = model.params, model.config, method, state, *loop_numbers(keys, 1, 1)
            compile(decode_loop, *args, sampling=sampling, eos_ids=model.config.eos_ids, steps=SEGMENT)
    return total


def kept_whole(model: Model, method: Method, batch: Batch) -> int:
    """The most tokens of a prompt that is too short for its budget, in a batch like this."""
    counts = {"reserve": batch.reserve, "step_tokens": batch.step_tokens}
    return longest_short(model.config, method, number_dtype(model.params), **counts)


def _asked(
    model: Model, prompts: str | Texts, question: Text | None, questions: Texts | None
) -> tuple[Texts, Texts | None]:
    """Prompts in a list, a text alone too, and a question for each."""
    check_model(model)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if question is None:
        return prompts, questions
    if questions is not None:
        raise ValueError(f"Give question or questions, not both, got {shown(question)} and {shown(questions)}.")
    rows = listed(model, prompts, "prompt")
    return rows, [question] * len(rows)


def _counted(model: Model, batch: Batch, cache: KVCache, written: list[Tokens]) -> dict[str, Any]:
    """What `Stats` says of the answers."""
    recalled, union = recalled_rows(cache)
    return {
        "recalled_rows": recalled,
        "union_rows": union,
        **traffic(cache),
        "full_cache_bytes": full_bytes(model, batch.width + batch.reserve, len(batch.unique)),
        "prompt_tokens": [len(text) for text in batch.texts],
        "question_tokens": [len(question) for question in batch.questions or [[]] * len(batch.texts)],
        "new_tokens": [len(sequence) for sequence in written],
    }


def _doing(batch: Batch) -> str:
    return f"generating from {len(batch.texts)} x {max(map(len, batch.texts)):,} tokens"
