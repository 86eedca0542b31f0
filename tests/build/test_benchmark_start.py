"""The model that the benchmark of starts writes for itself, in small."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.checkpoints.loading import load
from tests.support.checkpoint_files import LLAMA
from tests.support.scripts import script


def test_a_model_with_holes_is_loaded(tmp_path, monkeypatch):
    benchmark = script("benchmarks/benchmark_start.py")
    monkeypatch.setattr(benchmark, "RANDOM", 64)
    (tmp_path / "published.json").write_text(json.dumps(LLAMA))
    model = load(benchmark.written(tmp_path / "model", tmp_path / "published.json"), dtype="bfloat16")
    numbers = np.asarray(model.params["embed"], np.float32).ravel()
    assert float(jnp.std(numbers[:64])) == pytest.approx(1, rel=0.3)
    assert not numbers[64:].any()
