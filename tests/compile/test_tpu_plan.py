"""Plans agree with what the compiler says of the programs themselves: all layers at once, another context."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from clusterkv_jax.planning import arithmetic
from clusterkv_jax.planning.plan_types import Measures
from tests.support.processes import compiled

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra `compile`)"),
]

SMALL = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 2048, "intermediate_size": 4096}
SMALL |= {"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
SMALL |= {"max_position_embeddings": 131072, "torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A plan for a model of six layers from its config.json alone, and what its programs say themselves."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SMALL))
    found = compiled(Path(__file__).with_name("tpu_plan_program.py"), folder, "v5e:2x2", "snapkv", 65536)
    return msgspec.convert(found["plan"], Measures), found["direct"]


def test_a_plan_is_what_the_compiler_says_of_all_layers(small):
    measures, direct = small
    memory = arithmetic.memory(measures)
    assert memory.weights + memory.cache == pytest.approx(direct["arguments"], rel=0.01)
    assert memory.cache == pytest.approx(direct["cache"], rel=0.01)
    assert memory.decode == direct["decode"]
    assert memory.programs > direct["programs"]  # those of prefill are loaded beside it
    assert sum(one.count for one in measures.collectives) == direct["collectives"]


def test_few_layers_say_what_all_would_take(small):
    """Where the compiler refuses all; more than it takes, since the compiler packs more layers better."""
    measures, direct = small
    whole = arithmetic.memory(measures)
    assert direct["decode by few layers"] == pytest.approx(direct["decode"], abs=0.01 * whole.total)
    assert direct["collectives by few layers"] == direct["collectives"]


def test_a_plan_that_leaves_out_a_group_is_wrong(small):
    """Each group is larger than what plan and compiler may differ by."""
    measures, direct = small
    memory = arithmetic.memory(measures)
    whole = direct["arguments"] + memory.programs + max(memory.prefill, direct["decode"])
    assert memory.total == pytest.approx(whole, rel=0.01)
    for group in ("weights", "cache", "programs", "prefill"):
        assert replace(memory, **{group: 0.0}).total != pytest.approx(whole, rel=0.01), group


def test_temporaries_of_another_context_follow_the_line(small):
    """Roughly: a compiler that packs them does not."""
    measures, direct = small
    longer = arithmetic.memory(measures, context=1.5 * measures.context).prefill
    assert longer == pytest.approx(direct["prefill of a longer context"], rel=0.2)
