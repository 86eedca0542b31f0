"""KVzip (2505.23416) and KVzip+ (2601.07891): a model repeats its context, and rows are worth what that looks at.

The context is read once, then piece by piece again behind its full cache, each piece after an instruction to repeat it.
Every pass starts at position N again; what it makes of its own tokens is thrown away.

    instruction      the words that ask for it, as ids of a tokenizer
    Repetition       how a method has it done
    prompts          what is fed before each piece
    repeated         the passes, behind keys and values that are there
    reconstruction   reading and passes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.learned.output import projected_norms
from clusterkv_jax.learned.repeated_attention import AttentionView, attend
from clusterkv_jax.models import decoder, prompt_forward
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.runtime.checks import check_array, check_counts, check_ids, check_lengths, concrete
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import constrain, constrain_cache
from clusterkv_jax.text.tokenizer import encode

# Ids that ask for the first piece, for a later one whose beginning follows them, and what stands before the answer.
Instruction = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
# Ids that a chat template puts before a user's message, and behind it.
Frame = tuple[tuple[int, ...], tuple[int, ...]]
# Tokens of the piece before that a later instruction ends with.
TAIL = 8


@dataclass(frozen=True)
class Repetition:
    """`words` as ids, None where a tokenizer is still to give them; `frame` is what a chat template puts before and
    behind a prompt, used where a prompt begins so; the others are arguments of `reconstruction`.
    """

    words: Instruction | None = None
    frame: Frame | None = None
    chunk: int = 2048
    sinks: int = 4
    normalize: bool = False


def instruction(tokenizer: Any) -> Instruction:
    """What asks a model to repeat a text, in KVzip's words; a line break stands before the answer, where no template
    has its own beginning of one.
    """
    texts = (
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with",
        "\n",
    )
    first, later, suffix = (tuple(encode(tokenizer, text)) for text in texts)
    return first, later, suffix


def prompts(words: Instruction, tokens: Int[Array | np.ndarray, "B N"], chunk: int) -> list[Any]:
    """What is fed before each piece of `chunk` tokens: the words, for later pieces with the end of the one before."""
    first, later, suffix = words
    batch, count = tokens.shape

    def wide(ids: tuple[int, ...]) -> Int[Array, "B n"]:
        return jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (batch, len(ids)))

    tails = [tokens[:, max(0, start - TAIL) : start] for start in range(chunk, count, chunk)]
    rest = [jnp.concatenate([wide(later), jnp.asarray(tail, jnp.int32), wide(suffix)], axis=1) for tail in tails]
    return [wide(first + suffix), *rest]


def in_frame(how: Repetition, tokens: Any, lengths: Any) -> tuple[Instruction, int]:
    """The words for these prompts, and how many tokens of a chat template they begin with.

    Prompts that a jit traces count as plain. Raises ValueError if some begin with the template, and others do not.
    """
    assert how.words is not None
    ids, counts = concrete(tokens), concrete(lengths)
    if how.frame is None or ids is None or counts is None:
        return how.words, 0
    prefix, suffix = how.frame
    if ids.shape[1] <= len(prefix):
        return how.words, 0
    begins = (counts > len(prefix)) & (ids[:, : len(prefix)] == np.asarray(prefix)).all(axis=1)
    if not begins.any():
        return how.words, 0
    if not begins.all():
        raise ValueError(
            f"Prompt {int(np.argmin(begins))} does not begin with the model's chat template, and others do: a model "
            "repeats them in different words; ask them one by one."
        )
    return (*how.words[:2], suffix), len(prefix)


def most_fed(how: Repetition, count: int) -> int:
    """The most tokens that a pass over a context of `count` feeds."""
    assert how.words is not None
    first, later, suffix = map(len, how.words)
    suffix = max(suffix, len(how.frame[1]) if how.frame else 0)
    before = first if count <= how.chunk else max(first, later + TAIL)
    return before + suffix + min(how.chunk, count)


@own_settings()
def reconstruction(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B N"],
    *,
    chunk: int = 2048,
    prompts: Sequence[Any],
    sinks: int = 4,
    normalize: bool = False,
    prefix: int = 0,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    call: Callable[..., Any] = lambda program, *args: program(*args),
) -> list[Float[Array, "B K N"]]:
    """The greatest attention that a row gets while the model repeats its piece of the context (KVzip, section 3).

    Pass j feeds `prompts[j]` and then piece j, at positions N and following, behind the full cache. Its softmax is over
    the sinks before the piece, the rows of the piece, and the pass's own tokens; the score is the maximum over all
    tokens that are fed and the query heads of a KV head. One layer at a time is compiled; the passes run one after the
    other.

    Args:
        params: of the model.
        config: of the model.
        tokens: the context, right-padded.
        chunk: tokens of a piece; the last may be short.
        prompts: for each piece all ids fed before it, [n] or a row per sequence [B,n]: the instruction, the tail of the
            piece before, and what a chat template puts before an answer.
        sinks: rows at the start that every later piece's softmax sees too.
        normalize: KVzip+: attention times |W_O^h v| / |h|, h the input of the attention for the token that is fed.
        prefix: tokens at the start, of a chat template, that no piece holds.
        lengths: real tokens of each sequence; N by default.
        call: runs the programs of the passes, one for each layer and one for each piece before them.

    Returns:
        scores of each layer, f32, more is more. The first `sinks` rows get the greatest of all layers and heads of
        their sequence + 1, other rows of the prefix 0, rows beyond `lengths` -inf.

    Raises:
        ValueError: if there are not as many prompts as pieces, or a number is impossible; as far as they are known, for
            ids that are not in the vocabulary and lengths that are not in 1 ... N.
    """
    check_array("tokens", tokens, "B,N", jnp.integer)
    batch, count = tokens.shape
    _check(count, chunk, prompts, sinks, prefix)
    _check_known(tokens, lengths, prompts, config.vocab_size)
    counts = jnp.full(batch, count, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    hidden, counts = prompt_forward.embed(params, config, tokens, counts)
    rows = []
    for layer in params["layers"]:
        hidden, *keys_and_values = prompt_forward.read_layer(layer, config.of_layer(len(rows)), None, hidden)
        rows.append(keys_and_values)
    options = {"chunk": chunk, "prompts": prompts, "sinks": sinks, "normalize": normalize, "prefix": prefix}
    return repeated(params, config, rows, tokens, counts, **options, call=call)


def repeated(
    params: Params,
    config: ModelConfig,
    rows: Sequence[Sequence[Any]],
    tokens: Int[Array, "B N"],
    lengths: Int[Any, " B"],
    *,
    chunk: int,
    prompts: Sequence[Any],
    sinks: int,
    normalize: bool,
    prefix: int = 0,
    call: Callable[..., Any] = lambda program, *args: program(*args),
) -> list[Float[Any, "B K N"]]:
    """`reconstruction` behind the keys and values [B,K,N,D] of each layer, which must be finite beyond `lengths` too.

    `call` runs the programs of which the passes consist.
    """
    count = tokens.shape[1]
    starts = _check(count, chunk, prompts, sinks, prefix)
    pieces = []
    for start, ids in zip(starts, prompts, strict=True):
        size, here = min(chunk, count - start), jnp.int32(start)
        hidden, positions, real = call(_feed, params, config, tokens, jnp.asarray(ids, jnp.int32), lengths, here, size)
        scores = []
        for number, (layer, (keys, values)) in enumerate(zip(params["layers"], rows, strict=True)):
            mine = config.of_layer(number)
            last = number + 1 == len(rows) and mine.window is None
            places = keys, values, here, lengths, size, min(sinks, start), normalize, last
            hidden, score = call(_repeat_layer, layer, mine, hidden, positions, real, *places)
            scores.append(score)
        pieces.append(scores)
    return call(_whole, pieces, lengths, prefix, sinks)


def _check_known(tokens: Any, lengths: Any, prompts: Sequence[Any], vocab_size: int) -> None:
    """Raise ValueError for lengths and ids that cannot be, as far as they are known."""
    numbers = np.full(tokens.shape[0], tokens.shape[1]) if lengths is None else check_lengths(lengths, *tokens.shape)
    if numbers is not None:
        check_ids(tokens, vocab_size, numbers)
    for number, known in enumerate(map(concrete, prompts)):
        if known is not None and known.size and (known.min() < 0 or known.max() >= vocab_size):
            wrong = known[(known < 0) | (known >= vocab_size)][0]
            raise ValueError(f"prompts hold id {wrong} (piece {number}); allowed are 0 to {vocab_size - 1}.")


def _check(count: int, chunk: int, prompts: Sequence[Any], sinks: int, prefix: int) -> range:
    """Where the pieces start. Raises ValueError for what cannot be."""
    check_counts(1, chunk=chunk)
    check_counts(0, sinks=sinks, prefix=prefix)
    if prefix >= count:
        raise ValueError(f"prefix must be smaller than the context of {count} tokens, got {prefix}.")
    starts = range(prefix, count, chunk)
    if len(prompts) != len(starts):
        raise ValueError(
            f"prompts must be {len(starts)}, one for each piece of {chunk} of {count - prefix} tokens, "
            f"got {len(prompts)}."
        )
    return starts


@jit(static_argnames=("config", "size"))
def _feed(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B N"],
    ids: Int[Array, "... n"],
    counts: Int[Array, " B"],
    start: Int[Array, ""],
    size: int,
) -> tuple[Float[Array, "B T M"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Ids and then `size` tokens from `start` on: hidden states, positions, and which of them are real.

    Of a sequence that ends in the piece only its own tokens are fed; of one that ended before, none.
    """
    piece = jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1).astype(jnp.int32)
    before = jnp.broadcast_to(ids, (len(tokens), ids.shape[-1]))
    fed = jnp.concatenate([before, piece], axis=1)
    number = ordinals(fed.shape[1], 2)
    mine = before.shape[1] + jnp.clip(counts - start, 0, size)
    real = (number < mine[:, None]) & (counts > start)[:, None]
    positions = counts[:, None] + number
    hidden = decoder.embed(params, config, jnp.where(real, fed, 0), positions)
    return constrain(hidden, "batch", None, None), positions, real


@jit(static_argnames=("config", "size", "sinks", "normalize", "last"))
def _repeat_layer(
    layer: Params,
    config: ModelConfig,
    hidden: Float[Array, "B n M"],
    positions: Int[Array, "B n"],
    real: Bool[Array, "B n"],
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    start: Int[Array, ""],
    counts: Int[Array, " B"],
    size: int,
    sinks: int,
    normalize: bool,
    last: bool,
) -> tuple[Float[Array, "B n M"] | None, Float[Array, "B K size"]]:
    """One layer of a pass: its hidden states, and the scores of the piece of `size` rows from `start` on.

    Nothing reads the hidden states of the last layer: there the rows of the softmax that is cut out are enough.
    """
    q, k, v, _ = decoder.attention_in(layer, config, hidden, positions)
    rows = keys, values, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    below = jnp.zeros(real.shape, jnp.float32)
    if normalize:
        norm = jnp.linalg.norm(decoder.attention_input(layer, config, hidden).astype(jnp.float32), axis=-1)
        below = jnp.log(jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    # A token that is padding says nothing.
    sight = AttentionView(size, sinks, config.window, config.soft_cap)
    below, sink_logits = jnp.where(real, below, jnp.inf), decoder.sink_logits(layer, config)
    attended, best = attend(q, rows, below, counts, start, sight, sink_logits, last=last)
    if normalize:
        piece = jax.lax.dynamic_slice_in_dim(values, start, size, axis=2)
        best = best + jnp.log(projected_norms(piece, layer["attention"]["o"])).reshape(best.shape)
    score = constrain_cache(jnp.exp(jnp.max(best, axis=2)))
    if attended is None:
        return None, score
    return constrain(decoder.attention_out_and_mlp(layer, config, hidden, attended), "batch", None, None), score


@jit(static_argnames=("prefix", "sinks"))
def _whole(pieces: list[list[Array]], counts: Int[Array, " B"], prefix: int, sinks: int) -> list[Float[Array, "B K N"]]:
    """Scores of each layer from those of its pieces [B,K,size], the sinks above all."""
    unmeasured = jnp.zeros((*pieces[0][0].shape[:2], prefix), jnp.float32)
    scores = [jnp.concatenate([unmeasured, *layer], axis=2) for layer in zip(*pieces, strict=True)]
    row = ordinals(scores[0].shape[2], 3)
    real = row < counts[:, None, None]
    best = jnp.max(jnp.stack([jnp.max(jnp.where(real, x, 0.0), axis=(1, 2)) for x in scores]), axis=0)
    return [jnp.where(real, jnp.where(row < sinks, best[:, None, None] + 1, x), -jnp.inf) for x in scores]
