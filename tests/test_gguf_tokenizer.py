"""The tokenizer in a GGUF file gives the ids of the one that was converted, and its texts."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import clusterkv_jax as ckv
from clusterkv_jax.checkpoints.convert import convert
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.text.chat import turn
from clusterkv_jax.text.gguf_tokenizer import gguf_tokenizer
from tests.fuzz import rules
from tests.support import checkpoint_files, gguf_writer

CORPUS = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines() * 2
SPECIAL, PLAIN = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"], ["<think>"]
TEXTS = (
    "The tests of a room, and an arrow between two.",
    "12345 tests; it's what they'll say: I'M HERE\n\n\n  indented\ttabs   ",
    "<|im_start|>user\nWhat is <think> in `make`?<|im_end|>\n<s>",
    "déjà vu, 北京 and \U0001f600; naïve",
    " leading and  double  blanks",
)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def splits(pre):
    """As the published tokenizers that llama.cpp calls so."""
    if pre in ("smollm", "gpt-2"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        return pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(PATTERN % {"llama-bpe": "{1,3}", "qwen2": ""}[pre]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(pre):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = splits(pre), decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN])
    return tokenizer


def described(tokenizer, **more):
    """What a file says of a tokenizer."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [3 if token in SPECIAL else 4 if token in PLAIN else 1 for token in tokens]
    about = {"tokens": tokens, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 4, "padding_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (about | more).items()}


def merges(tokenizer):

    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_bytes(pre):
    original = byte_level(pre)
    found = gguf_tokenizer(described(original, model="gpt2", pre=pre, merges=merges(original)), "m.gguf")
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False).ids
        assert found.decode(ids) == text
    first = [1] if pre == "llama-bpe" else []
    assert found.encode("tests") == [*first, *original.encode("tests").ids]
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 4, 0)
    assert found.decode([*found.encode("tests"), 4], skip_special_tokens=True) == "tests"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix):
    """Merges follow from scores; what is no token is bytes; a blank begins a text where the file says so."""
    original = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    blanks = [normalizers.Prepend("\u2581")] if prefix else []
    original.normalizer = normalizers.Sequence([*blanks, normalizers.Replace(" ", "\u2581")])
    known = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*SPECIAL, *known], initial_alphabet=["\u2581"])
    original.train_from_iterator([line.split(" ")[0] for line in CORPUS] + " ".join(CORPUS).split(), trainer)
    about = described(
        original, model="llama", scores=[-float(i) for i in range(original.get_vocab_size())], add_space_prefix=prefix
    )
    about["tokenizer.ggml.token_type"] = [2, 3, 3, 3, 3] + [6] * 256 + [1] * (original.get_vocab_size() - 261)
    found = gguf_tokenizer(about | {"tokenizer.ggml.unknown_token_id": 0}, "m.gguf")
    for text in ("Clone the repository and run them in it.", "北京 naïve", "a  b"):
        plain = Tokenizer.from_str(original.to_str())
        assert found.encode(text) == [1, *plain.encode(text, add_special_tokens=False).ids]
        assert found.decode(found.encode(text), skip_special_tokens=True) == text


def test_a_conversation_through_load(tmp_path):
    """The template of the file; a turn's end ends the text, and so does what the file says."""
    original = byte_level("smollm")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    about = described(original, model="gpt2", pre="smollm", merges=merges(original), eos_token_id=2)
    published = {**checkpoint_files.LLAMA, "vocab_size": original.get_vocab_size()}
    extra = about | {"tokenizer.chat_template": template}
    tensors = checkpoint_files.random_tensors(published)
    model = ckv.load(gguf_writer.write(tmp_path / "m.gguf", published, tensors, extra=extra))
    assert turn(model.tokenizer, "Who?") == "<|im_start|>user\nWho?<|im_end|>"
    assert model.config.eos_ids == (2, 4)
    assert model.config.bos_id == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"merges": ["zzz b"]}, "m.gguf makes no tokenizer"),
        ({"merges": None}, "it lacks tokenizer.ggml.merges"),
        ({"tokens": ["a", "a"]}, "a token stands twice"),
        ({"token_type": [1]}, "has 1 tokenizer.ggml.token_type for 701 tokens"),
        ({"eos_token_id": 9999}, "says that token 9999 is its eos token; allowed: 0 to 700"),
        ({"tokens": [1, 2]}, "field 'tokenizer.ggml.tokens"),
    ],
)
def test_a_damaged_one(change, said):
    original = byte_level("gpt-2")
    about = described(original, model="gpt2", pre="gpt-2", merges=merges(original), **{})
    about |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    _, text = rules.one_sentence(lambda: gguf_tokenizer(about, "m.gguf"), says=[said])
    assert text is not None


@pytest.mark.parametrize(("model", "pre"), [("gpt2", "viking"), ("gpt2", None), ("t5", None), ("rwkv", None)])
def test_a_kind_that_is_not_read_is_a_warning(model, pre):
    about = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": pre}
    with pytest.warns(UserWarning, match=r"The tokenizer of m\.gguf is not read, so tokenizer is None: "):
        assert gguf_tokenizer(about, "m.gguf") is None
    assert gguf_tokenizer({}, "m.gguf") is None


def test_what_is_converted_is_the_file(tmp_path):
    """Parameters, configuration and tokenizer, as the file has them; `clusterkv plan` reads the same configuration."""
    original = byte_level("smollm")
    published = {**checkpoint_files.LLAMA, "vocab_size": original.get_vocab_size()}
    about = described(original, model="gpt2", pre="smollm", merges=merges(original))
    extra = about | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    tensors = checkpoint_files.random_tensors(published)
    file = gguf_writer.write(tmp_path / "m.gguf", published, tensors, "Q8_0", extra=extra)
    assert convert(file, tmp_path / "converted", dtype="float32")
    mine, theirs = ckv.load(tmp_path / "converted"), ckv.load(file, weights="dequantised")
    assert checkpoint_files.same(mine.params, theirs.params)
    assert mine.config == theirs.config == model_config(str(file))
    assert mine.config.weights == theirs.config.weights
    for text in TEXTS:
        assert mine.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert mine.tokenizer.chat_template == theirs.tokenizer.chat_template
