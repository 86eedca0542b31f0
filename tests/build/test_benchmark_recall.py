"""How the benchmark of recall reads a profile; what it measures is for accelerators."""

import pytest

from tests.support.scripts import script


def test_no_time_is_counted_twice():
    """The second kernel begins before the first has ended, the third waits; streams do not see one another."""
    benchmark = script("benchmarks/benchmark_recall.py")
    one = [("b", 8.0, 14.0), ("a", 0.0, 10.0), ("a", 20.0, 23.0)]
    times = benchmark.summed([one, [("b", 5.0, 6.0)]])
    assert set(times) == {"a", "b"}
    assert times["a"] == pytest.approx((13e-9, 13e-9))
    assert times["b"] == pytest.approx((5e-9, 7e-9))
