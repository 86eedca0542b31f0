"""The benchmark of quantised rows tries itself on a CPU; what it measures is for accelerators."""

from argparse import Namespace

from tests.support.scripts import script


def test_a_line_says_what_was_checked():
    benchmark = script("benchmarks/benchmark_quantised.py")
    options = Namespace(sizes="", sweep=False, loops=1, turn=1)
    cells = [cell.strip() for cell in benchmark.line(options, 1e9, 1, 64, "int4").strip("|").split("|")]
    assert cells[:3] == ["int4", "1", "64"]
    assert float(cells[5]) < benchmark.WORST < float(cells[6])
    assert list(benchmark.tried(Namespace(sizes="block=64,span=512", sweep=False))) == [{"block": 64, "span": 512}]
