"""The benchmark of conversions, with a model of a few megabytes."""

import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.checkpoints.loading import load
from tests.support.checkpoint_files import LLAMA, same
from tests.support.scripts import script

pytest.importorskip("orbax.checkpoint")


def test_a_small_model(tmp_path, monkeypatch):
    benchmark = script("benchmarks/benchmark_convert.py")
    published = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}
    monkeypatch.setattr(benchmark, "PUBLISHED", published | {"hidden_size": 256, "intermediate_size": 512})
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    size = benchmark.write_model(source, 0.01)
    assert size == pytest.approx(10e6, rel=0.1)
    seconds, peak = benchmark.measured(benchmark.CONVERT, source, target)
    assert seconds > 0
    assert 0.05 < peak < 2
    benchmark.measured(benchmark.READ, target)
    model = load(target, dtype="bfloat16")
    assert same(model.params, load(source, dtype="bfloat16").params)
    assert float(jnp.std(model.params["embed"].astype(np.float32))) == pytest.approx(1, rel=0.05)
