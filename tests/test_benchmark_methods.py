"""The benchmark of compression times runs, on shapes that a CPU can do; what it measures is for accelerators."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks" / "benchmark_methods.py"


def test_the_benchmark_prints_its_table_and_claims(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("benchmark_methods", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    needed = ("SnapKV", "ChunkKV", "ChunkKV, reuse 4", "H2O")
    monkeypatch.setattr(script, "METHODS", {name: script.METHODS[name] for name in needed})
    # With reuse one layer of four scores; the three others are programs of their own.
    compress, scored = script.compress_layers, []
    monkeypatch.setattr(script, "compress_layers", lambda *x: scored.append(x[-1].selects) or compress(*x))
    script.main(tokens=256, repeats=1, scale=32)
    printed = capsys.readouterr().out
    assert printed.startswith("jax ")
    for name in needed:
        assert f"| {name} | " in printed
    assert "times as fast as without (aim: 2.5 or more)" in printed
    assert "times SnapKV's (aim: 2 or less)" in printed
    assert scored.count(False) == 3
    assert jnp.bfloat16 == script.random_weights(script.llama(32))["attention"]["q"].dtype
