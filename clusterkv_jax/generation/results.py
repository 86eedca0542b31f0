"""What answers are: texts, tokens, and what they took."""

from dataclasses import dataclass, field

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.methods.request import row_bytes
from clusterkv_jax.text.stops import FinishReason
from clusterkv_jax.text.tokenizer import Tokens


@dataclass(frozen=True)
class Stats:
    """What a call of `generate` took. Bytes are those allocated, padding included.

    Attributes:
        ttft_s: seconds from the tokenised prompts to the first token of every sequence: prefill, compression, question;
            without those of `compile_s`. In an engine with those of waiting.
        tpot_s: seconds per decode step after the first token, 0 if there was none; without those of `compile_s`.
        compile_s: seconds within this call that went into tracing and compiling programs not seen before. What ran
            meanwhile is in neither of the other two, so a first call's are a little too small.
        kept_rows: KV pairs held at the end of prefill `[layer][prompt][KV head]`, in layers that see every token; equal
            prompts are read and counted once.
        window_rows: the same of the layers with a window, whose rows no method sees.
        recalled_rows: rows that the last step chose to attend to `[layer][sequence][query head]`, of methods that keep
            more than they attend to; a layer that attends to everything, and any other method, has none.
        union_rows: how many different ones the query heads of a KV head chose together `[layer][sequence][KV head]`.
        cache_bytes: bytes of the compressed caches of all different prompts, with room for a question and its answer,
            and of what the method keeps beside them; in an engine those of a slot. While questions about one prompt are
            answered at once, each has a copy.
        window_bytes: those of them that are in windows.
        host_bytes: those of them in the host store of a method that has one.
        moved_bytes: bytes of the rows moved from there, of questions' and generated tokens; 0 without a host store.
        cluster_hit_rate: share of the clusters recalled in these steps that the device held in whole.
        row_hit_rate: the same of rows, other than sinks and those not clustered yet, which are always on the device.
        full_cache_bytes: bytes of the same prompts' caches, or slot, without compression, windows as windows.
        prompt_tokens: tokens of each prompt.
        question_tokens: tokens of each question.
        new_tokens: tokens generated for each prompt.
        reading_bytes: gated, bytes of the caches while the prompts were read: rows, window and chunk of all layers; 0
            where they were read whole.
        cached_tokens: tokens of each prompt that an engine had read before, as a context's; none of `generate`.
    """

    ttft_s: float
    tpot_s: float
    compile_s: float
    kept_rows: list[list[list[int]]]
    window_rows: list[list[list[int]]]
    recalled_rows: list[list[list[int]]]
    union_rows: list[list[list[int]]]
    cache_bytes: int
    window_bytes: int
    host_bytes: int
    moved_bytes: int
    cluster_hit_rate: float
    row_hit_rate: float
    full_cache_bytes: int
    prompt_tokens: list[int]
    question_tokens: list[int]
    new_tokens: list[int]
    reading_bytes: int = 0
    cached_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a token, and of the most likely ones at its place, by the model's logits."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """Texts without special tokens and without the stop string, the tokens as generated, what it took, and why each
    text ended: "eos" (a token of the model's that ends texts), "stop" (a string or id of yours), "length" (as many
    tokens as were asked for), or "cancelled". An engine tells log probabilities where it is asked.
    """

    texts: list[str]
    tokens: list[Tokens]
    stats: Stats
    finish_reasons: list[FinishReason]
    logprobs: list[list[TokenLogprob]] | None = None


def full_bytes(model: Model, rows: int, sequences: int = 1) -> int:
    """Bytes of a cache without compression that has room for so many rows of each head, windows as windows."""
    config, dtype = model.config, number_dtype(model.params)
    of_layers = rows * len(config.global_layers) + min(rows, config.window or 0) * len(config.sliding_layers)
    return row_bytes(config.head_dim, dtype, dtype) * of_layers * config.num_kv_heads * sequences
