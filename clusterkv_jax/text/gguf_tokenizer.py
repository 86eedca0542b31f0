"""The tokenizer and chat template that a GGUF file holds, as transformers has them.

Byte-level BPE splits a text by a pattern that the file names (`tokenizer.ggml.pre`); sentencepiece's BPE does not, and
its merges follow from the scores of its tokens.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from clusterkv_jax.storage.schema import checked, shown
from clusterkv_jax.text.guard import advice_silenced, panics_caught

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_WORD = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = rf"{_CONTRACTIONS}|{_NO_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_NO_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_GPT4O = (
    rf"{_NO_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_NO_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_TEKKEN = rf"{_NO_WORD}{_UPPER}*{_LOWER}+|{_NO_WORD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
# What tokenizer.ggml.pre may name: a pattern; GPT-2's own; or that with every digit alone.
_PATTERNS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "tekken"), _GPT4O),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "granite-docling"), "whole numbers"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "digits"),
}
# Those whose merges are not asked for a text that is a token.
_TOKENS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
_BEGIN_FIRST = _TOKENS_FIRST
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Letters of a token; pairs of tokens that make up one, on average.
_LONGEST, _PAIRS = 2**8, 16
_SPACE = "\u2581"


class _Tokenizer(
    Struct, rename=lambda name: f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
):
    """What is read of it."""

    model: str | None = None
    pre: str | None = None
    tokens: list[str] = []
    scores: list[float] | None = None
    token_type: list[int] | None = None
    merges: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unknown_token_id: int | None = None
    padding_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool = False
    add_space_prefix: bool = True
    chat_template: str | None = None


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> Any:
    """The tokenizer of a file with these metadata, which errors call `where`; None where it holds none.

    Of a kind that is not read it warns, and gives None: a model serves token ids without one.

    Raises ValueError, in one sentence, for one that is damaged.
    """
    stated = checked(dict(metadata), _Tokenizer, where)
    if stated.model is None:
        return None
    kind = stated.model if stated.model != "gpt2" else f"gpt2 with the splits of {stated.pre!r}"
    if stated.model not in ("gpt2", "llama") or (stated.model == "gpt2" and stated.pre not in _PATTERNS):
        warnings.warn(f"The tokenizer of {where} is not read, so tokenizer is None: {shown(kind)}.", stacklevel=3)
        return None
    _check(stated, where)
    try:
        with panics_caught():
            return _built(stated, str(metadata.get("general.architecture")))
    except Exception as error:  # the library raises whatever it meets
        raise ValueError(f"{where} makes no tokenizer: {shown(error)}.") from error


def _check(stated: _Tokenizer, where: str) -> None:
    count = len(stated.tokens)
    if len(set(stated.tokens)) != count:
        raise ValueError(f"{where} makes no tokenizer: a token stands twice.")
    for name in ("scores", "token_type"):
        numbers = getattr(stated, name)
        if numbers is not None and len(numbers) != count:
            raise ValueError(f"{where} has {len(numbers)} tokenizer.ggml.{name} for {count} tokens.")
    for name in ("bos", "eos", "unknown", "padding"):
        token = getattr(stated, f"{name}_token_id")
        if token is not None and not 0 <= token < count:
            raise ValueError(f"{where} says that token {token} is its {name} token; allowed: 0 to {count - 1}.")
    needed = "merges" if stated.model == "gpt2" else "scores"
    if getattr(stated, needed) is None:
        raise ValueError(f"{where} makes no tokenizer: it lacks tokenizer.ggml.{needed}.")


def _built(stated: _Tokenizer, architecture: str) -> Any:
    from tokenizers import AddedToken, processors

    with advice_silenced():
        from transformers import PreTrainedTokenizerFast

    tokenizer = _byte_level(stated) if stated.model == "gpt2" else _sentencepiece(stated, architecture)
    kinds = stated.token_type or [1] * len(stated.tokens)
    for special, wanted in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
        found = [token for token, kind in zip(stated.tokens, kinds, strict=True) if kind in wanted]
        added = [AddedToken(token, normalized=False, special=special) for token in found]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    def named(number: int | None) -> str | None:
        return None if number is None else stated.tokens[number]

    bos, eos = named(stated.bos_token_id), named(stated.eos_token_id)
    begins = stated.add_bos_token
    if begins is None:
        begins = stated.model == "llama" or stated.pre in _BEGIN_FIRST
    around = [
        [(token, number)] if wanted and token is not None else []
        for token, number, wanted in (
            (bos, stated.bos_token_id, begins),
            (eos, stated.eos_token_id, stated.add_eos_token),
        )
    ]
    if any(around):
        first, last = ([token for token, _ in part] for part in around)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *[f"{token}:1" for token in first], "$B:1", *[f"{token}:1" for token in last]],
            special_tokens=list(dict.fromkeys(around[0] + around[1])),
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token=named(stated.unknown_token_id),
        pad_token=named(stated.padding_token_id),
        chat_template=stated.chat_template,
        clean_up_tokenization_spaces=False,
    )


def _byte_level(stated: _Tokenizer) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(stated.tokens)}
    merges = [_pair(merge) for merge in stated.merges or ()]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=stated.pre in _TOKENS_FIRST))
    pattern = _PATTERNS[stated.pre or ""]
    if pattern in ("digits", "whole numbers"):
        first = [pre_tokenizers.Digits(individual_digits=True)] if pattern == "digits" else []
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        first = [pre_tokenizers.Split(Regex(pattern), "isolated")]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    if pattern == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(stated: _Tokenizer, architecture: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: number for number, token in enumerate(stated.tokens)}
    # Gemma's scores do not follow the order of its merges, which is that of its tokens.
    in_order = architecture in ("gemma2", "gemma3")
    scores = [-float(number) for number in range(len(vocabulary))] if in_order else stated.scores or []
    unknown = None if stated.unknown_token_id is None else stated.tokens[stated.unknown_token_id]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, _merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend(_SPACE)] if stated.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make up another, that of the highest score first."""
    found = []
    for token, number in vocabulary.items():
        if len(token) > _LONGEST:
            raise ValueError(f"A token of {len(token)} letters is longer than {_LONGEST}.")
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(vocabulary[a], vocabulary[b], a, b) for a, b in cuts if a in vocabulary and b in vocabulary]
        found += [(-scores[number], *pair) for pair in sorted(pairs)]
        if len(found) > _PAIRS * (len(vocabulary) + _LONGEST):
            raise ValueError(f"Its tokens are made up of others in more than {_PAIRS} ways each.")
    return [(a, b) for _, _, _, a, b in sorted(found, key=lambda pair: pair[0])]
