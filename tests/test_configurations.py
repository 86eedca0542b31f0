"""Published configurations beside transformers' classes: every field is declared, and what a file leaves out is theirs.

`tests/parity/test_configurations.py` compares the logits.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from clusterkv_jax.blocks.mlp import ACTIVATIONS
from clusterkv_jax.models import registry
from clusterkv_jax.models.config import Llama3Scaling, LongScaling, ModelConfig, Rope, YarnScaling, limited
from clusterkv_jax.models.hf_config import end_ids
from tests.fuzz.rules import bounded
from tests.support.families import WRAPPERS

CLASSES = {name: CONFIG_MAPPING[name] for name in registry.FAMILIES if name in CONFIG_MAPPING}
OF_TEXTS = sorted(CLASSES.keys() - WRAPPERS.keys())
SMALL = {"vocab_size": 173, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6} | {
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "ffn_dim": 72,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
# What a file must say, since the model that its class means otherwise is not read.
SAID: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "layer_types": ["attention"] * 2,
        "num_hidden_layers": 2,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "glm4_moe": {"head_dim": 128},
}


def config(family: str, **changes: Any) -> ModelConfig:
    return registry.from_hf({**SMALL, "eos_token_id": None, "model_type": family, **SAID.get(family, {}), **changes})


def refusal(family: str, **changes: Any) -> str:
    with pytest.raises(ValueError, match=r"^[A-Zc].*\.$") as error:
        config(family, **changes)
    return str(error.value)


# --- every field ---


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_of_a_class_is_declared(family):
    file, theirs = registry.FAMILIES[family].file, {field.name for field in dataclasses.fields(CLASSES[family])}
    read = {*file.__struct_fields__, *file.assumed}
    assert not theirs - read - file.without_effect, f"{family}: declare these fields in clusterkv_jax/models"
    assert not read & file.without_effect


@pytest.mark.parametrize("family", OF_TEXTS)
def test_what_a_file_leaves_out_is_what_the_class_says(family):
    """Of the fewest fields that a file must hold; to add a default changes nothing."""
    needed = {field.name for field in msgspec.structs.fields(registry.FAMILIES[family].file) if field.required}
    defaults = {field.name: field.default for field in dataclasses.fields(CLASSES[family])}
    fewest = {
        "model_type": family,
        **{name: defaults[name] for name in needed - {"model_type"}},
        **SAID.get(family, {}),
    }
    for name, value in defaults.items():
        if value is not None and name not in fewest:
            assert registry.from_hf({**fewest, name: value}) == registry.from_hf(fewest), name


@pytest.mark.parametrize("family", OF_TEXTS)
@pytest.mark.parametrize(
    ("field", "value"),
    [("is_causal", False), ("is_causal", None), ("is_encoder_decoder", True), ("per_layer_config", {"0": {}})],
)
def test_what_no_decoder_follows_is_refused_by_name(family, field, value):
    assert f"{field} = {value!r}, which is not supported; allowed: " in refusal(family, **{field: value})


@pytest.mark.parametrize(
    "family", [name for name in OF_TEXTS if name not in ("glm", "glm4", "glm4_moe", "phi3", "opt")]
)
def test_families_that_rotate_whole_heads(family):
    """transformers would pass the part over, or rotate it, by the type of the scaling."""
    message = "config.json sets partial_rotary_factor = 0.5, which is not supported; allowed: 1.0."
    assert refusal(family, partial_rotary_factor=0.5) == message
    inside = {"rope_type": "default", "partial_rotary_factor": 0.5}
    assert refusal(family, rope_scaling=inside) == message
    assert config(family, partial_rotary_factor=1.0) == config(family)


@pytest.mark.parametrize("family", ["llama", "granite", "olmo2", "glm", "phi3", "mixtral", "qwen3_moe"])
def test_types_of_layers_where_all_are_alike(family):
    assert "layer_types = ['full_attention'" in refusal(family, layer_types=["full_attention"] * 2)


# --- windows ---


def test_a_mistral_with_types_of_layers_is_read_as_ministral():
    types = ["full_attention", "sliding_attention"]
    assert config("mistral", sliding_window=8, layer_types=types).sliding_layers == (1,)
    assert config("mistral", sliding_window=8, layer_types=None).sliding_layers == (0, 1)
    assert "sets sliding_window = None" in refusal("mistral", sliding_window=None, layer_types=types)


@pytest.mark.parametrize("window", [{"sliding_window": 512}, {"sliding_window": 4096}, {}])
def test_layers_keep_their_rotations_where_no_text_exceeds_their_window(window):
    changes = {"sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    found = config("gemma3_text", **changes, **window)
    assert found.window == 512
    assert [found.of_layer(layer).rope for layer in (0, 1)] == [Rope(1e4, 8), Rope(1e6, 8)]


# --- rotations ---


def test_two_places_that_differ():
    new = {"rope_type": "default", "rope_theta": 1e6}
    message = "config.json holds rope_scaling and rope_parameters, which differ; allowed: one of them, or both alike."
    assert refusal("qwen3", rope_parameters=new, rope_scaling=YARN) == message
    assert refusal("gemma3_text", rope_parameters={"full_attention": new}, rope_scaling=YARN) == message
    both = {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": YARN, "rope_theta": 1e6}
    assert config("qwen3", **both) == config("qwen3", rope_scaling=YARN, rope_theta=1e6)
    assert "rope_parameters.full_attention" in refusal("qwen3", rope_parameters={"full_attention": new})


def test_a_null_factor_of_yarn_is_the_ratio_of_lengths():
    lengths = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    assert config("qwen3", rope_scaling={**lengths, "factor": None}) == config(
        "qwen3", rope_scaling={**lengths, "factor": 4.0}
    )
    assert "lacks 'factor'" in refusal("qwen3", rope_scaling=lengths)


@pytest.mark.parametrize("empty", [{"rope_scaling": {}}, {"rope_scaling": None}, {}])
def test_gpt_oss_without_rotations(empty):
    yarn = {**YARN, "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    assert config("gpt_oss", **empty) == config("gpt_oss", rope_scaling=yarn, rope_theta=150000.0)
    plain = config("gpt_oss", rope_parameters={}).rope
    assert plain is not None
    assert (plain.theta, plain.scaling) == (150000.0, None)


@pytest.mark.parametrize(
    ("scaling", "found"),
    [
        (YARN, YarnScaling(4.0, 512, 0.1 * math.log(4) + 1)),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            Llama3Scaling(8.0, 1.0, 4.0, 512),
        ),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, LongScaling((1.0,) * 4, 1.0)),
        ({"rope_type": "dynamic", "factor": 4.0}, None),
    ],
)
def test_scalings_without_an_original_length_take_the_longest(scaling, found):
    rope = config("llama", rope_scaling=scaling).rope
    assert rope is not None
    assert rope.scaling == found


def test_an_odd_number_of_rotated_dimensions():
    message = (
        "config.json rotates 9 of 9 dimensions of a head (head_dim, partial_rotary_factor); allowed: an even number."
    )
    assert refusal("llama", head_dim=9) == message
    assert "rotates 3 of 8 dimensions" in refusal("glm", partial_rotary_factor=0.4)


@pytest.mark.wrong_arguments
def test_short_factors_of_longrope():
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    whole = config("phi3", rope_scaling=scaling, original_max_position_embeddings=64)
    attention = math.sqrt(1 + math.log(512 / 64) / math.log(64))
    assert whole.rope == Rope(1e4, 8, scaling=LongScaling((2.0,) * 4, attention, (1.0,) * 4, 64))
    assert limited(whole, 65).rope == whole.rope
    short = limited(whole, 64)
    assert (short.max_positions, short.rope) == (64, Rope(1e4, 8, scaling=LongScaling((1.0,) * 4, attention)))
    for wrong in (0, 513, 2.0):
        with pytest.raises(ValueError, match=rf"^max_positions must be .* from 1 to the model's 512, got {wrong}\.$"):
            limited(whole, wrong)  # pyright: ignore[reportArgumentType]


# --- experts ---


def test_two_names_of_the_number_of_experts():
    for family in ("mixtral", "gpt_oss", "qwen3_moe"):
        found = config(family, num_experts=4, num_experts_per_tok=2).experts
        assert found is not None
        assert found.count == 4
        assert found == config(family, num_local_experts=4, num_experts_per_tok=2).experts
        assert "num_experts = 4 and num_local_experts = 8" in refusal(family, num_experts=4, num_local_experts=8)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_more_experts_than_any_model_has_are_refused_at_once(family):
    with bounded(10):
        message = refusal(family, num_hidden_layers=1024, num_local_experts=1024, num_experts_per_tok=2)
    assert message == "config.json has 1024 experts in each of 1024 layers (num_hidden_layers); allowed: 65536 in all."


# --- the ends of texts ---


@pytest.mark.parametrize(
    ("family", "ids"),
    [
        ("llama", (2,)),
        ("opt", (2,)),
        ("phi3", (32000,)),
        ("olmo2", (50279,)),
        ("glm", (151329, 151336, 151338)),
        ("glm4", (151329, 151336, 151338)),
        ("qwen3", ()),
    ],
)
def test_without_ends_a_file_has_those_of_its_class(family, ids):
    changes = {name: value for name, value in SMALL.items() if name != "vocab_size"} | {"model_type": family}
    assert registry.from_hf({**changes, "vocab_size": 151552}).eos_ids == ids
    assert registry.from_hf({**changes, "vocab_size": 3}).eos_ids == tuple(token for token in ids if token < 3)
    stated = registry.from_hf({**changes, "vocab_size": 151552, "eos_token_id": None}).eos_ids
    assert stated == (ids if family in ("glm", "glm4") else ())


def test_the_first_that_names_ends_and_the_tokenizer():
    assert end_ids(9, None, [3, 4], 5) == (3, 4)
    assert end_ids(9, 7, [3, 4], tokenizer=8) == (7, 8)
    assert end_ids(9, 7, tokenizer=7) == (7,)
    assert end_ids(9, None, None) == ()
    with pytest.warns(UserWarning, match=r"^eos_token_id = 9 is left out: it is no token of the vocabulary, 0 to 8\.$"):
        assert end_ids(9, [9, 2], 5) == (2,)
    with pytest.warns(UserWarning, match="eos_token_id = -1 is left out"):
        assert end_ids(9, -1, 5) == (5,)


def test_a_wrapper_says_how_its_texts_end():
    inside = {**SMALL, "eos_token_id": 1, "bos_token_id": 7}
    found = registry.from_hf({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": inside})
    assert (found.eos_ids, found.bos_id) == ((1, 106), 7)
    assert registry.from_hf({"model_type": "gemma3", "text_config": inside}).eos_ids == (1,)


# --- activations ---


@pytest.mark.parametrize(
    ("name", "by_definition"),
    [
        ("quick_gelu", lambda x: x / (1 + np.exp(-1.702 * x))),
        ("relu2", lambda x: np.maximum(x, 0) ** 2),
        ("mish", lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    ],
)
def test_activations_that_few_files_name(name, by_definition):
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    ours = jax.jit(ACTIVATIONS[config("llama", hidden_act=name).activation])(jnp.asarray(x))
    np.testing.assert_allclose(ours, by_definition(x.astype(np.float64)), rtol=1e-5, atol=1e-6)
