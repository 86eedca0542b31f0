"""A decoder of each family compiled for a TPU of four chips that is not there."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.families import PUBLISHED
from tests.support.processes import compiled

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra `compile`)"),
]
# The others are compiled with ARGS="-m exhaustive"; Llama's decoder is that of the tests beside this one.
ORDINARY = ["gemma2", "qwen3_moe"]


def compile_all(names: list[str]) -> dict:
    published = {name: PUBLISHED[name] for name in names}
    return compiled(Path(__file__).with_name("tpu_family_programs.py"), json.dumps(published))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ORDINARY, id="ordinary"),
        pytest.param([name for name in PUBLISHED if name not in ORDINARY], id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_steps_change_a_cache_in_place_and_send_none(names):
    programs = compile_all(names)
    assert list(programs) == names
    for name, program in programs.items():
        assert program["alias"] >= program["cache"], name
        assert program["conditionals"] == 1, name
        assert 0 < program["largest collective"] < program["cache"] / 4, name
