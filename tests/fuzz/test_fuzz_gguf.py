"""GGUF files that are almost right: a model whose numbers are finite, or one sentence."""

import struct

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.mutations import mutated
from tests.fuzz.rules import one_sentence, read
from tests.support import gguf_writer
from tests.support.checkpoint_files import LLAMA, random_tensors

TOKENS = ["<unk>", "<s>", "</s>", "a", "\u0120", "t", "e", "x", "te", "tex", "text", "\u0120text"]
PUBLISHED = {**LLAMA, "num_hidden_layers": 1, "vocab_size": len(TOKENS), "bos_token_id": 1, "eos_token_id": 2}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 9,
    "tokenizer.ggml.merges": ["t e", "te x", "tex t", "\u0120 text"],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
}
SIZES = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)
ODD = [0, 1, 2, 3, 4, 5, 8, 9, 13, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    written = gguf_writer.write(folder / "m.gguf", PUBLISHED, random_tensors(PUBLISHED), "Q8_0", extra=TOKENIZER)
    assert read(written).tokenizer is not None  # and the libraries are loaded, whose memory is not bounded
    return written


def fields(raw):
    """Places and lengths of everything in a header, one after the other."""
    at, found = 4, []

    def take(size):
        nonlocal at
        found.append((at, size))
        at += size
        return int.from_bytes(raw[at - size : at], "little")

    def text():
        take(take(8))

    def value(kind):
        if kind == 8:
            text()
        elif kind == 9:
            kind, count = take(4), take(8)
            for _ in range(count):
                value(kind)
        else:
            take(SIZES[kind])

    take(4)
    tensors, entries = take(8), take(8)
    for _ in range(entries):
        text()
        value(take(4))
    for _ in range(tensors):
        text()
        for _ in range(take(4)):
            take(8)
        take(4)
        take(8)
    return [place for place in found if place[1]]


@st.composite
def changed(draw, raw):
    """One to three fields of the header with other values, or of other lengths."""
    places = fields(raw)
    drawn = st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True)
    for at, size in sorted(draw(drawn), reverse=True):
        old = raw[at : at + size]
        near = [int.from_bytes(old, "little") + step for step in (-1, 1)] if size <= 8 else []
        numbers = st.sampled_from([number % 256**size for number in [*ODD, *near]]) if size <= 8 else st.nothing()
        others = st.sampled_from([raw[a : a + n] for a, n in places])
        new = draw(
            numbers.map(lambda number, size=size: number.to_bytes(size, "little"))
            | st.binary(min_size=size, max_size=size)
            | others
            | st.sampled_from([struct.pack("<f", x) for x in (0, -1, 1e-40, 1e30, float("nan"), float("inf"))])
        )
        raw = raw[:at] + new + raw[at + size :]
    return raw


@pytest.mark.filterwarnings("ignore")
@given(data=st.data())
def test_gguf_files(file, data):
    whole = file.read_bytes()
    try:
        kind = changed(whole)
        file.write_bytes(data.draw(st.one_of(kind, kind, kind, mutated(whole, "bytes"))))
        model, _ = one_sentence(lambda: read(file))
        if model is not None:
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(model.params))
            assert all(0 <= token < model.config.vocab_size for token in model.config.eos_ids)
    finally:
        file.write_bytes(whole)
