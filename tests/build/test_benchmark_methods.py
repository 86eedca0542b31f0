"""The benchmark of compression times runs, on shapes that a CPU can do; what it measures is for accelerators."""

import jax.numpy as jnp

from tests.support.scripts import script


def test_the_benchmark_prints_its_table_and_claims(monkeypatch, capsys):
    benchmark = script("benchmarks/benchmark_methods.py")
    names = ("SnapKV", "ChunkKV", "ChunkKV, reuse 4", "H2O")
    monkeypatch.setattr(benchmark, "IN_FLIGHT", 1)
    monkeypatch.setattr(benchmark, "METHODS", {name: benchmark.METHODS[name] for name in names})
    # With reuse one layer of four scores; the three others are programs of their own.
    compress, scored = benchmark.compress_layers, []
    monkeypatch.setattr(benchmark, "compress_layers", lambda *x: scored.append(x[-1].selects) or compress(*x))
    benchmark.main(tokens=256, repeats=1, scale=32)
    printed = capsys.readouterr().out
    assert printed.startswith("jax ")
    for name in names:
        assert f"| {name} | " in printed
    assert "times as fast as without (aim: 2.5 or more)" in printed
    assert "times SnapKV's (aim: 2 or less)" in printed
    assert scored.count(False) == 3
    assert jnp.bfloat16 == benchmark.random_weights(benchmark.llama(32))["attention"]["q"].dtype
