"""Families beyond Llama's decoder: logits of a reference in NumPy, rows of a batch alone, with and without compression.

`tests/parity` compares the same with transformers, where torch is installed.
"""

import functools
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.blocks.rope import decode, encode
from clusterkv_jax.learned.expected import turned
from clusterkv_jax.models import registry
from clusterkv_jax.models.config import LongScaling, Rope, YarnScaling
from clusterkv_jax.models.decoder import forward
from tests.support.checkpoint_files import FAMILIES, LLAMA, random_tensors, write
from tests.support.reference_decoder import reference_logits
from tests.support.tiny import prefill, prompt

_BASE = {
    **LLAMA,
    "vocab_size": 61,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.3, 2.0, 4.0, 9.0, 25.0],
}
_GEMMA = {
    "head_dim": 24,
    "query_pre_attn_scalar": 16,
    "sliding_window": 50,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 256, "truncate": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "phi3": {
        **_BASE,
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "rope_scaling": _LONG,
        "original_max_position_embeddings": 64,
        "sliding_window": 1024,
    },
    "llama-yarn": {
        **_BASE,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    },
    "granite": {
        **_BASE,
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "olmo2": {**_BASE, "model_type": "olmo2", "rope_theta": 5e5},
    "mistral": {**_BASE, "model_type": "mistral", "sliding_window": 50},
    "gemma2": {**_BASE, **_GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 4.0},
    "gemma3": {
        **_BASE,
        **_GEMMA,
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt-oss": {
        **_BASE,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 50,
        "swiglu_limit": 2.0,
        "rope_theta": 1.5e5,
        "rope_scaling": _YARN,
    },
}
# What each file may not be mistaken for.
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("phi3", {"rope_scaling": {**_LONG, "long_factor": [1.0, 1.3, 2.0, 4.0, 9.1, 25.0]}}),
    ("phi3", {"original_max_position_embeddings": 65}),
    ("llama-yarn", {"rope_scaling": {**PUBLISHED["llama-yarn"]["rope_scaling"], "factor": 8.01}}),
    ("llama-yarn", {"rope_scaling": {**PUBLISHED["llama-yarn"]["rope_scaling"], "beta_slow": 0.2}}),
    ("llama-yarn", {"rope_scaling": {**PUBLISHED["llama-yarn"]["rope_scaling"], "attention_factor": 1.2}}),
    ("granite", {"embedding_multiplier": 6.01}),
    ("granite", {"attention_multiplier": 0.301}),
    ("granite", {"residual_multiplier": 0.221}),
    ("granite", {"logits_scaling": 8.01}),
    ("olmo2", {"rms_norm_eps": 1e-4}),
    ("mistral", {"sliding_window": 51}),
    ("gemma2", {"attn_logit_softcapping": 4.1}),
    ("gemma3", {"rope_local_base_freq": 1.1e4}),
    ("gpt-oss", {"sliding_window": 51}),
    ("gpt-oss", {"swiglu_limit": 2.1}),
    ("gpt-oss", {"swiglu_alpha": 1.71}),
    ("gpt-oss", {"num_experts_per_tok": 1}),
    ("gpt-oss", {"rope_scaling": {**_YARN, "truncate": True}}),
]


@functools.cache
def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Weights large enough that positions, norms and multipliers tell."""

    def scaled(x: np.ndarray) -> np.ndarray:
        return 1 + 0.3 * x if x.ndim == 1 else 0.2 * x

    return {key: scaled(x).astype(np.float32) for key, x in random_tensors(PUBLISHED[name]).items()}


@functools.cache
def model_of(name: str, changes: str = "{}") -> ckv.Model:
    """A model that is loaded from files, with other settings than the weights were made for."""
    with tempfile.TemporaryDirectory() as folder:
        published = PUBLISHED[name] | json.loads(changes)
        layers = [f".layers.{number}." for number in range(published["num_hidden_layers"], 2)]
        tensors = {key: x for key, x in tensors_of(name).items() if not any(layer in key for layer in layers)}
        return ckv.load(write(Path(folder) / "m", published, tensors))


def relative(model: ckv.Model, name: str, length: int) -> float:
    """Distance of the logits of so many tokens from the reference's."""
    tokens = prompt(0, length)
    want = reference_logits(PUBLISHED[name], tensors_of(name), tokens)
    logits = jax.jit(forward, static_argnums=1)(model.params, model.config, jnp.asarray([tokens], jnp.int32))
    return float(np.linalg.norm(np.asarray(logits[0], np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_far_behind_the_original_length(name):
    assert relative(model_of(name), name, 600) <= 2e-5


@pytest.mark.parametrize(("name", "changes"), WRONG, ids=lambda part: part if isinstance(part, str) else "-".join(part))
def test_a_wrong_number_is_told(name, changes):
    assert relative(model_of(name, json.dumps(changes)), name, 200) > 2e-5


@pytest.mark.parametrize("part", ["sink_logits", "router_bias", "gate_bias", "up_bias", "down_bias"])
def test_a_wrong_sink_or_bias_is_told(part):
    model = model_of("gpt-oss")
    changed = jax.tree.map_with_path(
        lambda path, x: x * 1.01 if part in jax.tree_util.keystr(path) else x, model.params
    )
    assert relative(replace(model, params=changed), "gpt-oss", 200) > 2e-5


def test_rotations_that_lengthen_are_taken_back():
    rope, rng = Rope(1e4, 4, scaling=LongScaling((1.0, 3.0), 1.5)), np.random.default_rng(0)
    x, positions = jnp.asarray(rng.normal(size=(1, 3, 2, 6)), jnp.float32), jnp.asarray([[0, 7, 90]], jnp.int32)
    longer = encode(x, positions, rope)
    np.testing.assert_allclose(decode(longer, positions, rope), x, atol=1e-5)
    lengths = jnp.linalg.norm(longer[..., :4], axis=-1) / jnp.linalg.norm(x[..., :4], axis=-1)
    np.testing.assert_allclose(lengths, 1.5, rtol=1e-5)
    np.testing.assert_array_equal(longer[..., 4:], x[..., 4:])
    # One position ahead, the mean rotation is that position's own.
    ahead = turned(jnp.swapaxes(x, 1, 2)[:, :, :1], jnp.asarray([7]), 1, rope)
    np.testing.assert_allclose(ahead[0, :, 0], encode(x[:, :1], jnp.asarray([[7]]), rope)[0, 0], atol=1e-5)


@pytest.mark.parametrize("name", ["phi3", "granite", "olmo2"])
def test_rows_of_a_batch_are_the_rows_alone(name):
    """With all rows, the tokens of the model without a cache; with a quarter, those of a batch of one."""
    model, prompts = model_of(name, '{"num_hidden_layers": 1}'), [prompt(1, 90), prompt(2, 60)]
    full = ckv.generate(model, prompts, max_new_tokens=8).tokens
    for ids, new in zip(prompts, full, strict=True):
        text = jnp.asarray([[*ids, *new, *[0] * (90 - len(ids))]], jnp.int32)
        logits = jax.jit(forward, static_argnums=1)(model.params, model.config, text)[0]
        np.testing.assert_array_equal(jnp.argmax(logits[len(ids) - 1 : len(ids) + 7], axis=-1), new)
    method = ckv.CentroidKV(ckv.Budget(ratio=0.25), sinks=2, recent=8)
    both, alone = (ckv.generate(model, some, method=method, max_new_tokens=4) for some in (prompts, prompts[1:]))
    np.testing.assert_array_equal(both.tokens[1], alone.tokens[0])
    assert {rows for layer in alone.stats.kept_rows for rows in layer[0]} == {15}


def test_keys_that_are_not_rotated_stay_where_others_are_moved(tmp_path):
    published = FAMILIES["smollm3"]
    model = ckv.load(write(tmp_path / "m", published, random_tensors(published)))
    keys = []
    for rerotate in (False, True):
        method = ckv.StreamingLLM(ckv.Budget(tokens=12), rerotate=rerotate)
        cache, _ = prefill(method, prompt(0, 40), model=model, max_new_tokens=4)
        keys.append([layer.keys for layer in cache.layers])
    (there, still), (moved, stayed) = keys
    assert not np.allclose(there, moved)
    np.testing.assert_array_equal(still, stayed)


def test_a_layer_that_predicts_more_tokens_is_not_read(tmp_path):
    published = FAMILIES["glm4_moe"]
    tensors = random_tensors(published) | {"model.layers.2.eh_proj.weight": np.ones((4, 4), np.float32)}
    assert len(ckv.load(write(tmp_path / "m", published, tensors)).params["layers"]) == 2


# --- configurations ---

_LONGER = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0],
    "long_factor": [1.0, 2.0],
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("old", "new", "positions", "scaling"),
    [
        (_YARN, _YARN, 512, YarnScaling(4.0, 512, 0.1 * math.log(4) + 1)),
        (
            {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False},
            {**_YARN, "attention_factor": 1.0, "beta_fast": 16, "truncate": False},
            512,
            YarnScaling(4.0, 512, 1.0, 16.0, truncate=False),
        ),
        (
            {**_LONGER, "rope_type": None, "type": "su"},
            _LONGER,
            4096,
            LongScaling((1.0, 2.0), math.sqrt(2), (1.0, 1.0), 64),
        ),
        (_LONGER, _LONGER, 64, LongScaling((1.0, 1.0), 1.0)),
    ],
)
def test_both_styles_of_scalings(old, new, positions, scaling):
    published = {**LLAMA, "max_position_embeddings": positions}
    a = registry.from_hf({**published, "rope_scaling": old, "rope_theta": 5e5})
    assert a == registry.from_hf({**published, "rope_parameters": {**new, "rope_theta": 5e5}})
    assert a.rope is not None
    assert (a.rope.theta, a.rope.scaling, a.rope.magnitude) == (5e5, scaling, scaling.attention_factor)


def test_yarn_lengthens_the_longest_text():
    """As Qwen publishes it: the original length, and a factor."""
    published = {**LLAMA, "max_position_embeddings": 512, "rope_scaling": _YARN}
    assert registry.from_hf(published).max_positions == 2048
    assert registry.from_hf({**published, "max_position_embeddings": 4096}).max_positions == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' in config.json lacks 'long_factor'"),
        ({"rope_scaling": {**_LONGER, "long_factor": None}}, "'longrope' in config.json lacks 'long_factor'"),
        (
            {"rope_scaling": {**_LONGER, "long_factor": [1.0]}},
            "LongScaling has 1 factors; 4 rotated dimensions need 2.",
        ),
        (
            {"rope_scaling": {**_LONGER, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings = 1 is not supported; allowed: at least 2.",
        ),
        ({"rope_scaling": {**_LONGER, "attention_factor": 0}}, "'rope_scaling.attention_factor': Expected float"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' in config.json lacks 'factor'"),
        (
            {"rope_scaling": {**_YARN, "beta_fast": 2, "beta_slow": 2}},
            "YarnScaling beta_fast must be a number above beta_slow = 2.0, got 2.0.",
        ),
        ({"rope_theta": 1, "rope_scaling": _YARN}, "Rope theta must be above 1 for YaRN, got 1.0."),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ValueError, match=r".") as error:
        registry.from_hf({**LLAMA, **changes})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
