"""Tokenizers of few words, in the shapes that published ones have, and what stands for a model beside them."""

from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Begin and end of texts as in Llama, a system's message, thinking that can be switched off.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<no>{% endif %}{% endif %}"
)
SPECIAL = ("<s>", "<|end|>", "<pad>")


def by_letters(template: str | None = TEMPLATE) -> Any:
    """Every letter below U+0250 is a token; a text begins with <s>."""
    vocabulary = {chr(number): number for number in range(0x250)} | {"<unk>": 0x250}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    names = {"bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


def by_pieces() -> Any:
    """SentencePiece's pieces as in Llama 2: bytes where no piece fits, a first space that its decoder drops."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Paris", "▁a", "b", ".", "the"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def beside(tokenizer: Any, positions: int = 256) -> Any:
    """What is asked of a model when texts become tokens."""
    return SimpleNamespace(tokenizer=tokenizer, name="words", config=SimpleNamespace(max_positions=positions))
