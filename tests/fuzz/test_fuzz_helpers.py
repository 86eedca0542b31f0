"""The fuzzer's own tools: what they make, and what they refuse."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from tests.fuzz.mutations import mutated
from tests.fuzz.rules import one_sentence

JSON = json.dumps({"a": [1, {"b": "text"}], "c": None, "d": 1.5})
SAMPLES = {
    "json": JSON,
    "jsonl": f"{JSON}\n{JSON}\n",
    "yaml": "a: [1, {b: text}]\nc: null\n",
    "safetensors": save({"x": np.zeros(4, np.float32)}, {"format": "pt"}),
    "bytes": b"\x1f\x8b" + bytes(30),
}


@pytest.mark.parametrize("kind", SAMPLES)
@given(data=st.data())
def test_any_sample_is_mutated(kind, data):
    assert isinstance(data.draw(mutated(SAMPLES[kind], kind)), bytes)


def refuse(text):
    raise ValueError(text)


def test_a_result_or_a_sentence_passes():
    assert one_sentence(lambda: 3) == (3, None)
    assert one_sentence(lambda: refuse("A ratio must be a number, got 'x'."), says=["'x'"])[0] is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: refuse("two lines,\nboth long."), "several lines"),
        (lambda: refuse("got x"), "no sentence"),
        (lambda: refuse("x" * 10_000 + "."), "10001 letters"),
        (lambda: refuse("A sentence."), "'the place' is not in"),
        (lambda: {}["key"], "KeyError instead of a sentence"),
        (lambda: time.sleep(5), "still running after 0.1 s"),
    ],
)
def test_anything_else_fails(call, said):
    with pytest.raises(AssertionError, match=said):
        one_sentence(call, says=["the place"] if "place" in said else (), seconds=0.1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is bounded on Linux alone")
def test_a_gigabyte_is_refused():
    with pytest.raises(AssertionError, match="more than a gigabyte"):
        one_sentence(lambda: np.ones(2**28))
