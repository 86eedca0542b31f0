"""Families beyond Llama's decoder: logits of a reference in NumPy, rows of a batch alone, with and without compression.

`tests/parity` compares the same with transformers, where torch is installed.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.models.transformer import forward
from tests.support.checkpoint_files import LLAMA, random_tensors, write
from tests.support.reference_decoder import reference_logits
from tests.support.tiny import prompt

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
PUBLISHED: dict[str, dict[str, Any]] = {
    "phi3": {
        **_BASE,
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "rope_scaling": _LONG,
        "original_max_position_embeddings": 64,
        "sliding_window": 1024,
    },
}
# What each file may not be mistaken for.
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("phi3", {"rope_scaling": {**_LONG, "long_factor": [1.0, 1.3, 2.0, 4.0, 9.1, 25.0]}}),
    ("phi3", {"original_max_position_embeddings": 65}),
]


@functools.cache
def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Weights large enough that positions, norms and multipliers tell."""

    def scaled(x: np.ndarray) -> np.ndarray:
        return 1 + 0.3 * x if x.ndim == 1 else 0.2 * x

    return {key: scaled(x).astype(np.float32) for key, x in random_tensors(PUBLISHED[name]).items()}


@functools.cache
def model_of(name: str, changes: str = "{}") -> ckv.Model:
    with tempfile.TemporaryDirectory() as folder:
        published = PUBLISHED[name] | json.loads(changes)
        return ckv.load(write(Path(folder) / "m", published, tensors_of(name)))


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_a_batch_are_the_rows_alone(name):
    """With all rows, the tokens of the model without a cache; with a quarter, those of a batch of one."""
    model, prompts = model_of(name), [prompt(1, 90), prompt(2, 60)]
    full = ckv.generate(model, prompts, max_new_tokens=8).tokens
    for ids, new in zip(prompts, full, strict=True):
        text = jnp.asarray([[*ids, *new, *[0] * (90 - len(ids))]], jnp.int32)
        logits = jax.jit(forward, static_argnums=1)(model.params, model.config, text)[0]
        np.testing.assert_array_equal(jnp.argmax(logits[len(ids) - 1 : len(ids) + 7], axis=-1), new)
    method = ckv.CentroidKV(ckv.Budget(ratio=0.25), sinks=2, recent=8)
    both, alone = (ckv.generate(model, some, method=method, max_new_tokens=8) for some in (prompts, prompts[1:]))
    np.testing.assert_array_equal(both.tokens[1], alone.tokens[0])
    assert {rows for layer in alone.stats.kept_rows for rows in layer[0]} == {15}
