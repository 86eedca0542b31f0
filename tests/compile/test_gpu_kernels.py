"""The GPU kernels at real shapes compiled for an H100 that is not there: down to machine code, no GPU needed."""

from pathlib import Path

import pytest

from tests.support.processes import compiled_for_a_gpu


@pytest.fixture(scope="module")
def programs():
    return compiled_for_a_gpu(Path(__file__).with_name("gpu_programs.py"), "gpu_kernels")


def test_every_op_is_a_kernel(programs):
    """Compiled at all, and not what the dispatch falls back to."""
    assert all(program["kernels"] > 0 for program in programs.values()), programs


def test_profiles_tell_whose_a_kernel_is(programs):
    """By the op in their names."""
    assert programs["index scores"]["names"] == ["index_scores_products"]
    assert programs["select"]["names"] == ["select_rows_kernel"]
    assert programs["recalled attention"]["names"] == ["recalled_attention_attend", "recalled_attention_combine"]


def test_appending_works_in_place(programs):
    """One launch, and all the slots are those that were given."""
    for name in ("append", "append a question", "append float16"):
        program = programs[name]
        assert program["kernels"] == 1, name
        assert program["temporary"] == 0, name
        assert program["alias"] == 8 * 13312 * (2 * 2 * 128 + 4 + 4), name
    program = programs["append with scores"]
    assert program["kernels"] == 1
    assert program["temporary"] <= 5 * 8  # the addresses of its results
    assert program["alias"] == 8 * 13312 * (2 * 2 * 128 + 4 + 4 + 4)


def test_codes_are_read_and_written_where_they_lie(programs):
    """One launch appends; attention has the parts of its splits beside the cache, and no row in numbers."""
    for name, width in (("int8", 128), ("float8_e4m3", 128), ("int4", 64)):
        program = programs[f"append {name}"]
        assert (program["kernels"], program["temporary"]) == (1, 0), name
        assert program["alias"] == 8 * 13312 * (2 * (width + 4) + 4 + 4), name
        assert programs[f"attention of {name}"]["temporary"] < 0.2 * 8 * 13312 * 2 * width, name


def test_weights_in_codes_are_multiplied_as_they_lie(programs):
    """One kernel; beside it there are sums of splits of the inputs alone, where numbers would take megabytes."""
    for kind, most in (
        ("int8", 8 * 4096),
        ("a head in int8", 0),
        ("int4", 4 * 14336),
        ("fp8", 8 * 16 * 4096),
        ("mxfp4", 15 * 16 * 2880),
    ):
        program = programs[f"product of {kind}"]
        assert program["names"] == ["quantised_linear_kernel"], kind
        assert program["temporary"] <= 4 * most, kind


def test_codes_are_merged_where_they_lie(programs):
    """No row in numbers: beside the slots there are lists of edges alone."""
    for name, width in (("int8", 128), ("float8_e4m3", 128), ("int4", 64)):
        program, slots = programs[f"merge {name}"], 8 * 13312
        assert program["alias"] == slots * (2 * (width + 4) + 4 + 4), name
        assert program["temporary"] <= slots * 16, name
        assert programs[f"matching of {name}"]["temporary"] < 2**12, name


def test_attention_accumulates_without_a_square(programs):
    """Beside the sums only a number per query: the log-sum-exps."""
    assert programs["accumulated attention"]["temporary"] <= 1.1 * 32 * 32768 * 4


def test_rows_move_up_in_the_same_memory(programs):
    """Of a batch. No thread writes where another one has yet to read."""
    program = programs["rows that move up"]
    assert program["waits"]
    assert not programs["gather"]["waits"]
    assert program["names"] == ["gather_rows_move_up"]
    assert program["temporary"] == 0
    assert program["alias"] == 32 * 8 * 13312 * 128
