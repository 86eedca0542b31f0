"""How the benchmark of recall reads a profile; what it measures is for accelerators."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks" / "benchmark_recall.py"


def test_no_time_is_counted_twice():
    """The second kernel begins before the first has ended, the third waits; streams do not see one another."""
    spec = importlib.util.spec_from_file_location("benchmark_recall", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    one = [("b", 8.0, 14.0), ("a", 0.0, 10.0), ("a", 20.0, 23.0)]
    found = script.summed([one, [("b", 5.0, 6.0)]])
    assert set(found) == {"a", "b"}
    assert found["a"] == pytest.approx((13e-9, 13e-9))
    assert found["b"] == pytest.approx((5e-9, 7e-9))
