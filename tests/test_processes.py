"""A compiler that dies of a signal is started again; a script with an error of its own is not."""

import pytest

from tests.support.processes import compiled

SCRIPT = """
import os, pathlib, signal, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + ".")
if len(starts.read_text()) <= int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGSEGV)
if sys.argv[3] == "wrong":
    raise ValueError("a shape of ours")
print("compiling ...")
print('{"kernels": 3}')
"""


@pytest.fixture
def start(tmp_path):
    """A script that dies in its first runs, and how often it was started."""
    script, starts = tmp_path / "programs.py", tmp_path / "starts"
    script.write_text(SCRIPT)
    starts.write_text("")
    return lambda deaths, then: compiled(script, starts, deaths, then), lambda: len(starts.read_text())


def test_what_it_prints_last(start):
    run, starts = start
    assert run(0, "right") == {"kernels": 3}
    assert starts() == 1


def test_a_compiler_that_dies_is_started_once_more(start):
    run, starts = start
    with pytest.warns(UserWarning, match=r"programs\.py is started once more: signal SIGSEGV[\s\S]*most recent call"):
        assert run(1, "right") == {"kernels": 3}
    assert starts() == 2


def test_a_compiler_that_dies_three_times_fails(start):
    run, starts = start
    with pytest.warns(UserWarning, match="once more"), pytest.raises(AssertionError, match="SIGSEGV"):
        run(3, "right")
    assert starts() == 3


def test_an_error_of_the_script_fails_at_once(start):
    run, starts = start
    with pytest.raises(AssertionError, match=r"exit status 1[\s\S]*a shape of ours"):
        run(0, "wrong")
    assert starts() == 1
